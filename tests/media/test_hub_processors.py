"""Processors of the Hub, simulated by a loopback server: cache and offline use."""

import json
import os
import subprocess
import sys

import pytest

import batchloom
from media.processors import PROCESSORS, save_processor
from media.sample_media import write_images
from processes import run_module
from tokens.model_hub import serve_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_processor(PROCESSORS["llava"](), tmp_path_factory.mktemp("processors") / "llava")


@pytest.fixture(scope="module")
def hub(folder):
    """Server with org/llava, and org/text, which holds no processor."""
    files = {("org/llava", path.name): path.read_bytes() for path in folder.iterdir()}
    files[("org/text", "tokenizer.json")] = (folder / "tokenizer.json").read_bytes()
    with serve_models(files) as address:
        yield address


def run_job(home, environment, *words):
    """Run ``prepare`` in a separate process with ``home`` as the Hub's folder."""
    hub_settings = {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
    }
    return run_module("media.prepare_from_hub", "prepare", *words, env=hub_settings | environment)


def run_prepare(processor, source, out, home, **environment):
    options = ["--processor", processor, "--tokenizer", processor, "--val-fraction", "0", "--out", str(out)]
    return run_job(home, environment, source, *options)


def read_processor_name(store):
    return batchloom.open_store(store).manifest.recipe["reading"]["media"]["processor"]


@pytest.mark.slow
def test_from_the_hub_and_then_from_the_cache(hub, folder, tmp_path):
    source = write_images(tmp_path / "in", 3)
    online = run_prepare("org/llava", source, tmp_path / "online", tmp_path / "hub", HF_ENDPOINT=hub)
    assert online.returncode == 0, online.stderr
    offline = run_prepare("org/llava", source, tmp_path / "offline", tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    local = run_prepare(str(folder), source, tmp_path / "local", tmp_path / "none", HF_HUB_OFFLINE="1")
    assert local.returncode == 0, local.stderr
    stores = [batchloom.open_store(tmp_path / name) for name in ("online", "offline", "local")]
    assert len({store.manifest.processor.fingerprint for store in stores}) == 1
    assert len({store.fingerprint for store in stores}) == 1
    names = [read_processor_name(tmp_path / name) for name in ("online", "offline", "local")]
    assert names == ["org/llava", "org/llava", folder.name]
    repeated = run_prepare("org/llava", source, tmp_path / "online", tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert repeated.returncode == 0, repeated.stderr


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ("org/text", "org/text on the Hub has no processor_config.json or preprocessor_config"),
        ("org/none", "the Hub has no repository org/none"),
    ],
)
def test_missing_repositories_and_processors_are_reported(hub, tmp_path, processor, message):
    source = write_images(tmp_path / "in", 1)
    result = run_prepare(processor, source, tmp_path / "out", tmp_path / "hub", HF_ENDPOINT=hub)
    assert result.returncode == 1, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "give the folder that a processor's save_pretrained wrote" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_the_hub_serves_texts_of_data_sets_with_media(hub, tmp_path):
    """The type and the tokenizer of a language model, as lmms-engine's files name them."""
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    manifest = {
        "dataset_type": "qwen3_vl_iterable",
        "dataset_format": "jsonl",
        "dataset_path": "in.jsonl",
        "processor_config": {"processor_type": "org/text"},
    }
    (tmp_path / "sets.yaml").write_text(json.dumps(manifest))
    words = (tmp_path / "sets.yaml", "--val-fraction", "0", "--out", tmp_path / "out")
    result = run_job(tmp_path / "hub", {"HF_ENDPOINT": hub}, *map(str, words))
    assert result.returncode == 0, result.stderr
    store = batchloom.open_store(tmp_path / "out")
    assert len(store) == 1
    assert store.manifest.tokenizer.name == "org/text"


def test_without_network_and_cache(tmp_path):
    source = write_images(tmp_path / "in", 1)
    result = run_prepare("org/llava", source, tmp_path / "out", tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert result.returncode == 1, result.stderr
    assert "the Hub cannot be reached (HF_HUB_OFFLINE is set)" in " ".join(result.stderr.split())


def test_a_local_folder_comes_before_the_hub(folder, tmp_path, monkeypatch):
    source = write_images(tmp_path / "in", 1)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "llava").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    no_server = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    result = run_prepare("org/llava", source, "out", tmp_path / "hub", **no_server)
    assert result.returncode == 0, result.stderr
    assert read_processor_name(tmp_path / "out") == "llava"


@pytest.mark.slow
def test_a_fresh_process_takes_the_settings_of_the_hub(hub, tmp_path):
    source = write_images(tmp_path / "in", 1)
    hub_settings = {"HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"}
    options = ["--processor", "org/llava", "--tokenizer", "org/llava", "--out", str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, "-m", "batchloom", "prepare", str(source), *options],
        capture_output=True,
        text=True,
        env=os.environ | hub_settings,
    )
    assert result.returncode == 0, result.stderr
    assert read_processor_name(tmp_path / "out") == "org/llava"
