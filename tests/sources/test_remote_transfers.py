"""Files elsewhere are transferred once, and small ones ahead of time; what they give stays the same."""

import json
import os
import time

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from batchloom import InputError
from batchloom.core.errors import AccessError
from batchloom.remote import block_file as blocks, read_cache as kept
from batchloom.sources import PartReader, ReadRules, SourcePart, list_sources, prefetch_sources
from preparation.stores import make, tree
from sources.source_reading import Read
from sources.test_tables import FORMS, write

SECRET = "SECRET"


def served(web, path):
    """How many bytes of a file were given away."""
    total, size = 0, len(web.files[path])
    for _, asked, stretch in web.asked:
        if asked.partition("?")[0] == path:
            start, stop = stretch.removeprefix("bytes=").split("-") if stretch else (0, size)
            total += min(int(stop) + 1, size) - int(start)
    return total


@pytest.mark.parametrize("name", [*FORMS[:3], "a.csv", "a.json", "a.jsonl"])
def test_a_file_elsewhere_is_transferred_once(web, tmp_path, name):
    rows = [{"text": os.urandom(1000).hex()} for _ in range(1500)]
    if name in FORMS:
        path = write(tmp_path / name, pa.Table.from_pylist(rows))
    else:
        lists = {
            ".csv": "text\n" + "\n".join(row["text"] for row in rows),
            ".json": json.dumps(rows),
        }
        path = tmp_path / name
        path.write_text(lists.get(path.suffix) or "\n".join(map(json.dumps, rows)))
    web.files[f"/{name}"] = path.read_bytes()
    options = {"unit_bytes": 1 << 20, "tokens_per_shard": 1_000_000}
    make(f"{web.url}/{name}", tmp_path / "far", **options)
    make(path, tmp_path / "near", **options)
    far, near = tree(tmp_path / "far"), tree(tmp_path / "near")
    assert all(far[one] == near[one] for one in far if one.endswith((".bin", ".idx", ".docs")))
    # Looked at, sampled, cut, read and hashed: of a megabyte and a half no more than some 100 kB twice.
    assert served(web, f"/{name}") < 1.1 * len(web.files[f"/{name}"])


def test_what_does_not_fit_is_transferred_again(web, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "PAGE_CACHE", kept.PageCache(256 << 10))
    web.files["/a.parquet"] = write(
        tmp_path / "a.parquet", pa.table({"text": [os.urandom(500).hex() for _ in range(3000)]})
    ).read_bytes()
    far, near = Read(f"{web.url}/a.parquet"), Read(tmp_path / "a.parquet")
    assert (far.values, far.hashes) == (near.values, near.hashes)
    assert served(web, "/a.parquet") > 1.5 * len(web.files["/a.parquet"])


@pytest.mark.parametrize("folder", [None, "/nowhere"])
def test_no_room_for_what_could_be_kept_is_no_fault(web, monkeypatch, folder):
    monkeypatch.setattr(kept.tempfile, "tempdir", folder)
    monkeypatch.setattr(kept.os, "pwrite", lambda *_: 0)
    many(web)
    assert len(Read(f"{web.url}/007.jsonl").values) == 1


@given(asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=60))
def test_what_is_kept_is_what_was_read(asked):
    held = kept.PageCache(5 * kept.PAGE_BYTES)
    for name, first, count in asked:
        version = (f"memory://{name}", 1 << 20, name)
        data = b"".join(bytes([16 * name + number]) * kept.PAGE_BYTES for number in range(first, first + count))
        held.keep(version, first, data)
        for number in range(16):
            page = held.read_page(version, number)
            assert page in (None, bytes([16 * name + number]) * kept.PAGE_BYTES)
    assert held.read_page(version, first + count - 1) is not None
    held.forget()
    assert held.read_page(version, first + count - 1) is None


def test_what_came_while_somebody_looked_is_not_fetched_again():
    held, version = kept.PageCache(5 * kept.PAGE_BYTES), ("memory://a", 1 << 20, 1)
    assert held.read_page(version, 0) is None
    assert held.read_page(version, 1) is None
    held.keep(version, 0, bytes(kept.PAGE_BYTES))
    assert held.claim(version, [0, 1]) == [1]
    held.keep(version, 1, bytes(kept.PAGE_BYTES))
    held.release(version, [1])
    assert held.claim(version, [0, 1]) == []
    held.forget()


def test_a_page_that_cannot_be_read_back_is_fetched(monkeypatch):
    held, version = kept.PageCache(5 * kept.PAGE_BYTES), ("memory://a", 1 << 20, 1)
    held.keep(version, 0, bytes(kept.PAGE_BYTES))
    monkeypatch.setattr(kept.os, "pread", lambda *_: b"")
    assert held.read_page(version, 0) is None
    assert held.claim(version, [0]) == [0]
    held.release(version, [0])
    held.forget()


def many(web, count=60):
    web.files = {f"/{number:03d}.jsonl": b'{"text": "document %d"}\n' % number for number in range(count)}
    return [f"{web.url}{path}?sig={SECRET}" for path in web.files]


def test_small_files_are_fetched_ahead_and_stay_in_order(web, tmp_path):
    web.delay = 0.02
    urls = many(web)
    begin = time.perf_counter()
    found = Read(*urls)
    seconds = time.perf_counter() - begin
    assert [row["text"] for row in found.values] == [f"document {n}" for n in range(60)]
    web.asked.clear()
    make(urls, tmp_path / "o")
    # One after the other the requests alone would take their number times the delay.
    assert len(web.asked) <= 3 * 60 + 3
    assert seconds < 60 * 5 * web.delay
    assert not any(SECRET in path.read_text("latin1") for path in (tmp_path / "o").rglob("*.json*"))


def test_a_fault_of_one_of_many_names_it(web, impatient, tmp_path):
    urls = many(web)
    web.answers["/042.jsonl"] = 403
    with pytest.raises(AccessError, match=r"/042.jsonl is denied") as caught:
        list_sources(urls)
    assert SECRET not in str(caught.value)
    web.answers.clear()
    listing = list_sources(urls)
    del web.files["/007.jsonl"]
    kept.PAGE_CACHE.forget()
    reading = prefetch_sources(listing.sources, lambda source: source)
    with pytest.raises(InputError, match=r"007.jsonl"):
        for source in reading:
            with PartReader(SourcePart(source, 0, source.size), ReadRules()) as reader:
                assert list(reader)
                reader.finish()


def test_a_small_file_that_changes_after_it_was_listed_is_an_error(web):
    urls = many(web)
    listing = list_sources(urls)
    web.files["/007.jsonl"] = web.files["/007.jsonl"].replace(b"7", b"8")
    with pytest.raises(InputError, match=r"007.jsonl was changed while it was being prepared"):
        for source in prefetch_sources(listing.sources, lambda source: source):
            with PartReader(SourcePart(source, 0, source.size), ReadRules()) as reader:
                list(reader)
                reader.finish()
