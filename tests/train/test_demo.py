"""The demo, with few steps."""

import pytest

from batchloom import open_store
from batchloom.cli.main import run
from batchloom.train.settings import named_config

# Enough to come below the unigram entropy; the real one takes six times as many.
FEW = 40


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "demo"


def test_it_learns_real_text_and_shows_every_stage(demo, capsys):
    assert named_config("tiny")["steps"] > FEW
    assert run(["demo", "--out", str(demo), "--steps", str(FEW)]) == 0
    said = capsys.readouterr().out
    for stage in (
        f"$ batchloom prepare {demo}/text --out {demo}/store --tokenizer train:4096",
        f"$ batchloom check {demo}/store",
        ">>> loader = batchloom.Loader(",
        f"$ batchloom train --data {demo}/store --out {demo}/run --max-iters {FEW}",
        "the unigram entropy, is ",
        "def ",
        f"Loss curve: {demo}/run/loss.png",
    ):
        assert stage in said
    assert (demo / "run" / "loss.png").is_file()
    store = open_store(demo / "store")
    topics = sum(store[n].origin.source.endswith(".txt") for n in range(len(store)))
    modules = sum(store[n].origin.source.endswith(".py") for n in range(len(store)))
    assert min(topics, modules) > 50
    assert topics + modules == len(store)


def test_again_in_its_own_folder_and_too_short_to_learn(demo, capsys):
    assert run(["demo", "--out", str(demo), "--steps", "1"]) == 1
    shown = capsys.readouterr()
    assert "The store was finished already" in shown.out
    assert "The run of an earlier demo is replaced" in shown.out
    assert "is not below the unigram entropy" in shown.err
    assert "Traceback" not in shown.err


def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert run(["demo", "--out", str(tmp_path)]) == 1
    assert "not a demo's" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["run", "run.json"]
