"""``verify="first-read"`` on local stores: no batch holds a flipped bit."""

import random

import numpy as np
import pytest

import tiers
from batchloom import Loader, StoreError, open_store
from batchloom.store import compact_store, remove_documents
from batchloom.testing import append_documents, write_store

SINGLE_RANK = {"seq_len": 256, "global_batch_size": 4, "output": "numpy", "rank": 0, "world_size": 1}
WRAPPED = {**SINGLE_RANK, "shuffle": False, "packing": "wrap"}


def make_documents(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, int(rng.integers(0, 900))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def sound_store(tmp_path_factory):
    """A masked store of many small and large shards, with removals."""
    folder, documents = tmp_path_factory.mktemp("first") / "store", make_documents(150)
    flags = [[n % 3 > 0 for n in range(len(ids))] for ids in documents]
    write_store(folder, documents, trained=flags, documents_per_shard=7)
    append_documents(folder, [[], [], [7], *make_documents(12, 1)], documents_per_shard=2, source="more")
    append_documents(folder, make_documents(5, 2), source="gone")
    remove_documents(folder, sources=["gone"])
    return folder


def read_batches(folder, settings, verify):
    """Return every batch as bytes, and the error that ended reading, or None."""
    batches = []
    try:
        for batch in Loader(open_store(folder, verify=verify), **settings, prefetch=0):
            batches.append(b"".join(batch[name].tobytes() for name in sorted(batch)))  # noqa: PERF401
    except StoreError as error:
        return batches, error
    return batches, None


@pytest.fixture(scope="module", params=[SINGLE_RANK, WRAPPED], ids=["best_fit", "wrap"])
def sound_batches(request, sound_store):
    """Settings, and the batches of the sound store with them."""
    batches, error = read_batches(sound_store, request.param, "first-read")
    assert error is None
    assert len(batches) > 40
    for verify in ("off", "full"):
        assert read_batches(sound_store, request.param, verify) == (batches, None)
    return request.param, batches


def flip_bit(path, rng):
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("kind", ["bin", "mask", "idx", "sums", "lengths.u32", "removed.00004.u64"])
def test_no_batch_holds_a_flipped_bit(sound_store, sound_batches, kind):
    rng = random.Random(kind)
    settings, expected = sound_batches
    files = [path for path in sorted(sound_store.rglob(f"*{kind}")) if path.stat().st_size]
    if kind == "sums":
        shards = {path for path in sound_store.rglob("*.bin") if path.stat().st_size}
        # Those of an empty shard and of lengths, which are verified as complete files, are never read.
        files = [path for path in files if (path.parent / f"{path.stem}.bin") in shards]
    assert files
    for _ in range(tiers.examples(32)):
        path = rng.choice(files)
        original = path.read_bytes()
        try:
            flip_bit(path, rng)
            batches, error = read_batches(sound_store, settings, "first-read")
        finally:
            path.write_bytes(original)
        assert batches == expected[: len(batches)]
        if kind == "idx" and error is None:
            # Megatron's document index is redundant in a store, and never read.
            assert batches == expected
        else:
            assert path.stem in str(error) or "lengths" in str(error)


def test_shards_beyond_the_mapped_limit_are_verified(sound_store):
    """Read spans of many more shards than stay mapped at once."""
    store = open_store(sound_store)
    numbers = np.array([bound for bound in store.shards.bounds[:-1] if store.lengths.take(np.array([bound]))[0]])
    sizes = store.lengths.take(numbers).astype(np.int64)
    zeros = np.zeros_like(numbers)
    path = min(sound_store.glob("train/*.bin"))
    original = path.read_bytes()
    for verify in ("first-read", "full"):
        store = open_store(sound_store, verify=verify)
        store.reader.limit_mapped(2)
        views = store.read(numbers, zeros, sizes)
        assert [len(view) for view in views] == sizes.tolist()
        path.write_bytes(bytes([original[0] ^ 1]) + original[1:])
        try:
            store = open_store(sound_store, verify=verify)
            store.reader.limit_mapped(2)
            with pytest.raises(StoreError, match="shard_00000.bin: bytes 0 to"):
                store.read(numbers, zeros, sizes)
        finally:
            path.write_bytes(original)


def test_compact_does_not_copy_a_flipped_bit(tmp_path):
    """The new shard would have a checksum of the wrong tokens."""
    folder = write_store(tmp_path / "store", make_documents(20)).path
    (tmp_path / "named").write_text("train:3\n")
    remove_documents(folder, documents_file=tmp_path / "named")
    manifest = (folder / "dataset_metadata.json").read_bytes()
    flip_bit(folder / "train/shard_00000.bin", random.Random(0))
    with pytest.raises(StoreError, match=r"shard_00000.bin: bytes"):
        compact_store(folder)
    assert (folder / "dataset_metadata.json").read_bytes() == manifest
