"""Remote stores in memory read like the same stores on local disk."""

import logging
import multiprocessing
import os
import pickle
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest

from batchloom import InputError, Loader, SettingsError, StoreError, check, inspect, open_store
from batchloom.batches.loading import remote_fetch
from batchloom.core.errors import GenerationError, StoreMissingError
from batchloom.remote import block_cache
from batchloom.store import (
    compact_store,
    compute_block_checksums,
    find_documents,
    read_manifest,
    remove_documents,
)
from batchloom.store.format import compute_file_checksums
from batchloom.store.read import remote_blocks, remote_store
from batchloom.store.write import write_checksum_file
from batchloom.testing import append_documents, write_store
from store.manifest_edits import edit_manifest
from store.remote_stores import assert_same_batches, copy_to_memory, list_block_files, make_documents
from waiting import LIMIT_S

DOCUMENTS = make_documents(200)
SINGLE_RANK = {"seq_len": 256, "global_batch_size": 8, "output": "numpy", "rank": 0, "world_size": 1}


@pytest.fixture
def local(tmp_path):
    return write_store(tmp_path / "local", {"train": DOCUMENTS, "val": [[1, 2]]}, documents_per_shard=23)


@pytest.fixture
def url(local, tmp_path):
    return copy_to_memory(local.path, tmp_path.name)


@pytest.fixture
def remote(url, tmp_path):
    return open_store(url, cache=tmp_path / "cache")


def read_all_documents(store):
    return [store[number].ids.tolist() for number in range(len(store))]


@pytest.mark.parametrize("settings", [{}, {"block": 64}, {"prefetch": 0}, {"form": "varlen"}])
def test_a_loader_gives_the_same_batches(local, remote, settings):
    assert remote.fingerprint == local.fingerprint
    loader = Loader(remote, **SINGLE_RANK, **settings)
    assert assert_same_batches(Loader(local, **SINGLE_RANK, **settings), loader) == len(loader)
    assert local.tokens * 2 <= remote.reader.fetched_bytes <= 1.2 * 2 * local.tokens + 50_000
    # All blocks are cached, and another process fetches none.
    unpickled = pickle.loads(pickle.dumps(remote))
    assert assert_same_batches(Loader(local, **SINGLE_RANK, **settings), Loader(unpickled, **SINGLE_RANK, **settings))
    assert unpickled.reader.fetched_bytes == 0


@pytest.mark.parametrize("lengths_in_memory", [True, False])
def test_every_document_is_read(local, url, tmp_path, monkeypatch, lengths_in_memory):
    if not lengths_in_memory:
        monkeypatch.setattr(remote_store, "MAX_LOCAL_LENGTHS", 0)
    store = open_store(url, cache=tmp_path / "cache")
    assert read_all_documents(store) == DOCUMENTS
    assert store.lengths.slice(0, 200).tolist() == [len(ids) for ids in DOCUMENTS]
    numbers = np.array([199, 0, 23, 22, 3, 3])
    assert store.lengths.take(numbers).tolist() == [len(DOCUMENTS[n]) for n in numbers]
    assert [store.provenance.of(n) for n in (0, 24, 199)] == [local.provenance.of(n) for n in (0, 24, 199)]
    assert store.tokenizer.fingerprint == local.tokenizer.fingerprint
    assert store.subset("val")[0].ids.tolist() == [1, 2]
    assert (store.subsets, len(store.shards), store.tokens) == (("train", "val"), 9, local.tokens)


@pytest.mark.parametrize("lengths_in_memory", [True, False])
def test_long_lengths_are_read_by_blocks(tmp_path, monkeypatch, lengths_in_memory):
    """Read more than one block of lengths, in two generations."""
    documents = [[number % 257] * (number % 3) for number in range(3000)]
    write_store(tmp_path / "local", documents, documents_per_shard=1000)
    append_documents(tmp_path / "local", [*documents[:1500], [5, 6]], documents_per_shard=700)
    if not lengths_in_memory:
        monkeypatch.setattr(remote_store, "MAX_LOCAL_LENGTHS", 0)
    local = open_store(tmp_path / "local")
    store = open_store(copy_to_memory(tmp_path / "local", tmp_path.name), cache=tmp_path / "cache")
    assert store.lengths.layers == local.lengths.layers == (3000, 1501)
    numbers = np.random.default_rng(1).permutation(4501)
    assert np.array_equal(store.lengths.take(numbers), local.lengths.take(numbers))
    zeros, lengths = np.zeros(4501, np.int64), local.lengths.take(numbers).astype(np.int64)
    ours = [ids.tolist() for ids in store.read(numbers, zeros, lengths)]
    assert ours == [ids.tolist() for ids in local.read(numbers, zeros, lengths)]
    older = open_store(store.location.name, cache=tmp_path / "cache", generation=1)
    assert (len(older), older.location.generation) == (3000, 1)
    with pytest.raises(GenerationError, match="no generation 3; it has: 1, 2"):
        open_store(store.location.name, cache=tmp_path / "cache", generation=3)


def test_masks_and_removed_documents(tmp_path):
    flags = [[number % 2 for number in range(len(ids))] for ids in DOCUMENTS]
    write_store(tmp_path / "local", DOCUMENTS, trained=flags, documents_per_shard=23)
    removal_list = tmp_path / "gone"
    removal_list.write_text("train:3\ntrain:100\n")
    remove_documents(tmp_path / "local", documents_file=removal_list)
    local = open_store(tmp_path / "local")
    store = open_store(copy_to_memory(local.path, tmp_path.name), cache=tmp_path / "cache")
    assert store.contents.removed.tolist() == [3, 100]
    assert store.contents.trained_tokens == local.contents.trained_tokens
    assert read_all_documents(store) == read_all_documents(local)
    assert assert_same_batches(Loader(local, **SINGLE_RANK), Loader(store, **SINGLE_RANK))
    compact_store(local.path)
    compacted = open_store(copy_to_memory(local.path, tmp_path.name), cache=tmp_path / "cache")
    assert read_all_documents(compacted) == read_all_documents(open_store(local.path))


def test_documents_are_read_by_forked_processes(remote):
    # Memory belongs to one process; cached blocks are shared.
    read_all_documents(remote)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        requests = [(remote, number) for number in (5, 133)]
        assert pool.map(_read_document, requests) == [DOCUMENTS[5], DOCUMENTS[133]]


def _read_document(request):
    store, number = request
    return store[number].ids.tolist()


def test_a_fork_while_another_thread_connects_and_evicts(remote):
    blocks = remote.reader._blocks
    child = multiprocessing.get_context("fork").Process(target=read_all_documents, args=[remote])
    with blocks._fetcher._ranges._lock, blocks._cache._lock:
        child.start()
    child.join(LIMIT_S)
    child.kill()
    child.join()
    assert child.exitcode == 0


@pytest.mark.slow
def test_workers_of_a_data_loader(local, remote):
    from torch.utils.data import DataLoader

    from batchloom.adapters.pytorch import LoaderIterable

    loader = Loader(remote, **SINGLE_RANK)
    batches = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=2)
    assert [np.asarray(batch["input_ids"]).tolist() for batch in batches] == [
        batch["input_ids"].tolist() for batch in Loader(local, **SINGLE_RANK)
    ]


def test_a_state_of_a_local_store_resumes_a_remote_one(local, remote):
    local_loader, remote_loader = Loader(local, **SINGLE_RANK), Loader(remote, **SINGLE_RANK)
    steps = iter(local_loader)
    for _ in range(5):
        next(steps)
    remote_loader.load_state_dict(local_loader.state_dict())
    assert assert_same_batches(list(local_loader)[5:], remote_loader)


def _flip_bit(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("verify", ["first-read", "full", "off"])
def test_a_block_changed_in_the_cache(local, url, tmp_path, verify):
    cache = tmp_path / "cache"
    read_all_documents(open_store(url, cache=cache))
    tokens = b"".join(path.read_bytes() for path in local.path.rglob("*.bin"))
    changed = next(path for path in list_block_files(cache) if path.read_bytes()[-4096:-4000] in tokens)
    _flip_bit(changed, -4096 + 7)
    store = open_store(url, cache=cache, verify=verify)
    if verify == "off":
        assert read_all_documents(store) != DOCUMENTS or store.reader.fetched_bytes
        return
    assert read_all_documents(store) == DOCUMENTS
    assert store.reader.fetched_bytes > 0
    assert read_all_documents(open_store(url, cache=cache)) == DOCUMENTS


@pytest.mark.parametrize("damage", ["empty", "cut short", "another head", "a folder"])
def test_an_invalid_block_file_is_fetched_again(url, tmp_path, damage):
    cache, numbers = tmp_path / "cache", range(0, 200, 10)
    store = open_store(url, cache=cache)
    assert [store[number].ids.tolist() for number in numbers] == DOCUMENTS[::10]
    for path in list_block_files(cache):
        data = path.read_bytes()
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        else:
            path.write_bytes({"empty": b"", "cut short": data[:-1]}.get(damage, b"\1" * len(data)))
    store = open_store(url, cache=cache)
    assert [store[number].ids.tolist() for number in numbers] == DOCUMENTS[::10]
    assert store.reader.fetched_bytes > 0


def test_full_verification_notices_later_changes(local, tmp_path):
    once = open_store(local.path, verify="first-read")
    always = open_store(local.path, verify="full")
    assert read_all_documents(once) == read_all_documents(always) == DOCUMENTS
    _flip_bit(local.path / "train/shard_00000.bin")
    changed = read_all_documents(once)
    assert changed != DOCUMENTS
    assert read_all_documents(open_store(local.path)) == changed
    for store in (always, open_store(local.path, verify="first-read")):
        message = r"train/shard_00000.bin: bytes 0 to 4,096 do not match its checksums"
        with pytest.raises(StoreError, match=message):
            read_all_documents(store)


@pytest.mark.parametrize("file", ["train/shard_00000.sums", "train/lengths.u32", "train/shard_00000.mask"])
def test_first_read_verifies_files_next_to_the_tokens(tmp_path, file):
    flags = [[0] * len(ids) for ids in DOCUMENTS]
    local = write_store(tmp_path / "local", DOCUMENTS, trained=flags)
    _flip_bit(local.path / file, -1)
    with pytest.raises(StoreError, match=Path(file).name):
        next(iter(Loader(open_store(local.path, verify="first-read"), **SINGLE_RANK)))


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_id_outside_the_vocabulary_is_never_served(tmp_path, is_remote):
    """Ids are checked against the vocabulary even if all checksums match."""
    local = write_store(tmp_path / "local", DOCUMENTS)
    path = local.path / "train/shard_00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[1000] = 257
    ids.tofile(path)
    write_store(tmp_path / "other", DOCUMENTS)
    store = open_store(local.path)
    if is_remote:
        sums = write_checksum_file(path.with_suffix(".sums"), compute_file_checksums(path))
        edit_manifest(local.path, lambda manifest: manifest["subsets"]["train"]["shards"][0].update(sums=sums))
        store = open_store(copy_to_memory(local.path, tmp_path.name), cache=tmp_path / "cache")
    message = r"train/shard_00000.bin holds token id 257 in document \d+, and the vocabulary has ids 0 to 256"
    with pytest.raises(StoreError, match=message):
        list(Loader(store, **SINGLE_RANK))


@pytest.mark.parametrize("limit", [1, pytest.param(130_000, marks=pytest.mark.slow)])
def test_a_limit_smaller_than_a_batch(local, url, tmp_path, limit):
    store = open_store(url, cache=tmp_path / "cache", cache_limit=limit)
    assert assert_same_batches(Loader(local, **SINGLE_RANK), Loader(store, **SINGLE_RANK))
    assert sum(path.stat().st_size for path in list_block_files(tmp_path / "cache")) <= limit


def test_recently_used_blocks_stay_cached(url, tmp_path):
    cache = tmp_path / "cache"
    store = open_store(url, cache=cache)
    initial = set(list_block_files(cache))
    store[0]
    first = set(list_block_files(cache)) - initial
    assert first
    for path in first:
        os.utime(path, (1, 1))
    store[199]
    last = set(list_block_files(cache)) - first - initial
    total = sum(path.stat().st_size for path in list_block_files(cache))
    limited = open_store(url, cache=cache, cache_limit=total)
    limited[100]
    remaining = set(list_block_files(cache))
    assert not first & remaining
    assert last & remaining


def test_frequently_read_blocks_stay_mapped(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, "_MAX_MAPPED_FILES", 3)
    hot, *cold = (0, 33, 66, 100, 133)
    remote[hot]
    first = set(list_block_files(tmp_path / "cache"))
    for number in (*cold, hot):
        remote[number]
    files = list_block_files(tmp_path / "cache")
    for path in files:
        os.utime(path, (1, 1))
    for number in cold * 3:
        remote[hot]
        remote[number]
    # Mapping a file again updates its time.
    remapped = {path for path in files if path.stat().st_mtime != 1}
    assert remapped
    assert not remapped & first


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EROFS"])
def test_an_unwritable_cache_is_reported_once_and_skipped(local, url, tmp_path, monkeypatch, caplog, error):
    import errno
    import tempfile

    def refuse(*_args, **_words):
        raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with caplog.at_level(logging.WARNING):
        store = open_store(url, cache=tmp_path / "cache")
        assert assert_same_batches(Loader(local, **SINGLE_RANK), Loader(store, **SINGLE_RANK))
    assert caplog.text.count("Blocks of a remote store cannot be cached in") == 1
    assert not list_block_files(tmp_path / "cache")


def test_a_cache_on_a_disk_that_is_full(local, url, tmp_path):
    """The file size limit fails in the middle of a write, like a full disk."""
    import subprocess
    import sys

    code = (
        "import resource, signal, sys, numpy as np\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "from store.remote_stores import copy_to_memory\n"
        "from batchloom import open_store\n"
        "local = open_store(sys.argv[1])\n"
        "remote = open_store(copy_to_memory(sys.argv[1], 'full'), cache=sys.argv[2])\n"
        "assert all((local[n].ids == remote[n].ids).all() for n in range(len(local)))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(local.path), str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert "cannot be cached in" in process.stderr


def test_invalid_settings(local, url, tmp_path):
    with pytest.raises(SettingsError, match="verify: 'often' is not one of off, first-read, full"):
        open_store(url, verify="often")
    with pytest.raises(SettingsError, match="verify: 'often'"):
        open_store(local.path, verify="often")
    with pytest.raises(SettingsError, match="cache_limit: 0 is not a number of bytes"):
        open_store(url, cache_limit=0)
    with pytest.raises(SettingsError, match="cache: only remote stores are cached"):
        open_store(local.path, cache=tmp_path)
    for value in (3, "", b"x", "x\0", "s3://a/b", "~nobody-is-called-so/x"):
        with pytest.raises(SettingsError, match=re.escape(f"cache: {value!r} is not a local folder: give")):
            open_store(url, cache=value)
    for value in ("", []):
        with pytest.raises(SettingsError, match="verify: .* is not one of off, first-read, full"):
            open_store(url, verify=value)
    with pytest.raises(InputError, match=r"no documents in subset \[\]; it has: train, val"):
        open_store(url, [])
    for value in (3, None, b"near"):
        with pytest.raises(InputError, match=f"{value!r} is not the location of a store: give the path or"):
            open_store(value)
    with pytest.raises(SettingsError, match="verify: only stores have checksums, and dummy is not a store"):
        open_store("dummy", verify="full")


def test_urls_without_a_store(url, tmp_path):
    with pytest.raises(StoreMissingError, match="There is no store at memory://far/nothing"):
        open_store("memory://far/nothing", cache=tmp_path)
    with pytest.raises(InputError, match="no documents in subset 'test'; it has: train, val"):
        open_store(url, "test", cache=tmp_path)
    with pytest.raises(InputError, match=r"nosuch:// is not known to fsspec|is not a readable URL"):
        open_store("nosuch://a/b", cache=tmp_path)


def test_operations_on_local_files_are_refused(remote):
    with pytest.raises(InputError, match="is remote, and its shards are not local files"):
        _ = remote.shards.stems


def test_a_file_url_is_a_path(local):
    assert open_store(f"file://{local.path}").fingerprint == local.fingerprint


def test_a_cache_in_the_folder_of_the_user(url, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store(url, cache="~/blocks")[0].ids.size == len(DOCUMENTS[0])
    assert list_block_files(tmp_path / "blocks")


def test_the_default_cache_is_in_the_user_cache_folder(url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    open_store(url)[0]
    assert list_block_files(tmp_path / "home/batchloom/blocks")


def test_inspect_reads_a_url(local, url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    local_report, remote_report = inspect(local.path), inspect(url)
    assert (remote_report.documents, remote_report.tokens, remote_report.first) == (
        local_report.documents,
        local_report.tokens,
        local_report.first,
    )


def test_golden_bytes_of_a_block_file(tmp_path):
    """The block file format of remote/block_cache.py, which other versions may read."""
    store = write_store(tmp_path / "local", [[1, 2, 3]])
    remote = open_store(copy_to_memory(store.path, tmp_path.name), cache=tmp_path / "cache")
    remote[0]
    heads = [path.read_bytes()[:32] for path in list_block_files(tmp_path / "cache")]
    assert all(head[:8] == b"BLMBLKS\0" and head[8] == 2 for head in heads)
    assert all(re.fullmatch(r"[0-9a-f]{32}\.blocks", path.name) for path in list_block_files(tmp_path / "cache"))
    shard = read_manifest(store.path).subsets["train"].shards[0]
    key = int(shard.bin, 16)
    contents = [path.read_bytes() for path in list_block_files(tmp_path / "cache")]
    low_high = (key >> 64).to_bytes(8, "little") + (key & (1 << 64) - 1).to_bytes(8, "little")
    assert any(low_high in data for data in contents)
    assert any(data.endswith(b"\1\0\2\0\3\0" + bytes(4090)) for data in contents)


def test_check_reports_the_same_for_a_remote_store(tmp_path):
    local = write_store(tmp_path / "local", {"train": DOCUMENTS, "val": [[1, 2]]}, documents_per_shard=23)
    append_documents(local.path, [[7, 8, 256]] * 3)
    url = copy_to_memory(local.path, tmp_path.name)
    local_report, remote_report = check(local.path), check(url)
    assert (remote_report.kind, remote_report.facts, remote_report.sample) == (
        "store",
        local_report.facts,
        local_report.sample,
    )
    assert [fault.replace(url, str(local.path)) for fault in remote_report.faults] == local_report.faults
    assert check(url, generation=1).facts == check(local.path, generation=1).facts
    with pytest.raises(GenerationError):
        check(url, generation=7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train/shard_00003.bin", "shard_00003.bin: checksum differs"),
        ("train/shard_00004.docs", "shard_00004.docs: checksum differs"),
        ("train/shard_00005.idx", "shard_00005.idx"),
        ("train/shard_00006.sums", "shard_00006.sums: does not match its file"),
        ("train/lengths.u32", "lengths.u32: checksum differs"),
        ("train/shard_00001.bin", None),
    ],
)
def test_changed_or_missing_remote_files_are_faults(local, tmp_path, name, message):
    url = copy_to_memory(local.path, tmp_path.name)
    fs = fsspec.filesystem("memory")
    path = f"/far/{tmp_path.name}/{name}"
    data = bytearray(fs.cat_file(path))
    fs.rm(path)
    if message:
        data[-3] ^= 1
        fs.pipe_file(path, bytes(data))
    faults = check(url).faults
    assert any((message or f"{url}/{name} cannot be read") in fault for fault in faults)


def test_full_verification_hashes_only_the_blocks_read(url, tmp_path, monkeypatch):
    store = open_store(url, cache=tmp_path / "cache", verify="full")
    read_all_documents(store)
    hashed_sizes = []

    def count_hashed_bytes(data):
        hashed_sizes.append(len(memoryview(data).cast("B")))
        return compute_block_checksums(data)

    monkeypatch.setattr(remote_blocks, "compute_block_checksums", count_hashed_bytes)
    store[100]
    assert 0 < sum(hashed_sizes) <= 4 * 4096


def test_blocks_cached_before_a_reboot_are_verified_once(local, url, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    open_store(url, cache=cache)[3]
    ids = np.array(DOCUMENTS[3], "<u2").tobytes()
    (changed,) = [path for path in list_block_files(cache) if ids in path.read_bytes()]
    _flip_bit(changed, changed.read_bytes().index(ids))
    wrong = open_store(url, cache=cache, verify="off")
    assert wrong[3].ids.tolist() != DOCUMENTS[3]
    monkeypatch.setattr(block_cache, "_read_boot_id", lambda: bytes([7] * 16))
    reopened = open_store(url, cache=cache, verify="off")
    assert reopened[3].ids.tolist() == DOCUMENTS[3]
    assert reopened.reader.fetched_bytes > 0


def test_provenance_is_fetched_by_blocks(local, url, tmp_path):
    """Only the blocks of one document are fetched of a shard's ``.docs``."""
    large_store = write_store(tmp_path / "big", [[1, 256]] * 20_000)
    store = open_store(copy_to_memory(large_store.path, f"{tmp_path.name}-big"), cache=tmp_path / "cache")
    previous_bytes = store.reader.fetched_bytes
    assert store.provenance.of(12_345) == large_store.provenance.of(12_345)
    assert store.reader.fetched_bytes - previous_bytes <= 8 * 4096
    source, record = large_store.provenance.of(12_345).source, large_store.provenance.of(12_345).record
    assert find_documents(store, source, record) == find_documents(large_store, source, record) == [12_345]
    assert store.reader.fetched_bytes - previous_bytes < 36 * 20_000 / 2


@pytest.mark.parametrize(("limit", "is_reported"), [(20_000, False), (4_000, True)])
def test_a_cache_too_small_for_a_step_is_reported(local, url, tmp_path, caplog, limit, is_reported):
    store = open_store(url, cache=tmp_path / "cache", cache_limit=limit)
    remote_fetch._warn_cache_too_small.cache_clear()
    with caplog.at_level(logging.WARNING, "batchloom"):
        assert_same_batches(Loader(local, **SINGLE_RANK), Loader(store, **SINGLE_RANK))
    assert caplog.text.count("are not fetched ahead: a step") == is_reported
    assert sum(path.stat().st_size for path in list_block_files(tmp_path / "cache")) <= limit
