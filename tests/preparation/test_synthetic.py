"""``prepare dummy``: a store of made-up documents that says so."""

import json
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import Progress

NAME = "dummy:documents=400,vocab=70,lengths=2-90,seed=3,kind=text"


def files_in(folder):
    return {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def test_the_documents_are_those_of_the_name(tmp_path):
    result = batchloom.prepare(NAME, out=tmp_path / "s", tokens_per_shard=4000, val_fraction=0.1)
    made = batchloom.open_store(NAME)
    assert (result.counts.documents, result.counts.tokens) == (400, made.tokens)
    found = {}
    for split in ("train", "val"):
        store = batchloom.open_store(tmp_path / "s", split)
        assert store.contents.synthetic
        assert not store.location.replicated
        for number in range(len(store)):
            found[store[number].provenance.record] = store[number].ids.tolist()
    assert found == {number: made[number].ids.tolist() for number in range(400)}
    verdict = batchloom.check(tmp_path / "s")
    assert (verdict.faults, verdict.data) == ([], "synthetic")
    assert "synthetic documents of subset train, and evaluates on the" in verdict.used
    assert result.subsets["train"].shards > 3


def test_the_manifest_says_it(tmp_path):
    import jsonschema

    batchloom.prepare(NAME, out=tmp_path / "s")
    manifest = json.loads((tmp_path / "s/dataset_metadata.json").read_text())
    schema = Path(__file__).parents[2] / "docs" / "manifest.schema.json"
    jsonschema.validate(manifest, json.loads(schema.read_text()))
    assert manifest["recipe"]["source"] == "synthetic"
    assert [(one["name"], one["kind"]) for one in manifest["sources"]] == [(NAME, "synthetic")]
    assert manifest["tokenizer"]["name"] == "none"


def test_the_same_command_succeeds_and_another_is_refused(tmp_path):
    out = tmp_path / "s"
    first = batchloom.prepare(NAME, out=out)
    before = files_in(out)
    again = batchloom.prepare(NAME, out=out)
    assert (first.already_done, again.already_done) == (False, True)
    assert files_in(out) == before
    other = tmp_path / "t"
    batchloom.prepare(NAME, out=other)
    different = {p for p, data in files_in(other).items() if data != before[p]}
    assert different == {Path("report.json")}
    with pytest.raises(StoreConflictError, match=r"another job \(seed: 3 -> 4\)"):
        batchloom.prepare(NAME.replace("seed=3", "seed=4"), out=out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(StoreConflictError, match="is not empty"):
        batchloom.prepare(NAME, out=tmp_path / "full")


def test_a_stopped_job_begins_anew_to_the_same_bytes(tmp_path):
    def stop(event):
        if isinstance(event, Progress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batchloom.prepare(NAME, out=tmp_path / "s", progress=stop)
    assert not (tmp_path / "s").exists()
    batchloom.prepare(NAME, out=tmp_path / "s")
    batchloom.prepare(NAME, out=tmp_path / "t")
    one, two = files_in(tmp_path / "s"), files_in(tmp_path / "t")
    assert [p for p in one if one[p] != two[p]] == [Path("report.json")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([NAME, "a.txt"], "which cannot be combined with other inputs"),
        ([NAME, "distributed_dummy"], "cannot be combined"),
        ([NAME, "--tokenizer", "bytes"], "--tokenizer: 'bytes' does not apply to synthetic data"),
        ([NAME, "--text-field", "t"], "--text-field: 't' does not apply"),
        ([NAME, "--split-on", "line"], "--split-on: 'line' does not apply"),
        ([NAME, "--template", "chatml"], "--template: 'chatml' does not apply"),
        (["dummy:vocab=70000", "--dtype", "uint16"], "uint16 cannot hold the 70,000 ids"),
        (["dummy:vocb=3"], "did you mean 'vocab'?"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, capsys, words, said):
    assert run_command_line(["prepare", *words, "--out", str(tmp_path / "s")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_file_of_that_name_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dummy").write_text("a text in a file of an odd name")
    result = batchloom.prepare("dummy", out="s", tokenizer="bytes", val_fraction=0.0)
    assert result.counts.documents == 1
    store = batchloom.open_store("s")
    assert not store.contents.synthetic
    assert store[0].text.startswith("a text")


def test_nothing_stands_in_for_a_missing_input(tmp_path, capsys):
    assert run_command_line(["prepare", str(tmp_path / "none.txt"), "--out", str(tmp_path / "s")]) == 1
    assert "There is no file or folder" in capsys.readouterr().err
    assert run_command_line(["prepare", "x.txt", "--out", "s", "--if-missing", "synthetic"]) == 2
    assert run_command_line(["prepare", "dumy", "--out", str(tmp_path / "s")]) == 1
    assert "did you mean 'dummy'" in capsys.readouterr().err


def test_ids_reach_as_far_as_the_vocabulary(tmp_path):
    batchloom.prepare("dummy:documents=9,vocab=70000", out=tmp_path / "s", val_fraction=0.0)
    store = batchloom.open_store(tmp_path / "s")
    assert store.dtype == np.dtype("<i4")
    assert batchloom.check(store.path).sound
