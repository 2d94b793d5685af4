"""``prepare dummy``: a store of synthetic documents that is marked as such."""

import json
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import Progress

SPEC = "dummy:documents=400,vocab=70,lengths=2-90,seed=3,kind=text"


def read_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_the_documents_are_those_of_the_name(tmp_path):
    result = batchloom.prepare(SPEC, out=tmp_path / "s", tokens_per_shard=4000, val_fraction=0.1)
    synthetic = batchloom.open_store(SPEC)
    assert (result.counts.documents, result.counts.tokens) == (400, synthetic.tokens)
    ids_by_record = {}
    for split in ("train", "val"):
        store = batchloom.open_store(tmp_path / "s", split)
        assert store.contents.synthetic
        assert not store.location.replicated
        for number in range(len(store)):
            ids_by_record[store[number].provenance.record] = store[number].ids.tolist()
    assert ids_by_record == {number: synthetic[number].ids.tolist() for number in range(400)}
    report = batchloom.check(tmp_path / "s")
    assert (report.faults, report.data) == ([], "synthetic")
    assert "synthetic documents of subset train, and evaluates on the" in report.used
    assert result.subsets["train"].shards > 3


def test_the_manifest_says_it(tmp_path):
    import jsonschema

    batchloom.prepare(SPEC, out=tmp_path / "s")
    manifest = json.loads((tmp_path / "s/dataset_metadata.json").read_text())
    schema = Path(__file__).parents[2] / "docs/reference/manifest.schema.json"
    jsonschema.validate(manifest, json.loads(schema.read_text()))
    assert manifest["recipe"]["source"] == "synthetic"
    assert [(source["name"], source["kind"]) for source in manifest["sources"]] == [(SPEC, "synthetic")]
    assert manifest["tokenizer"]["name"] == "none"


def test_the_same_command_succeeds_and_another_is_refused(tmp_path):
    out = tmp_path / "s"
    first = batchloom.prepare(SPEC, out=out)
    before = read_files(out)
    rerun = batchloom.prepare(SPEC, out=out)
    assert (first.already_done, rerun.already_done) == (False, True)
    assert read_files(out) == before
    other_out = tmp_path / "t"
    batchloom.prepare(SPEC, out=other_out)
    different = {path for path, data in read_files(other_out).items() if data != before[path]}
    assert different == {Path("report.json")}
    with pytest.raises(StoreConflictError, match=r"another job \(seed: 3 -> 4\)"):
        batchloom.prepare(SPEC.replace("seed=3", "seed=4"), out=out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(StoreConflictError, match="is not empty"):
        batchloom.prepare(SPEC, out=tmp_path / "full")


def test_a_stopped_job_begins_anew_to_the_same_bytes(tmp_path):
    def stop(event):
        if isinstance(event, Progress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batchloom.prepare(SPEC, out=tmp_path / "s", progress=stop)
    assert not (tmp_path / "s").exists()
    batchloom.prepare(SPEC, out=tmp_path / "s")
    batchloom.prepare(SPEC, out=tmp_path / "t")
    resumed, expected = read_files(tmp_path / "s"), read_files(tmp_path / "t")
    assert [path for path in resumed if resumed[path] != expected[path]] == [Path("report.json")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SPEC, "a.txt"], "which cannot be combined with other inputs"),
        ([SPEC, "distributed_dummy"], "cannot be combined"),
        ([SPEC, "--tokenizer", "bytes"], "--tokenizer: 'bytes' does not apply to synthetic data"),
        ([SPEC, "--text-field", "t"], "--text-field: 't' does not apply"),
        ([SPEC, "--split-on", "line"], "--split-on: 'line' does not apply"),
        ([SPEC, "--template", "chatml"], "--template: 'chatml' does not apply"),
        (["dummy:vocab=70000", "--dtype", "uint16"], "uint16 cannot hold the 70,000 ids"),
        (["dummy:vocb=3"], "did you mean 'vocab'?"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, capsys, arguments, message):
    assert run_command_line(["prepare", *arguments, "--out", str(tmp_path / "s")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_file_of_that_name_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dummy").write_text("a text in a file of an odd name")
    result = batchloom.prepare("dummy", out="s", tokenizer="bytes", val_fraction=0.0)
    assert result.counts.documents == 1
    store = batchloom.open_store("s")
    assert not store.contents.synthetic
    assert store[0].text.startswith("a text")


def test_synthetic_data_never_replaces_a_missing_input(tmp_path, capsys):
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
