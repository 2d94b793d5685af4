"""Weights of a manifest: a store of each data set, and the mixture that applies them."""

import json

import pytest

import batchloom
from batchloom import InputError, SettingsError
from batchloom.batches import read_mixture
from batchloom.cli import run_command_line
from batchloom.preparation import prepare_mixture
from preparation.stores import write_jsonl

TEXTS = {"sums": "one and one is two ", "notes": "a note about notes "}
WEIGHTED = """datasets:
  - {path: sums.jsonl, name: sums, weight: 3.0}
  - {path: more/notes.jsonl, weight: 1.0}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    for path, text in (("sums.jsonl", TEXTS["sums"]), ("more/notes.jsonl", TEXTS["notes"])):
        write_jsonl(tmp_path / path, [{"text": text * 20 + str(n)} for n in range(40)])
    (tmp_path / "weighted.yaml").write_text(WEIGHTED)
    (tmp_path / "plain.yaml").write_text(WEIGHTED.replace(", weight: 3.0", "").replace(", weight: 1.0", ""))
    monkeypatch.chdir(tmp_path)
    return tmp_path


OPTIONS = {"tokenizer": "bytes", "val_fraction": 0}


def measure_share(loader, tokenizer):
    """Return the share of the tokens of a run that are of the sums."""
    counts = dict.fromkeys(TEXTS, 0)
    for batch in loader:
        text = "".join(tokenizer.decode(row) for row in batch["input_ids"])
        counts["sums"] += text.count("one and one")
        counts["notes"] += text.count("a note about")
    return counts["sums"] / sum(counts.values())


def test_a_run_over_the_mixture_has_the_weights_of_the_manifest(home):
    result = prepare_mixture("weighted.yaml", out="mixed", **OPTIONS)
    assert list(result.stores) == ["sums", "notes"]
    mixture = read_mixture(result.path)
    assert mixture.weights == {"sums": 3.0, "notes": 1.0}
    loader = batchloom.Loader(mixture, seq_len=64, global_batch_size=4, steps=40, output="numpy", rank=0, world_size=1)
    tokenizer = batchloom.open_store("mixed/sums").tokenizer
    assert measure_share(loader, tokenizer) == pytest.approx(0.75, abs=0.02)
    # The stores are those of the data sets alone.
    alone = batchloom.prepare("sums.jsonl", out="alone", **OPTIONS)
    assert batchloom.open_store(alone.path).fingerprint == batchloom.open_store("mixed/sums").fingerprint
    assert not batchloom.open_store("mixed/sums").contents.weights
    again = prepare_mixture("weighted.yaml", out="mixed", **OPTIONS)
    assert all(store.already_done for store in again.stores.values())


def test_without_weights_shares_follow_the_sizes(home):
    result = prepare_mixture("plain.yaml", out="mixed", **OPTIONS)
    assert read_mixture(result.path).weights == "size"
    result = prepare_mixture(["sums.jsonl", "more/notes.jsonl"], out="files", **OPTIONS)
    assert sorted(result.stores) == ["notes", "sums"]


def test_the_command_makes_a_mixture_that_trains(home, capsys):
    arguments = ["prepare", "weighted.yaml", "--separate", "--out", "mixed", "--tokenizer", "bytes"]
    assert run_command_line([*arguments, "--dry-run"]) == 0
    assert not (home / "mixed/mixture.yaml").exists()
    assert run_command_line(arguments) == 0
    out = capsys.readouterr().out
    assert "batchloom train --mixture mixed/mixture.yaml mixes them by their weights." in out
    assert run_command_line([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mixture"] == "mixed/mixture.yaml"
    assert [store["already_done"] for store in facts["stores"].values()] == [True, True]
    run = ["--out", "run", "--seq-len", "32", "--global-batch-size", "2", "--max-iters", "1", "--device", "cpu"]
    assert run_command_line(["train", "--mixture", "mixed/mixture.yaml", *run]) == 0


def test_a_loader_says_that_recorded_weights_are_not_applied(home, caplog):
    options = {"seq_len": 64, "global_batch_size": 4, "output": "numpy"}
    for manifest, weights in (("weighted.yaml", "(sums 3, more/notes.jsonl 1)"), ("plain.yaml", "")):
        caplog.clear()
        store = batchloom.open_store(batchloom.prepare(manifest, out=manifest[:-5], **OPTIONS).path)
        caplog.clear()
        next(iter(batchloom.Loader(store, **options, rank=1, world_size=2)))
        assert "not applied" not in caplog.text
        next(iter(batchloom.Loader(store, **options, rank=0, world_size=2)))
        assert (f"{weights} are not applied" in caplog.text) is bool(weights)
        assert ("--separate --out DIR, then train --mixture DIR/mixture.yaml" in caplog.text) is bool(weights)


def test_preferences_are_no_source_of_a_mixture(home):
    write_jsonl(home / "more/notes.jsonl", [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(40)])
    with pytest.raises(InputError, match=r"more/notes.jsonl holds preference pairs: a loader would also train the"):
        prepare_mixture("weighted.yaml", out="mixed", **OPTIONS)
    assert not (home / "mixed/notes/dataset_metadata.json").exists()


PROBLEMS = {
    "one weight": (WEIGHTED.replace(", weight: 1.0", ""), {}, "weight: missing for notes; give every data set one"),
    "equal names": (WEIGHTED.replace("path: more/notes.jsonl", "path: more/notes.jsonl, name: sums"), {}, "sums"),
    "no name of a folder": (WEIGHTED.replace("name: sums", "name: a/b"), {}, "'a/b' is no name of a folder"),
    "a learned tokenizer": (WEIGHTED, {"tokenizer": "train:300"}, "'train:300' would learn one for each store"),
    "a remote folder": (WEIGHTED, {"out": "s3://bucket/x"}, "out: 's3://bucket/x' is remote"),
    "an append": (WEIGHTED, {"append": True}, "append: belongs to one store"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_invalid_requests_are_refused_before_work(home, name):
    manifest, options, message = PROBLEMS[name]
    (home / "bad.yaml").write_text(manifest)
    with pytest.raises(SettingsError, match=message):
        prepare_mixture("bad.yaml", **{"out": "bad", **OPTIONS, **options})
    assert not (home / "bad").exists()


def test_equal_names_of_files_are_refused(home):
    write_jsonl(home / "more/sums.jsonl", [{"text": "x"}])
    with pytest.raises(SettingsError, match="inputs: 2 are called 'sums'; give each a name: in a manifest"):
        prepare_mixture(["sums.jsonl", "more/sums.jsonl"], out="bad", **OPTIONS)
