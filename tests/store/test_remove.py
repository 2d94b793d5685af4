"""Removal: documents become end tokens until compaction deletes them."""

import json
import pickle
import shutil

import numpy as np
import pytest
import xxhash

import batchloom
from batchloom import InputError, SettingsError, check, open_store
from batchloom.cli import run_command_line
from batchloom.core.errors import InputMissingError
from batchloom.store import (
    compact_store,
    export_store,
    iter_document_ranges,
    read_log,
    read_manifest,
    remove_documents,
)
from batchloom.store.maintain.generations import list_generation_files
from batchloom.testing import append_documents, write_store

DOCUMENTS = [[n + 1] * (n % 5 + 1) + [256] for n in range(20)]
TRAINED = [[0] + [1] * (len(ids) - 1) for ids in DOCUMENTS]


@pytest.fixture(params=["plain", "masked"])
def store(request, tmp_path):
    """Twenty documents in shards of six, and four more of a second source."""
    masked = request.param == "masked"
    write_store(tmp_path / "s", DOCUMENTS, documents_per_shard=6, trained=TRAINED if masked else None)
    append_documents(tmp_path / "s", [[n + 100, 256] for n in range(4)], source="more/b.jsonl")
    return tmp_path / "s"


def write_list(folder, *lines):
    path = folder.parent / "list.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_older_generation_with_later_removals(store):
    remove_documents(store, documents_file=write_list(store, "train:3"))
    append_documents(store, DOCUMENTS[:2])
    remove_documents(store, documents_file=write_list(store, "train:0", "train:25"))
    opened = open_store(store, generation=3, removals=5)
    remote = open_store(f"local://{store}", generation=3, removals=5)
    assert remote.location.is_remote
    for kept in (opened, remote, pickle.loads(pickle.dumps(opened))):
        assert kept.fingerprint == open_store(store, generation=3).fingerprint
        assert (len(kept), kept.contents.removed.tolist(), kept.masked) == (24, [0, 3], True)
        assert [kept[number].ids.tolist() for number in (0, 1)] == [[256] * len(DOCUMENTS[0]), DOCUMENTS[1]]
        numbers = np.arange(24)
        flags = kept.mask(numbers, numbers * 0, kept.lengths.take(numbers).astype(np.int64))
        assert kept.contents.trained_tokens == sum(int(flag.sum()) for flag in flags)
        assert kept.contents.remaining_counts == (22, kept.tokens - len(DOCUMENTS[0]) - len(DOCUMENTS[3]))
    with pytest.raises(SettingsError, match="removals: 'x' is not the number of a generation"):
        open_store(store, removals="x")


def test_removed_documents_read_as_end_tokens_without_loss(store):
    before = open_store(store)
    report = remove_documents(store, documents_file=write_list(store, "train:0", "train:7", "train:21"))
    assert (report.generation, report.documents) == (3, 3)
    assert report.by_source == (("given", 2, 2 + 4), ("more/b.jsonl", 1, 2))
    after = open_store(store)
    assert after.contents.removed.tolist() == [0, 7, 21]
    numbers = np.arange(24)
    lengths = before.lengths.take(numbers).astype(np.int64)
    assert after.lengths.take(numbers).tolist() == lengths.tolist()
    spans = (numbers, np.zeros(24, np.int64), lengths)
    for n, (old_ids, new_ids, mask) in enumerate(
        zip(before.read(*spans), after.read(*spans), after.mask(*spans), strict=True)
    ):
        is_removed = n in (0, 7, 21)
        assert new_ids.tolist() == ([256] * len(old_ids) if is_removed else old_ids.tolist())
        assert after[n].ids.tolist() == new_ids.tolist()
        assert not (is_removed and mask.any())
    assert after.masked
    trained = sum(int(mask.sum()) for mask in after.mask(*spans))
    assert after.contents.trained_tokens == trained
    assert after.contents.remaining_counts == (21, before.tokens - 8)
    # The previous generation still holds the text.
    assert open_store(store, generation=2)[0].ids.tolist() == DOCUMENTS[0]
    assert check(store).sound
    assert check(store, generation=2).sound


def test_plans_survive_a_removal(store):
    settings = {"seq_len": 8, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
    before = list(batchloom.Loader(open_store(store), **settings))
    remove_documents(store, sources=["more/*"])
    after = list(batchloom.Loader(open_store(store), **settings))
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        is_removed = (old["input_ids"] >= 100) & (old["input_ids"] < 104)
        assert (old["position_ids"] == new["position_ids"]).all()
        assert (new["input_ids"][is_removed] == 256).all()
        assert (new["labels"][is_removed] == -100).all()
        assert is_removed.sum() == (old["input_ids"] != new["input_ids"]).sum()


def test_removing_everything_is_reported(store, capsys):
    assert not remove_documents(store, sources=["given"], dry_run=True).emptied
    remove_documents(store, sources=["given"])
    assert remove_documents(store, sources=["more/*"], dry_run=True).emptied
    assert run_command_line(["remove", str(store), "--source", "more/*"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "No document is left: batchloom compact refuses a store without any, so delete" in output
    with pytest.raises(InputError, match="All documents of .* are removed"):
        compact_store(store)
    run_command_line(["check", str(store)])
    assert "nothing by batchloom train: subset train has no documents" in (capsys.readouterr().out)


def test_every_form_of_a_line(store):
    initial = open_store(store)
    lines = (
        "# a takedown",
        "",
        "train:3",
        initial.provenance.of(4).hash.upper(),
        "more/b.jsonl 2",
        "given\t19",
        "given 99",
        "nobody.jsonl 0",
        "0" * 32,
    )
    dry_report = remove_documents(store, documents_file=write_list(store, *lines), dry_run=True)
    assert dry_report.generation is None
    assert open_store(store).location.generation == 2
    report = remove_documents(store, documents_file=write_list(store, *lines))
    assert open_store(store).contents.removed.tolist() == [3, 4, 19, 22]
    assert report.absent == dry_report.absent == ("given 99", "nobody.jsonl 0", "0" * 32)
    assert dry_report.by_source == report.by_source
    second_report = remove_documents(
        store, documents_file=write_list(store, "train:3", "train:5"), sources=["more/b.jsonl"]
    )
    assert (second_report.before, second_report.documents) == (2, 4)
    assert open_store(store).contents.removed.tolist() == [3, 4, 5, 19, 20, 21, 22, 23]
    third_report = remove_documents(store, documents_file=write_list(store, "train:3"))
    assert (third_report.generation, third_report.documents, third_report.before) == (None, 0, 1)


def test_a_record_without_a_document_is_not_reported_as_unknown(tmp_path):
    first_path, second_path = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first_path.write_text('{"text": "first"}\n{"text": "told twice"}\n')
    second_path.write_text('{"text": "told twice"}\n{"text": ""}\nbroken\n{"text": "last"}\n')
    out = tmp_path / "s"
    batchloom.prepare([first_path, second_path], out=out, tokenizer="bytes", max_bad=1)
    lines = [f"b.jsonl {n}" for n in range(5)]
    dry_report = remove_documents(out, documents_file=write_list(out, *lines), dry_run=True)
    assert dry_report.left_out == ("b.jsonl 0", "b.jsonl 1", "b.jsonl 2")
    assert dry_report.absent == ("b.jsonl 4",)
    assert dry_report.by_source == (("b.jsonl", 1, 5),)
    value = xxhash.xxh3_128_hexdigest(b"told twice")
    report = remove_documents(out, documents_file=write_list(out, value, "b.jsonl 0"))
    assert (report.by_source, report.left_out) == ((("a.jsonl", 1, 11),), ("b.jsonl 0",))
    # Removed documents are known until compaction.
    repeated_report = remove_documents(out, documents_file=write_list(out, "a.jsonl 1"))
    assert (repeated_report.before, repeated_report.left_out) == (1, ())
    compact_store(out)
    compacted_report = remove_documents(out, documents_file=write_list(out, "a.jsonl 1"))
    assert (compacted_report.before, compacted_report.left_out, compacted_report.absent) == (0, ("a.jsonl 1",), ())


def test_all_invalid_lines_are_reported_together(store):
    path = write_list(store, "train:24", "hello", "val:0", "train:1", "train:-1")
    with pytest.raises(InputError) as caught:
        remove_documents(store, documents_file=path)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[2][:38] for line in lines[:4]] == [
        "there is no document train:24: subset ",
        "'hello' names no document",
        "there is no document val:0: subset val",
        "'train:-1' names no document",
    ]
    assert lines[4].startswith("a line is a document's number (train:17)")
    assert open_store(store).location.generation == 2


def test_unknown_sources_and_invalid_lists_are_refused(store, tmp_path):
    with pytest.raises(InputError, match=r"no source of the store is called 'givne'; did you mean 'given'\? batch"):
        remove_documents(store, sources=["givne"])
    with pytest.raises(InputError, match="no source of the store is called ''"):
        remove_documents(store, sources=[""])
    with pytest.raises(InputMissingError, match="There is no file or folder .*nothing"):
        remove_documents(store, documents_file=tmp_path / "nothing")
    with pytest.raises(SettingsError, match="sources: missing"):
        remove_documents(store)
    (tmp_path / "bytes").write_bytes(b"train:1\xff")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        remove_documents(store, documents_file=tmp_path / "bytes")


def test_compaction_keeps_exactly_the_remaining_documents(store):
    lines = [f"train:{n}" for n in (0, 7, 12, 13, 14, 15, 16, 17)]
    remove_documents(store, documents_file=write_list(store, *lines))
    before = open_store(store)
    removed = set(before.contents.removed.tolist())
    remaining = [n for n in range(24) if n not in removed]
    expected = [(before[n].ids.tolist(), before.provenance.of(n)) for n in remaining]
    masks = [
        before.mask(np.array([n]), np.zeros(1, int), np.array([len(before[n].ids)]))[0].tolist() for n in remaining
    ]
    untouched = {p.name: p.read_bytes() for p in (store / "train").glob("shard_00003.*")}
    progress = []
    report = compact_store(store, progress.append)
    assert (report.generation, report.documents, report.ended) == (4, 8, (1, 2, 3))
    # Shards without removed documents, or without remaining ones, are not rewritten.
    assert (report.shards, sum(progress)) == (2, 10)
    after = open_store(store)
    assert [(after[n].ids.tolist(), after.provenance.of(n)) for n in range(len(after))] == expected
    spans = (np.arange(16), np.zeros(16, int), after.lengths.slice(0, 16).astype(int))
    assert [mask.tolist() for mask in after.mask(*spans)] == masks
    assert {p.name: p.read_bytes() for p in (store / "train").glob("shard_00003.*")} == untouched
    assert after.contents.removed.size == 0
    assert after.lengths.layers == (16,)
    assert check(store).sound, check(store).faults
    manifest = read_manifest(store)
    assert manifest.counts.dropped == {"removed": 8}
    assert [source.documents for source in manifest.sources] == [12, 4]
    content = b"".join(path.read_bytes() for path in store.rglob("*.bin"))
    assert np.frombuffer(content, "<u2").tolist().count(1) == 0
    assert [entry.readable for entry in read_log(store)] == [False, False, False, True]
    assert not (store / "generations/00001.json").exists()
    files = {path.relative_to(store).as_posix() for path in (store / "train").iterdir()}
    assert files == {name for name in list_generation_files(manifest) if name.startswith("train/")}
    assert compact_store(store).made is False


def test_a_compacted_store_has_the_order_of_a_new_store(store, tmp_path):
    remove_documents(store, documents_file=write_list(store, "train:0", "train:23"))
    compact_store(store)
    remaining = [document.ids.tolist() for document in open_store(store)]
    fresh = write_store(tmp_path / "fresh", remaining)
    settings = {"seq_len": 8, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
    batches = [batch["input_ids"].tolist() for batch in batchloom.Loader(open_store(store), **settings)]
    assert batches == [b["input_ids"].tolist() for b in batchloom.Loader(fresh, **settings)]


def test_a_compacted_store_can_be_extended(store):
    remove_documents(store, documents_file=write_list(store, "train:0", "train:23"))
    compact_store(store)
    append_documents(store, [[250, 256]], source="third")
    remove_documents(store, sources=["third"])
    assert [entry.number for entry in read_log(store) if entry.readable] == [4, 5, 6]
    assert open_store(store, generation=5)[22].ids.tolist() == [250, 256]
    for number in (None, 4, 5):
        verdict = check(store, generation=number)
        assert verdict.sound, verdict.faults


def test_a_subset_may_be_emptied_and_a_store_may_not(tmp_path):
    write_store(tmp_path / "s", {"train": [[1, 256], [2, 256]], "val": [[3, 256]]})
    remove_documents(tmp_path / "s", documents_file=write_list(tmp_path / "s", "val:0"))
    compact_store(tmp_path / "s")
    assert open_store(tmp_path / "s").subsets == ("train",)
    assert check(tmp_path / "s").sound
    remove_documents(tmp_path / "s", sources=["given"])
    with pytest.raises(InputError, match="All documents of .* are removed"):
        compact_store(tmp_path / "s")


@pytest.mark.parametrize("target", ["megatron", "merged", "flat", "parquet"])
def test_exports_leave_removed_documents_out(store, tmp_path, target):
    remove_documents(store, documents_file=write_list(store, *(f"train:{n}" for n in (0, 7, 12, 13, 14, 15, 16, 17))))
    merge = "all" if target == "merged" else None
    to = "megatron" if merge else target
    report = export_store(store, to=to, out=tmp_path / "out", merge=merge)
    opened = open_store(store)
    remaining = [n for n in range(24) if n not in set(opened.contents.removed.tolist())]
    assert (report.documents, report.tokens) == (16, sum(len(opened[n].ids) for n in remaining))
    assert "8 removed documents are left out." in report.notes
    expected = [opened[n].ids.tolist() for n in remaining]
    if target == "megatron":
        exported = [
            document.ids.tolist() for path in sorted((tmp_path / "out").glob("*.idx")) for document in open_store(path)
        ]
        assert exported == expected
    elif target == "merged":
        merged = open_store(tmp_path / "out/all")
        assert [document.ids.tolist() for document in merged] == expected
        assert merged.contents.trained_tokens == opened.contents.trained_tokens
    elif target == "flat":
        flat = np.fromfile(tmp_path / "out/train.bin", "<u2")
        assert flat.tolist() == [token for ids in expected for token in ids]
        assert json.loads((tmp_path / "out/train.json").read_text())["documents"] == 16
    elif target == "parquet":
        import pyarrow.parquet as pq

        exported = [
            ids
            for path in sorted((tmp_path / "out").glob("*.parquet"))
            for ids in pq.read_table(path)["input_ids"].to_pylist()
        ]
        assert exported == expected
    older = export_store(store, to="flat", out=tmp_path / "older", generation=1)
    assert older.documents == 20


def test_a_standalone_shard_with_removed_documents_is_refused(store):
    open_store(store / "train/shard_00000")
    remove_documents(store, documents_file=write_list(store, "train:0"))
    with pytest.raises(InputError, match="a store of documents, some of them removed"):
        open_store(store / "train/shard_00000")


def test_iteration_skips_ranges_of_removed_documents(store):
    remove_documents(store, sources=["more/b.jsonl"])
    assert sum(len(document_range.lengths) for document_range in iter_document_ranges(open_store(store))) == 20
    assert list(iter_document_ranges(open_store(store), 4)) == []


def test_a_copied_store_has_the_same_fingerprint(store, tmp_path):
    remove_documents(store, documents_file=write_list(store, "train:0"))
    shutil.copytree(store, tmp_path / "copy")
    for number in (1, 2, 3):
        original, copied = (open_store(p, generation=number) for p in (store, tmp_path / "copy"))
        assert original.fingerprint == copied.fingerprint


def test_inspect_reports_removed_documents(store):
    remove_documents(store, documents_file=write_list(store, "train:1"))
    report = batchloom.inspect(store)
    assert (report.generation, report.removed, report.documents) == (3, 1, 24)
    assert report.first[1] == "(removed)"
    older_report = batchloom.inspect(store, generation=1)
    assert (older_report.generation, older_report.removed, older_report.documents) == (1, 0, 20)
