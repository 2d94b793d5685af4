"""Exports of a store, read back by the libraries they are made for."""

import importlib
import importlib.util
import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom import InputError, SettingsError
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import import_tokens
from batchloom.store import EXPORT_TARGETS, export_store
from batchloom.testing import write_store
from oracles import read_megatron_documents, write_megatron_pair

DOCUMENTS = [[*range(n % 7, n % 7 + n % 90), 256] for n in range(200)]
FLAGS = [[(n + k) % 3 > 0 for k in range(len(ids))] for n, ids in enumerate(DOCUMENTS)]


@pytest.fixture(params=["plain", "masked"])
def store(request, tmp_path):
    trained = FLAGS if request.param == "masked" else None
    return write_store(tmp_path / "s", DOCUMENTS, documents_per_shard=60, trained=trained)


def read_documents(folder):
    store = batchloom.open_store(folder)
    return [store[n].ids.tolist() for n in range(len(store))]


def read_masks(folder):
    store = batchloom.open_store(folder)
    numbers = np.arange(len(store))
    spans = store.mask(numbers, numbers * 0, store.lengths.slice(0, len(store)).astype(np.int64))
    return [span.tolist() for span in spans]


def test_megatron_shards(tmp_path, store):
    report = export_store(store.path, to="megatron", out=tmp_path / "m")
    names = [f"shard_0000{n}" for n in range(4)]
    documents = [ids for name in names for ids in read_megatron_documents(tmp_path / "m" / name)]
    assert documents == DOCUMENTS
    assert os.path.samefile(tmp_path / "m/shard_00001.bin", store.path / "train/shard_00001.bin")
    assert (report.documents, report.tokens, report.files) == (
        200,
        store.tokens,
        12 if store.masked else 8,
    )
    assert ["tokens are not trained" in note for note in report.notes] == [True] * store.masked
    import_tokens(tmp_path / "m", out=tmp_path / "again", tokenizer="bytes")
    assert read_documents(tmp_path / "again") == DOCUMENTS
    assert read_masks(tmp_path / "again") == read_masks(store.path)


def test_shards_are_copied_where_there_are_no_links(tmp_path, store, monkeypatch):
    def refuse(self, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("batchloom.store.export_targets.Path.hardlink_to", refuse)
    export_store(store.path, to="megatron", out=tmp_path / "m")
    assert read_megatron_documents(tmp_path / "m/shard_00003") == DOCUMENTS[180:]
    assert (tmp_path / "m/shard_00003.bin").stat().st_nlink == 1


def test_one_merged_prefix(tmp_path, store, monkeypatch):
    monkeypatch.setattr(importlib.import_module("batchloom.store.read.document_walk"), "_MAX_TOKENS", 333)
    export_store(store.path, to="megatron", out=tmp_path / "m", merge="all.text")
    assert read_megatron_documents(tmp_path / "m/all.text") == DOCUMENTS
    assert read_documents(tmp_path / "m/all.text") == DOCUMENTS
    assert read_masks(tmp_path / "m/all.text") == read_masks(store.path)
    assert batchloom.open_store(tmp_path / "m/all.text").contents.trained_tokens == store.contents.trained_tokens
    assert batchloom.check(tmp_path / "m/all.text").sound


def test_a_flat_file_and_back(tmp_path, store):
    report = export_store(store.path, to="flat", out=tmp_path / "f")
    metadata = json.loads((tmp_path / "f/train.json").read_text())
    flat = np.memmap(tmp_path / "f/train.bin", metadata["dtype"], "r")
    assert flat.tolist() == [token for ids in DOCUMENTS for token in ids]
    assert (metadata["eod"], metadata["documents"], metadata["vocab_size"]) == (256, 200, 257)
    assert report.files == 2 + store.masked
    import_tokens(tmp_path / "f/train.bin", out=tmp_path / "again", tokenizer="bytes")
    assert read_documents(tmp_path / "again") == DOCUMENTS
    assert read_masks(tmp_path / "again") == read_masks(store.path)


@pytest.mark.parametrize("documents", [[[1, 2], [3, 256]], [[1, 256, 2, 256]], [[], [256]]])
def test_a_flat_file_without_document_ends_has_a_note(tmp_path, documents):
    write_store(tmp_path / "s", documents)
    report = export_store(tmp_path / "s", to="flat", out=tmp_path / "f")
    assert "The flat file does not show where documents end" in report.notes[0]
    assert json.loads((tmp_path / "f/train.json").read_text())["eod"] is None
    with pytest.raises(InputError, match="give --eod"):
        import_tokens(tmp_path / "f/train.bin", out=tmp_path / "t", vocab_size=300)


def read_columns(table):
    return table.to_pydict()


def check_columns(columns, store):
    assert columns["input_ids"] == DOCUMENTS
    assert columns["record"] == list(range(200))
    assert set(columns["source"]) == {"given"}
    assert columns.get("loss_mask") == ([list(map(int, f)) for f in FLAGS] if store.masked else None)


def test_parquet(tmp_path, store):
    export_store(store.path, to="parquet", out=tmp_path / "p")
    paths = sorted((tmp_path / "p").iterdir())
    assert [path.name for path in paths] == [f"train-0000{n}-of-00004.parquet" for n in range(4)]
    assert str(pq.read_schema(paths[0]).field("input_ids").type) == "list<element: int32>"
    check_columns(read_columns(pq.read_table(tmp_path / "p")), store)


def test_datasets_load_from_disk(tmp_path, store):
    datasets = pytest.importorskip("datasets")
    export_store(store.path, to="hf", out=tmp_path / "h")
    dataset = datasets.load_from_disk(str(tmp_path / "h"))
    assert (str(dataset.split), dataset.num_rows) == ("train", 200)
    check_columns(dataset[:], store)
    assert dataset.features["input_ids"].feature.dtype == "int32"
    dataset.map(lambda row: {"n": len(row["input_ids"])}).save_to_disk(str(tmp_path / "again"))


def test_one_arrow_stream_per_shard(tmp_path, store):
    import pyarrow as pa

    export_store(store.path, to="hf", out=tmp_path / "h")
    state = json.loads((tmp_path / "h/state.json").read_text())
    tables = [
        pa.ipc.open_stream(tmp_path / "h" / data_file["filename"]).read_all() for data_file in state["_data_files"]
    ]
    check_columns(read_columns(pa.concat_tables(tables)), store)


@pytest.mark.parametrize("to", EXPORT_TARGETS)
def test_empty_documents_and_other_subsets(tmp_path, to):
    write_store(tmp_path / "s", {"train": [[1]], "val": [[], [2, 256], []]})
    report = export_store(tmp_path / "s", to=to, out=tmp_path / "o" / "deep", split="val")
    assert (report.documents, report.tokens) == (3, 2)
    if to == "parquet":
        assert pq.read_table(report.path)["input_ids"].to_pylist() == [[], [2, 256], []]
    if to == "megatron":
        assert read_megatron_documents(report.path / "shard_00000") == [[], [2, 256], []]


@pytest.mark.parametrize("to", EXPORT_TARGETS)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_a_bare_prefix_is_exported(tmp_path, to, dtype):
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 2], [3]], [[4]]], dtype)
    merge = "one" if to == "megatron" else None
    report = export_store(prefix, to=to, out=tmp_path / "o", merge=merge)
    assert report.documents == 2
    if to == "parquet":
        assert read_columns(pq.read_table(tmp_path / "o")) == {"input_ids": [[1, 2, 3], [4]]}
    if merge:
        assert read_megatron_documents(tmp_path / "o/one") == [[1, 2, 3], [4]]


def test_ids_too_large_for_a_table(tmp_path):
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 2**40]]], np.int64)
    with pytest.raises(InputError, match="1099511627776 does not fit into int32"):
        export_store(prefix, to="parquet", out=tmp_path / "o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_an_export_is_atomic(tmp_path, store):
    def stop(documents):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_store(store.path, to="parquet", out=tmp_path / "o", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    (tmp_path / "o.partial").mkdir()
    (tmp_path / "o.partial" / "left").touch()
    (tmp_path / "o").mkdir()
    report = export_store(store.path, to="parquet", out=tmp_path / "o")
    assert report.files == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "s"]
    with pytest.raises(StoreConflictError, match="not empty; choose another --out"):
        export_store(store.path, to="flat", out=tmp_path / "o")


def test_invalid_settings(tmp_path):
    write_store(tmp_path / "s", [[1]])
    with pytest.raises(SettingsError, match="did you mean 'parquet'"):
        export_store(tmp_path / "s", to="parqet", out=tmp_path / "o")
    with pytest.raises(SettingsError, match="names the one prefix of --to megatron"):
        export_store(tmp_path / "s", to="flat", out=tmp_path / "o", merge="x")
    with pytest.raises(SettingsError, match="is not a file name"):
        export_store(tmp_path / "s", to="megatron", out=tmp_path / "o", merge="../x")


def test_the_command(tmp_path, store, capsys):
    command = ["export", str(store.path), "--to", "megatron", "--out"]
    assert run_command_line([*command, str(tmp_path / "a"), "--merge", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 200
    assert run_command_line([*command, str(tmp_path / "b")]) == 0
    assert "200 documents" in capsys.readouterr().out
    assert run_command_line([*command, str(tmp_path / "b")]) == 1


@pytest.mark.parametrize("to", EXPORT_TARGETS)
def test_damage_is_reported_and_nothing_is_written(tmp_path, store, to, capsys):
    path = store.path / "train" / "shard_00002.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert run_command_line(["export", str(store.path), "--to", to, "--out", str(tmp_path / "out")]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
