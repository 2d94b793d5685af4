"""The scripts of the pages "coming from": the one before, and the one after, with batchloom."""

import importlib.util
import json
import math
import runpy
from pathlib import Path

import pytest
import torch

import batchloom
from batchloom.tokens import resolve_tokenizer

SCRIPTS = Path(__file__).parents[2] / "docs/scripts"
NAMES = sorted(path.stem.removesuffix("_after") for path in SCRIPTS.glob("*_after.py"))
LIBRARIES = {"nanogpt": "numpy", "hf_datasets": "datasets", "litdata": "litdata"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [f"row {number} says something about {number * 7}" for number in range(300)]
    Path("input.txt").write_text("\n\n".join(texts))
    Path("train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("tokenizer.json").write_bytes(resolve_tokenizer("gpt2").json)
    torch.manual_seed(0)
    return tmp_path


def run_script(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "nanogpt" else [pytest.mark.slow]) for name in NAMES]
)
def test_the_script_after_trains_on_every_document(folder, name):
    values = run_script(f"{name}_after")
    loader = values["loader"]
    assert loader.state_dict()["position"] == len(loader) * 8
    assert len(batchloom.open_store("store")) == 300
    assert values["loss"].item() < math.log(values["size"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_script_before_runs(folder, name):
    if importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"{LIBRARIES[name]} is not installed")
    run_script(f"{name}_before")


@pytest.mark.parametrize("name", NAMES)
def test_the_script_after_is_not_longer(name):
    before, after = ((SCRIPTS / f"{name}_{when}.py").read_text().count("\n") for when in ("before", "after"))
    assert after < before
