"""Stores behind URLs give what the same stores on this machine give: in memory, where nothing fails."""

import logging
import multiprocessing
import os
import pickle
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
from msgspec.structs import replace

from batchloom import InputError, Loader, SettingsError, StoreError, check, inspect, open_store
from batchloom.batches import PlanOptions
from batchloom.batches.loading import remote_fetch as fetching
from batchloom.core.errors import GenerationError, StoreMissingError
from batchloom.remote import cache_files as segments, cached_blocks as held
from batchloom.store import (
    compact_store,
    compute_block_checksums,
    encode_manifest,
    find_documents,
    read_manifest,
    remove_documents,
)
from batchloom.store.read import remote_blocks as far, remote_store as far_store
from batchloom.testing import append_documents, write_store
from store.remote_stores import documents, kept, same_batches, to_memory

DOCUMENTS = documents()
PLAIN = {"seq_len": 256, "global_batch_size": 8, "output": "numpy", "rank": 0, "world_size": 1}


@pytest.fixture
def near(tmp_path):
    return write_store(tmp_path / "near", {"train": DOCUMENTS, "val": [[1, 2]]}, documents_per_shard=70)


@pytest.fixture
def url(near, tmp_path):
    return to_memory(near.path, tmp_path.name)


@pytest.fixture
def opened(url, tmp_path):
    return open_store(url, cache=tmp_path / "cache")


def everything(store):
    return [store[number].ids.tolist() for number in range(len(store))]


@pytest.mark.parametrize("settings", [{}, {"plan": PlanOptions(block=64)}, {"prefetch": 0}, {"form": "varlen"}])
def test_a_loader_gives_the_same_batches(near, opened, settings):
    assert opened.fingerprint == near.fingerprint
    loader = Loader(opened, **PLAIN, **settings)
    assert same_batches(Loader(near, **PLAIN, **settings), loader) == len(loader)
    assert near.tokens * 2 <= opened.reader.fetched_bytes <= 1.2 * 2 * near.tokens + 50_000
    # All of it is kept, and another process asks for nothing more.
    again = pickle.loads(pickle.dumps(opened))
    assert same_batches(Loader(near, **PLAIN, **settings), Loader(again, **PLAIN, **settings))
    assert again.reader.fetched_bytes == 0


@pytest.mark.parametrize("whole", [True, False])
def test_every_document_is_read(near, url, tmp_path, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(far_store, "MAX_LOCAL_LENGTHS", 0)
    store = open_store(url, cache=tmp_path / "cache")
    assert everything(store) == DOCUMENTS
    assert store.lengths.slice(0, 600).tolist() == [len(ids) for ids in DOCUMENTS]
    picked = np.array([599, 0, 70, 69, 3, 3])
    assert store.lengths.take(picked).tolist() == [len(DOCUMENTS[n]) for n in picked]
    assert [store.provenance.of(n) for n in (0, 71, 599)] == [near.provenance.of(n) for n in (0, 71, 599)]
    assert store.tokenizer.fingerprint == near.tokenizer.fingerprint
    assert store.subset("val")[0].ids.tolist() == [1, 2]
    assert (store.subsets, len(store.shards), store.tokens) == (("train", "val"), 9, near.tokens)


@pytest.mark.parametrize("whole", [True, False])
def test_long_lengths_are_read_by_blocks(tmp_path, monkeypatch, whole):
    """More than one block of lengths, in two generations."""
    many = [[number % 257] * (number % 3) for number in range(3000)]
    write_store(tmp_path / "near", many, documents_per_shard=1000)
    append_documents(tmp_path / "near", [*many[:1500], [5, 6]], documents_per_shard=700)
    if not whole:
        monkeypatch.setattr(far_store, "MAX_LOCAL_LENGTHS", 0)
    near = open_store(tmp_path / "near")
    store = open_store(to_memory(tmp_path / "near", tmp_path.name), cache=tmp_path / "cache")
    assert store.lengths.layers == near.lengths.layers == (3000, 1501)
    numbers = np.random.default_rng(1).permutation(4501)
    assert np.array_equal(store.lengths.take(numbers), near.lengths.take(numbers))
    zeros, lengths = np.zeros(4501, np.int64), near.lengths.take(numbers).astype(np.int64)
    ours = [ids.tolist() for ids in store.read(numbers, zeros, lengths)]
    assert ours == [ids.tolist() for ids in near.read(numbers, zeros, lengths)]
    older = open_store(store.location.name, cache=tmp_path / "cache", generation=1)
    assert (len(older), older.location.generation) == (3000, 1)
    with pytest.raises(GenerationError, match="no generation 3; it has: 1, 2"):
        open_store(store.location.name, cache=tmp_path / "cache", generation=3)


def test_masks_and_removed_documents(tmp_path):
    flags = [[number % 2 for number in range(len(ids))] for ids in DOCUMENTS]
    write_store(tmp_path / "near", DOCUMENTS, trained=flags, documents_per_shard=70)
    listed = tmp_path / "gone"
    listed.write_text("train:3\ntrain:300\n")
    remove_documents(tmp_path / "near", documents_file=listed)
    near = open_store(tmp_path / "near")
    store = open_store(to_memory(near.path, tmp_path.name), cache=tmp_path / "cache")
    assert store.contents.removed.tolist() == [3, 300]
    assert store.contents.trained_tokens == near.contents.trained_tokens
    assert everything(store) == everything(near)
    assert same_batches(Loader(near, **PLAIN), Loader(store, **PLAIN))
    compact_store(near.path)
    packed = open_store(to_memory(near.path, tmp_path.name), cache=tmp_path / "cache")
    assert everything(packed) == everything(open_store(near.path))


def test_what_a_process_reads_by_fork_and_spawn(opened):
    opened[5]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            # Memory is of one process; what is kept is not.
            everything(opened)
            assert (
                pool.map(_one, [(opened, number) for number in (5, 400)])
                == [
                    DOCUMENTS[5],
                    DOCUMENTS[400],
                ]
                if method == "fork"
                else True
            )


def _one(asked):
    store, number = asked
    return store[number].ids.tolist()


def test_a_fork_while_another_thread_connects_and_makes_room(opened):
    blocks = opened.reader._blocks
    child = multiprocessing.get_context("fork").Process(target=everything, args=[opened])
    with blocks._ranges._lock, blocks._cache._lock:
        child.start()
    child.join(20)
    child.kill()
    child.join()
    assert child.exitcode == 0


def test_workers_of_a_data_loader(near, opened):
    from torch.utils.data import DataLoader

    from batchloom.adapters.pytorch import LoaderIterable

    loader = Loader(opened, **PLAIN)
    found = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=2)
    assert [np.asarray(one["input_ids"]).tolist() for one in found] == [
        one["input_ids"].tolist() for one in Loader(near, **PLAIN)
    ]


def test_a_state_goes_on_elsewhere(near, opened):
    here, there = Loader(near, **PLAIN), Loader(opened, **PLAIN)
    steps = iter(here)
    for _ in range(5):
        next(steps)
    there.load_state_dict(here.state_dict())
    assert same_batches(list(here)[5:], there)


def test_an_older_store_is_read_whole_files_checked_and_its_tokens_not(near, tmp_path, caplog):
    manifest = read_manifest(near.path)
    train = manifest.subsets["train"]
    shards = tuple(replace(shard, sums=None) for shard in train.shards)
    subsets = {**manifest.subsets, "train": replace(train, sums=None, shards=shards)}
    (near.path / "dataset_metadata.json").write_bytes(encode_manifest(replace(manifest, subsets=subsets, checksum="")))
    for path in near.path.rglob("*.sums"):
        path.unlink()
    with caplog.at_level(logging.WARNING):
        store = open_store(to_memory(near.path, tmp_path.name), cache=tmp_path / "cache")
    assert "older batchloom and has no block checksums" in caplog.text
    assert store.fingerprint == near.fingerprint
    assert everything(store) == DOCUMENTS
    # On this machine each shard is checked whole where it was asked for.
    assert everything(open_store(near.path, verify="first-read")) == DOCUMENTS
    _change(near.path / "train/shard_00003.bin")
    with pytest.raises(StoreError, match=r"shard_00003.bin: checksum differs"):
        everything(open_store(near.path, verify="first-read"))


def _change(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("verify", ["first-read", "full", "off"])
def test_a_block_that_was_changed_where_it_is_kept(near, url, tmp_path, verify):
    cache = tmp_path / "cache"
    everything(open_store(url, cache=cache))
    changed = max(kept(cache), key=lambda path: path.stat().st_size)
    _change(changed, -4096 + 7)
    store = open_store(url, cache=cache, verify=verify)
    if verify == "off":
        assert everything(store) != DOCUMENTS or store.reader.fetched_bytes
        return
    assert everything(store) == DOCUMENTS
    assert store.reader.fetched_bytes > 0
    assert everything(open_store(url, cache=cache)) == DOCUMENTS


@pytest.mark.parametrize("how", ["empty", "cut short", "another head", "a folder"])
def test_a_file_of_blocks_that_is_none_is_fetched_again(url, tmp_path, how):
    cache = tmp_path / "cache"
    everything(open_store(url, cache=cache))
    for path in kept(cache):
        data = path.read_bytes()
        path.unlink()
        if how == "a folder":
            path.mkdir()
        else:
            path.write_bytes({"empty": b"", "cut short": data[:-1]}.get(how, b"\1" * len(data)))
    store = open_store(url, cache=cache)
    assert everything(store) == DOCUMENTS


def test_full_notices_what_changes_behind_its_back(near, tmp_path):
    once = open_store(near.path, verify="first-read")
    always = open_store(near.path, verify="full")
    assert everything(once) == everything(always) == DOCUMENTS
    _change(near.path / "train/shard_00000.bin")
    changed = everything(once)
    assert changed != DOCUMENTS
    assert everything(open_store(near.path)) == changed
    for store in (always, open_store(near.path, verify="first-read")):
        words = r"train/shard_00000.bin: bytes 0 to 4,096 do not match its checksums"
        with pytest.raises(StoreError, match=words):
            everything(store)


@pytest.mark.parametrize("file", ["train/shard_00000.sums", "train/lengths.u32", "train/shard_00000.mask"])
def test_first_read_looks_at_what_belongs_to_the_tokens(tmp_path, file):
    flags = [[0] * len(ids) for ids in DOCUMENTS]
    near = write_store(tmp_path / "near", DOCUMENTS, trained=flags)
    _change(near.path / file, -1)
    with pytest.raises(StoreError, match=Path(file).name):
        next(iter(Loader(open_store(near.path, verify="first-read"), **PLAIN)))


@pytest.mark.parametrize("far", [False, True])
def test_an_id_that_no_vocabulary_has_is_never_served(tmp_path, far):
    """The manifest says 257 ids; that the .bin is what was written does not make it right."""
    near = write_store(tmp_path / "near", DOCUMENTS)
    path = near.path / "train/shard_00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[1000] = 257
    ids.tofile(path)
    write = write_store(tmp_path / "other", DOCUMENTS)
    del write
    store = open_store(near.path)
    if far:
        manifest = read_manifest(near.path)
        train = manifest.subsets["train"]
        shards = tuple(replace(shard, sums=None) for shard in train.shards)
        subsets = {"train": replace(train, shards=shards)}
        data = encode_manifest(replace(manifest, subsets=subsets, checksum=""))
        (near.path / "dataset_metadata.json").write_bytes(data)
        store = open_store(to_memory(near.path, tmp_path.name), cache=tmp_path / "cache")
    words = r"train/shard_00000.bin holds token id 257 in document \d+, and the vocabulary has ids 0 to 256"
    with pytest.raises(StoreError, match=words):
        list(Loader(store, **PLAIN))


@pytest.mark.parametrize("limit", [1, 20_000, 400_000])
def test_a_limit_smaller_than_a_batch(near, url, tmp_path, limit):
    store = open_store(url, cache=tmp_path / "cache", cache_limit=limit)
    assert same_batches(Loader(near, **PLAIN), Loader(store, **PLAIN))
    assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) <= limit


def test_what_was_used_last_stays(url, tmp_path):
    cache = tmp_path / "cache"
    store = open_store(url, cache=cache)
    began = set(kept(cache))
    store[0]
    first = set(kept(cache)) - began
    assert first
    for path in first:
        os.utime(path, (1, 1))
    store[599]
    last = set(kept(cache)) - first - began
    total = sum(path.stat().st_size for path in kept(cache))
    small = open_store(url, cache=cache, cache_limit=total)
    small[300]
    left = set(kept(cache))
    assert not first & left
    assert last & left


def test_what_is_read_again_and_again_stays_mapped(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(held, "_MAX_MAPPED_FILES", 3)
    hot, *cold = (0, 100, 200, 300, 400)
    opened[hot]
    first = set(kept(tmp_path / "cache"))
    for number in (*cold, hot):
        opened[number]
    files = kept(tmp_path / "cache")
    for path in files:
        os.utime(path, (1, 1))
    for number in cold * 3:
        opened[hot]
        opened[number]
    # What is mapped anew has another time.
    again = {path for path in files if path.stat().st_mtime != 1}
    assert again
    assert not again & first


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EROFS"])
def test_a_cache_that_cannot_be_written_is_told_once_and_gone_without(near, url, tmp_path, monkeypatch, caplog, error):
    import errno
    import tempfile

    def refuse(*_args, **_words):
        raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with caplog.at_level(logging.WARNING):
        store = open_store(url, cache=tmp_path / "cache")
        assert same_batches(Loader(near, **PLAIN), Loader(store, **PLAIN))
    assert caplog.text.count("Blocks of a remote store cannot be cached in") == 1
    assert not kept(tmp_path / "cache")


def test_a_cache_on_a_disk_that_is_full(near, url, tmp_path):
    """A limit of the system on the size of files refuses as a full disk does, in the middle of a write."""
    import subprocess
    import sys

    code = (
        "import resource, signal, sys, numpy as np\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "from store.remote_stores import to_memory\n"
        "from batchloom import open_store\n"
        "near = open_store(sys.argv[1])\n"
        "far = open_store(to_memory(sys.argv[1], 'full'), cache=sys.argv[2])\n"
        "assert all((near[n].ids == far[n].ids).all() for n in range(len(near)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(near.path), str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert "cannot be cached in" in done.stderr


def test_settings_that_are_none(near, url, tmp_path):
    with pytest.raises(SettingsError, match="verify: 'often' is not one of off, first-read, full"):
        open_store(url, verify="often")
    with pytest.raises(SettingsError, match="verify: 'often'"):
        open_store(near.path, verify="often")
    with pytest.raises(SettingsError, match="cache_limit: 0 is not a number of bytes"):
        open_store(url, cache_limit=0)
    with pytest.raises(SettingsError, match="cache: only remote stores are cached"):
        open_store(near.path, cache=tmp_path)
    for none in (3, "", b"x", "x\0", "s3://a/b", "~nobody-is-called-so/x"):
        with pytest.raises(SettingsError, match=re.escape(f"cache: {none!r} is not a local folder: give")):
            open_store(url, cache=none)
    for none in ("", []):
        with pytest.raises(SettingsError, match="verify: .* is not one of off, first-read, full"):
            open_store(url, verify=none)
    with pytest.raises(InputError, match=r"no documents in subset \[\]; it has: train, val"):
        open_store(url, [])
    for none in (3, None, b"near"):
        with pytest.raises(InputError, match=f"{none!r} is not the location of a store: give the path or"):
            open_store(none)
    with pytest.raises(SettingsError, match="verify: only stores have checksums, and dummy is not a store"):
        open_store("dummy", verify="full")


def test_what_is_no_store(url, tmp_path):
    with pytest.raises(StoreMissingError, match="There is no store at memory://far/nothing"):
        open_store("memory://far/nothing", cache=tmp_path)
    with pytest.raises(InputError, match="no documents in subset 'test'; it has: train, val"):
        open_store(url, "test", cache=tmp_path)
    with pytest.raises(InputError, match=r"nosuch:// is not known to fsspec|is not a readable URL"):
        open_store("nosuch://a/b", cache=tmp_path)


def test_what_needs_files_says_so(opened):
    with pytest.raises(InputError, match="is remote, and its shards are not local files"):
        _ = opened.shards.stems


def test_a_file_url_is_a_path(near):
    assert open_store(f"file://{near.path}").fingerprint == near.fingerprint


def test_a_cache_in_the_folder_of_the_user(url, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store(url, cache="~/blocks")[0].ids.size == len(DOCUMENTS[0])
    assert kept(tmp_path / "blocks")


def test_the_default_cache_is_the_users(url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    open_store(url)[0]
    assert kept(tmp_path / "home/batchloom/blocks")


def test_inspect_reads_a_url(near, url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    ours, theirs = inspect(near.path), inspect(url)
    assert (theirs.documents, theirs.tokens, theirs.first) == (
        ours.documents,
        ours.tokens,
        ours.first,
    )


def test_golden_bytes_of_a_file_of_blocks(tmp_path):
    """What remote/cache_files.py says: a cache that another version wrote is read, or not known."""
    store = write_store(tmp_path / "near", [[1, 2, 3]])
    far = open_store(to_memory(store.path, tmp_path.name), cache=tmp_path / "cache")
    far[0]
    heads = [path.read_bytes()[:32] for path in kept(tmp_path / "cache")]
    assert all(head[:8] == b"BLMBLKS\0" and head[8] == 2 for head in heads)
    assert all(re.fullmatch(r"[0-9a-f]{32}\.blocks", path.name) for path in kept(tmp_path / "cache"))
    shard = read_manifest(store.path).subsets["train"].shards[0]
    key = int(shard.bin, 16)
    table = [path.read_bytes() for path in kept(tmp_path / "cache")]
    low_high = (key >> 64).to_bytes(8, "little") + (key & (1 << 64) - 1).to_bytes(8, "little")
    assert any(low_high in data for data in table)
    assert any(data.endswith(b"\1\0\2\0\3\0" + bytes(4090)) for data in table)


def test_a_store_elsewhere_is_checked_as_one_here(tmp_path):
    near = write_store(tmp_path / "near", {"train": DOCUMENTS, "val": [[1, 2]]}, documents_per_shard=70)
    append_documents(near.path, [[7, 8, 256]] * 3)
    url = to_memory(near.path, tmp_path.name)
    here, there = check(near.path), check(url)
    assert (there.kind, there.facts, there.sample) == ("store", here.facts, here.sample)
    assert [fault.replace(url, str(near.path)) for fault in there.faults] == here.faults
    assert check(url, generation=1).facts == check(near.path, generation=1).facts
    with pytest.raises(GenerationError):
        check(url, generation=7)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("train/shard_00003.bin", "shard_00003.bin: checksum differs"),
        ("train/shard_00004.docs", "shard_00004.docs: checksum differs"),
        ("train/shard_00005.idx", "shard_00005.idx"),
        ("train/shard_00006.sums", "shard_00006.sums: does not match its file"),
        ("train/lengths.u32", "lengths.u32: checksum differs"),
        ("train/shard_00001.bin", None),
    ],
)
def test_what_was_changed_or_lost_elsewhere_is_a_fault(near, tmp_path, name, told):
    url = to_memory(near.path, tmp_path.name)
    fs = fsspec.filesystem("memory")
    path = f"/far/{tmp_path.name}/{name}"
    data = bytearray(fs.cat_file(path))
    fs.rm(path)
    if told:
        data[-3] ^= 1
        fs.pipe_file(path, bytes(data))
    faults = check(url).faults
    assert any((told or f"{url}/{name} cannot be read") in fault for fault in faults)


def test_full_looks_at_what_is_read_and_no_more(url, tmp_path, monkeypatch):
    store = open_store(url, cache=tmp_path / "cache", verify="full")
    everything(store)
    hashed = []

    def counted(data):
        hashed.append(len(memoryview(data).cast("B")))
        return compute_block_checksums(data)

    monkeypatch.setattr(far, "compute_block_checksums", counted)
    store[300]
    assert 0 < sum(hashed) <= 4 * 4096


def test_what_was_kept_before_the_machine_started_is_looked_at_once(near, url, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    open_store(url, cache=cache)[3]
    ids = np.array(DOCUMENTS[3], "<u2").tobytes()
    (changed,) = [path for path in kept(cache) if ids in path.read_bytes()]
    _change(changed, changed.read_bytes().index(ids))
    wrong = open_store(url, cache=cache, verify="off")
    assert wrong[3].ids.tolist() != DOCUMENTS[3]
    monkeypatch.setattr(segments, "_read_boot_id", lambda: bytes([7] * 16))
    again = open_store(url, cache=cache, verify="off")
    assert again[3].ids.tolist() == DOCUMENTS[3]
    assert again.reader.fetched_bytes > 0


def test_origins_come_by_themselves(near, url, tmp_path):
    """Of a shard's ``.docs`` the blocks of a document alone."""
    big = write_store(tmp_path / "big", [[1, 256]] * 60_000)
    store = open_store(to_memory(big.path, f"{tmp_path.name}-big"), cache=tmp_path / "cache")
    before = store.reader.fetched_bytes
    assert store.provenance.of(12_345) == big.provenance.of(12_345)
    assert store.reader.fetched_bytes - before <= 8 * 4096
    source, record = big.provenance.of(12_345).source, big.provenance.of(12_345).record
    assert find_documents(store, source, record) == find_documents(big, source, record) == [12_345]
    assert store.reader.fetched_bytes - before < 36 * 60_000 / 3


@pytest.mark.parametrize(("limit", "told"), [(20_000, False), (4_000, True)])
def test_a_cache_of_a_few_steps_is_used_or_told_to_be_small(near, url, tmp_path, caplog, limit, told):
    store = open_store(url, cache=tmp_path / "cache", cache_limit=limit)
    fetching._warn_cache_too_small.cache_clear()
    with caplog.at_level(logging.WARNING, "batchloom"):
        same_batches(Loader(near, **PLAIN), Loader(store, **PLAIN))
    assert caplog.text.count("are not fetched ahead: a step") == told
