"""Remote files are transferred once, and small ones are prefetched."""

import json
import os

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from batchloom import InputError
from batchloom.core.errors import AccessError
from batchloom.remote import MAX_CONNECT_ATTEMPTS, prefetch_items, remote_file, stat_remote
from batchloom.sources import PartReader, ReadRules, SourcePart, list_sources, prefetch_sources
from preparation.stores import hash_store_files, prepare_store
from sources.source_reading import read_inputs
from sources.test_tables import FORMS, write_table

SECRET = "SECRET"


def count_served_bytes(web, path):
    """Count the served bytes of a file."""
    total, size = 0, len(web.files[path])
    for _, url, byte_range in web.requests:
        if url.partition("?")[0] == path:
            start, stop = byte_range.removeprefix("bytes=").split("-") if byte_range else (0, size)
            total += min(int(stop) + 1, size) - int(start)
    return total


@pytest.mark.parametrize(
    "name",
    [FORMS[0], "a.jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in (*FORMS[1:3], "a.csv", "a.json"))],
)
def test_a_remote_file_is_transferred_once(web, tmp_path, name):
    rows = [{"text": os.urandom(1000).hex()} for _ in range(600)]
    if name in FORMS:
        path = write_table(tmp_path / name, pa.Table.from_pylist(rows))
    else:
        texts = {
            ".csv": "text\n" + "\n".join(row["text"] for row in rows),
            ".json": json.dumps(rows),
        }
        path = tmp_path / name
        path.write_text(texts.get(path.suffix) or "\n".join(map(json.dumps, rows)))
    web.files[f"/{name}"] = path.read_bytes()
    options = {"unit_bytes": 400_000, "tokens_per_shard": 1_000_000}
    prepare_store(f"{web.url}/{name}", tmp_path / "far", **options)
    prepare_store(path, tmp_path / "near", **options)
    remote, local = hash_store_files(tmp_path / "far"), hash_store_files(tmp_path / "near")
    assert all(remote[name] == local[name] for name in remote if name.endswith((".bin", ".idx", ".docs")))
    # The file is probed, sampled, split, read and hashed, but at most 10% of it is served twice.
    assert count_served_bytes(web, f"/{name}") < 1.1 * len(web.files[f"/{name}"])


def test_pages_beyond_the_cache_are_transferred_again(web, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_file, "PAGE_CACHE", remote_file.PageCache(256 << 10))
    web.files["/a.parquet"] = write_table(
        tmp_path / "a.parquet", pa.table({"text": [os.urandom(500).hex() for _ in range(1500)]})
    ).read_bytes()
    remote, local = read_inputs(f"{web.url}/a.parquet"), read_inputs(tmp_path / "a.parquet")
    assert (remote.values, remote.hashes) == (local.values, local.hashes)
    assert count_served_bytes(web, "/a.parquet") > 1.5 * len(web.files["/a.parquet"])


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_an_unwritable_page_cache_is_skipped(web, monkeypatch, tmp_path, folder):
    monkeypatch.setattr(remote_file.tempfile, "tempdir", folder and str(tmp_path / folder))
    monkeypatch.setattr(remote_file.os, "pwrite", lambda *_: 0)
    serve_small_files(web)
    assert len(read_inputs(f"{web.url}/007.jsonl").values) == 1


@given(reads=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=60))
def test_cached_pages_hold_the_read_bytes(reads):
    page_cache = remote_file.PageCache(5 * remote_file.PAGE_BYTES)
    for name, first, count in reads:
        version = (f"memory://{name}", 1 << 20, name)
        data = b"".join(bytes([16 * name + number]) * remote_file.PAGE_BYTES for number in range(first, first + count))
        page_cache.keep(version, first, data)
        for number in range(16):
            page = page_cache.read_page(version, number)
            assert page in (None, bytes([16 * name + number]) * remote_file.PAGE_BYTES)
    assert page_cache.read_page(version, first + count - 1) is not None
    page_cache.forget()
    assert page_cache.read_page(version, first + count - 1) is None


def test_pages_cached_during_a_lookup_are_not_fetched_again():
    page_cache, version = remote_file.PageCache(5 * remote_file.PAGE_BYTES), ("memory://a", 1 << 20, 1)
    assert page_cache.read_page(version, 0) is None
    assert page_cache.read_page(version, 1) is None
    page_cache.keep(version, 0, bytes(remote_file.PAGE_BYTES))
    assert page_cache.claim(version, [0, 1]) == [1]
    page_cache.keep(version, 1, bytes(remote_file.PAGE_BYTES))
    page_cache.release(version, [1])
    assert page_cache.claim(version, [0, 1]) == []
    page_cache.forget()


def test_a_page_that_cannot_be_read_back_is_fetched(monkeypatch):
    page_cache, version = remote_file.PageCache(5 * remote_file.PAGE_BYTES), ("memory://a", 1 << 20, 1)
    page_cache.keep(version, 0, bytes(remote_file.PAGE_BYTES))
    monkeypatch.setattr(remote_file.os, "pread", lambda *_: b"")
    assert page_cache.read_page(version, 0) is None
    assert page_cache.claim(version, [0]) == [0]
    page_cache.release(version, [0])
    page_cache.forget()


def serve_small_files(web, count=60):
    web.files = {f"/{number:03d}.jsonl": b'{"text": "document %d"}\n' % number for number in range(count)}
    return [f"{web.url}{path}?sig={SECRET}" for path in web.files]


def test_small_files_are_prefetched_in_order(web, tmp_path):
    urls = serve_small_files(web)
    web.held = 12
    result = read_inputs(*urls)
    assert not web.came_alone
    assert [row["text"] for row in result.values] == [f"document {n}" for n in range(60)]
    web.requests.clear()
    prepare_store(urls, tmp_path / "o")
    assert not web.came_alone
    assert len(web.requests) <= 3 * 60 + 3
    assert not any(SECRET in path.read_text("latin1") for path in (tmp_path / "o").rglob("*.json*"))


@pytest.mark.slow
def test_fetching_ahead_is_tried_once(web):
    """Else a job that has ended would wait for the retries of files that it no longer needs."""
    web.answers["/busy.jsonl"] = 503
    assert list(prefetch_items(["/busy.jsonl"], lambda path: stat_remote(web.url + path))) == ["/busy.jsonl"]
    requests_ahead = len(web.requests)
    with pytest.raises(InputError, match="503"):
        stat_remote(f"{web.url}/busy.jsonl")
    assert len(web.requests) == (1 + MAX_CONNECT_ATTEMPTS) * requests_ahead


def test_an_error_of_one_file_names_it(web, no_retry_delay, tmp_path):
    urls = serve_small_files(web)
    web.answers["/042.jsonl"] = 403
    with pytest.raises(AccessError, match=r"/042.jsonl is denied") as caught:
        list_sources(urls)
    assert SECRET not in str(caught.value)
    web.answers.clear()
    listing = list_sources(urls)
    del web.files["/007.jsonl"]
    remote_file.PAGE_CACHE.forget()
    prefetched = prefetch_sources(listing.sources, lambda source: source)
    with pytest.raises(InputError, match=r"007.jsonl"):
        for source in prefetched:
            with PartReader(SourcePart(source, 0, source.size), ReadRules()) as reader:
                assert list(reader)
                reader.finish()


def test_a_small_file_that_changes_after_it_was_listed_is_an_error(web):
    urls = serve_small_files(web)
    listing = list_sources(urls)
    web.files["/007.jsonl"] = web.files["/007.jsonl"].replace(b"7", b"8")
    with pytest.raises(InputError, match=r"007.jsonl was changed while it was being prepared"):
        for source in prefetch_sources(listing.sources, lambda source: source):
            with PartReader(SourcePart(source, 0, source.size), ReadRules()) as reader:
                list(reader)
                reader.finish()
