"""Damaged preference stores: check reports them, and no wrong pairs are read."""

import json
import struct

import numpy as np
import pytest

import batchloom
from batchloom import StoreError
from batchloom.store import (
    LabelledAnswers,
    PreferencePairs,
    compact_store,
    remove_documents,
    verify_store,
)
from store.manifest_edits import edit_manifest
from store.test_damaged_stores import (
    get_first_shard,
    overwrite,
    replace_by_pipe,
    seal_sidecars,
    truncate,
)

PAIRS, MASK = "train/shard_00000.pairs", "train/shard_00000.mask"
HEAD = 32


def get_first_source(manifest):
    return manifest["sources"][0]


def prepare_records(folder, row, count=8, **settings):
    rows = (json.dumps(row(n)) + "\n" for n in range(count))
    (folder / "in.jsonl").write_text("".join(rows))
    settings = {"tokenizer": "bytes", "val_fraction": 0, **settings}
    return batchloom.prepare(folder / "in.jsonl", out=folder / "s", **settings).path


@pytest.fixture
def folder(tmp_path):
    return prepare_records(
        tmp_path,
        lambda n: {"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": "no"},
        tokens_per_shard=300,
    )


def read_all_pairs(folder):
    return list(PreferencePairs(batchloom.open_store(folder)))


def overwrite_sides(number, value):
    """Return a change that overwrites sides of the first shard."""
    return lambda f: overwrite(f / PAIRS, (f / PAIRS).stat().st_size * 8 // 9 + 4 + number, value)


ATTACKS = {
    "gone": (lambda f: (f / PAIRS).unlink(), "cannot be read"),
    "a pipe": (lambda f: replace_by_pipe(f / PAIRS), "a pipe or a device"),
    "empty": (lambda f: (f / PAIRS).write_bytes(b""), "is cut short"),
    "cut": (lambda f: truncate(f / PAIRS, 1), "its shard has"),
    "longer": (lambda f: (f / PAIRS).write_bytes((f / PAIRS).read_bytes() + b"\1"), "its shard has"),
    "magic": (lambda f: overwrite(f / PAIRS, 0, b"XX"), "is not a .pairs file"),
    "version": (lambda f: overwrite(f / PAIRS, 8, b"\2"), "is not a .pairs file"),
    "zero": (lambda f: overwrite(f / PAIRS, 24, b"\1"), "is not a .pairs file"),
    "count": (lambda f: overwrite(f / PAIRS, 16, struct.pack("<Q", 2**61)), "its shard has"),
    "swapped": (overwrite_sides(0, b"\2\1"), "documents 0 and 1 are not the chosen and the rejected answer"),
    "two chosen": (overwrite_sides(1, b"\1"), "documents 0 and 1 are not the chosen and the rejected answer"),
    "torn": (overwrite_sides(1, b"\1\2"), "documents 0 and 1 are not the chosen and the rejected answer"),
    "no side": (overwrite_sides(2, b"\0"), "document 2 has side 0"),
    "labels": (overwrite_sides(0, b"\3\4"), "document 0 has side 3, which is not a side of pairs"),
    "half a pair": (lambda f: overwrite(f / PAIRS, HEAD + 8, b"\7"), "answer of one pair"),
    "twice": (lambda f: overwrite(f / PAIRS, HEAD + 16, bytes(16)), "are not in ascending order"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_damaged_pair_files(folder, name):
    change, sentence = ATTACKS[name]
    assert len(read_all_pairs(folder)) == 8
    assert len(batchloom.open_store(folder).shards) > 1
    assert verify_store(folder).sound
    change(folder)
    seal_sidecars(folder)
    with pytest.raises(StoreError, match=sentence):
        read_all_pairs(folder)
    faults = verify_store(folder).faults
    assert any(sentence in fault for fault in faults), faults


def test_check_compares_pairs_with_the_records_they_come_from(folder):
    documents = len(batchloom.open_store(folder).shards.sides(0))
    overwrite(folder / PAIRS, HEAD + 8 * (documents - 2), struct.pack("<2Q", 7, 7))
    assert any("checksum differs" in fault for fault in verify_store(folder).faults)
    seal_sidecars(folder)
    assert len(read_all_pairs(folder)) == 8
    faults = verify_store(folder).faults
    assert any("do not match the records that its .docs names" in fault for fault in faults)
    assert any("its first pair is not after the pairs of the shards before it" in fault for fault in faults)


MANIFEST_ATTACKS = {
    "no preferences": (lambda m: get_first_source(m).pop("preferences"), "has a .pairs file in a store without an objective"),
    "unknown": (lambda m: get_first_source(m).update(preferences="likes"), "preferences 'likes' are none of pairs, labels"),
    "no file": (lambda m: get_first_shard(m).pop("pairs"), "shard_00000 has no .pairs file in a store with an objective"),
    "labels": (lambda m: get_first_source(m).update(preferences="labels"), "which is not a side of labels"),
    "mixed": (
        lambda m: m["sources"].append({**get_first_source(m), "name": "b", "preferences": "labels"}),
        "several objectives (labels, pairs)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFEST_ATTACKS)
def test_damaged_preference_manifests(folder, name):
    change, sentence = MANIFEST_ATTACKS[name]
    edit_manifest(folder, change)
    with pytest.raises(StoreError) as caught:
        LabelledAnswers(batchloom.open_store(folder))
    assert sentence in str(caught.value)
    assert any(sentence in fault for fault in verify_store(folder).faults)


def test_check_counts_pairs(folder):
    edit_manifest(folder, lambda m: m["counts"].update(records=16))
    faults = verify_store(folder).faults
    assert any("its pairs, quarantined and dropped records together are 8" in f for f in faults)


def test_a_pair_file_missing_from_the_manifest(tmp_path):
    folder = prepare_records(tmp_path, lambda n: {"text": f"text {n}"})
    (folder / PAIRS).write_bytes(b"x")
    (fault,) = verify_store(folder).faults
    assert fault.endswith("shard_00000.pairs: the manifest does not list it.")


def test_a_wrong_mask_is_refused(folder):
    bits = np.frombuffer((folder / MASK).read_bytes(), np.uint8, offset=32).copy()
    bits[0] ^= 1
    overwrite(folder / MASK, 32, bits.tobytes())
    seal_sidecars(folder)
    with pytest.raises(StoreError, match="Document 0 .* are not at its end"):
        read_all_pairs(folder)
    overwrite(folder / MASK, 32, bytes(len(bits)))
    seal_sidecars(folder)
    with pytest.raises(StoreError, match="Document 0 .* are not at its end"):
        read_all_pairs(folder)


def test_different_prompts_in_a_pair_are_refused(folder):
    overwrite(folder / "train/shard_00000.bin", 2, b"x\0")
    with pytest.raises(StoreError, match="Documents 0 and 1 .* have different prompts"):
        read_all_pairs(folder)


def test_labels_change_the_fingerprint(tmp_path):
    fingerprints = set()
    for label in (True, False):
        (tmp_path / str(label)).mkdir()
        row = {"prompt": "q", "completion": "a", "label": label}
        store = batchloom.open_store(prepare_records(tmp_path / str(label), lambda _, row=row: row, count=1))
        fingerprints.add(store.fingerprint)
        assert LabelledAnswers(store).good.tolist() == [label]
    assert len(fingerprints) == 2


def test_both_sides_of_a_pair_are_removed(folder, tmp_path):
    before = read_all_pairs(folder)
    (tmp_path / "list").write_text("train:3\ntrain:8\n")
    assert remove_documents(folder, documents_file=tmp_path / "list").documents == 4
    store = batchloom.open_store(folder)
    assert store.contents.removed.tolist() == [2, 3, 8, 9]
    pairs = PreferencePairs(store)
    remaining = [n for n in range(8) if n not in (1, 4)]
    assert [pairs[n] for n in range(len(pairs))] == [before[n] for n in remaining]
    assert pairs.chosen.tolist() == [2 * n for n in remaining]
    assert pairs.rejected.tolist() == [2 * n + 1 for n in remaining]
    labels = LabelledAnswers(store)
    assert len(labels) == labels.good.size == 12
    assert labels[2]["completion_ids"] == before[2]["chosen_ids"]
    assert verify_store(folder).sound
    ids = pairs.ids.tolist()
    compact_store(folder)
    after = PreferencePairs(batchloom.open_store(folder))
    assert [after[n] for n in range(len(after))] == [before[n] for n in remaining]
    assert after.ids.tolist() == ids
    assert verify_store(folder).sound, verify_store(folder).faults
