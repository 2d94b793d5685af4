"""``verify="first-read"`` on this machine: a flipped bit is an error before the batch that would hold it."""

import random

import numpy as np
import pytest

from batchloom import Loader, StoreError, open_store
from batchloom.store import compact_store, remove_documents
from batchloom.testing import append_documents, write_store

ALONE = {"seq_len": 256, "global_batch_size": 4, "output": "numpy", "rank": 0, "world_size": 1}
NEAR = {**ALONE, "shuffle": False, "packing": "wrap"}


def documents(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, int(rng.integers(0, 900))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A masked store of many shards, some of several blocks, some of none, in which documents are removed."""
    folder, made = tmp_path_factory.mktemp("first") / "store", documents(400)
    flags = [[n % 3 > 0 for n in range(len(ids))] for ids in made]
    write_store(folder, made, trained=flags, documents_per_shard=11)
    append_documents(folder, [[], [], [7], *documents(30, 1)], documents_per_shard=2, source="more")
    append_documents(folder, documents(9, 2), source="gone")
    remove_documents(folder, sources=["gone"])
    return folder


def batches(folder, settings, verify):
    """Every batch as bytes, and the error that ended them; None where none did."""
    found = []
    try:
        for batch in Loader(open_store(folder, verify=verify), **settings, prefetch=0):
            found.append(b"".join(batch[name].tobytes() for name in sorted(batch)))  # noqa: PERF401
    except StoreError as error:
        return found, error
    return found, None


def flip(path, chance):
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    data[at] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("settings", [ALONE, NEAR], ids=["best_fit", "wrap"])
@pytest.mark.parametrize("kind", ["bin", "mask", "idx", "sums", "lengths.u32", "removed.00004.u64"])
def test_no_batch_holds_a_flipped_bit(sound, settings, kind):
    chance = random.Random(kind)
    right, error = batches(sound, settings, "first-read")
    assert error is None
    assert right == batches(sound, settings, "off")[0] == batches(sound, settings, "full")[0]
    assert len(right) > 100
    files = [path for path in sorted(sound.rglob(f"*{kind}")) if path.stat().st_size]
    assert files
    for _ in range(8):
        path = chance.choice(files)
        before = path.read_bytes()
        try:
            flip(path, chance)
            found, error = batches(sound, settings, "first-read")
        finally:
            path.write_bytes(before)
        assert found == right[: len(found)]
        if kind == "idx" and error is None:
            # Megatron's document index, which says nothing new of a store, is not read.
            assert found == right
        else:
            assert path.stem in str(error) or "lengths" in str(error)


def test_shards_that_do_not_stay_mapped_are_checked_all_the_same(sound):
    """Spans of many more shards than are kept mapped, in one read."""
    store = open_store(sound)
    numbers = np.array([bound for bound in store.shards.bounds[:-1] if store.lengths.take(np.array([bound]))[0]])
    sizes = store.lengths.take(numbers).astype(np.int64)
    zeros = np.zeros_like(numbers)
    path = min(sound.glob("train/*.bin"))
    before = path.read_bytes()
    for verify in ("first-read", "full"):
        store = open_store(sound, verify=verify)
        store.shards.limit_mapped(2)
        views = store.read(numbers, zeros, sizes)
        assert [len(view) for view in views] == sizes.tolist()
        path.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        try:
            store = open_store(sound, verify=verify)
            store.shards.limit_mapped(2)
            with pytest.raises(StoreError, match="shard_00000.bin: bytes 0 to"):
                store.read(numbers, zeros, sizes)
        finally:
            path.write_bytes(before)


def test_compact_does_not_copy_a_flipped_bit(tmp_path):
    """The new shard would have a checksum of the wrong tokens."""
    folder = write_store(tmp_path / "store", documents(20)).path
    (tmp_path / "named").write_text("train:3\n")
    remove_documents(folder, documents_file=tmp_path / "named")
    manifest = (folder / "dataset_metadata.json").read_bytes()
    flip(folder / "train/shard_00000.bin", random.Random(0))
    with pytest.raises(StoreError, match=r"shard_00000.bin: bytes"):
        compact_store(folder)
    assert (folder / "dataset_metadata.json").read_bytes() == manifest
