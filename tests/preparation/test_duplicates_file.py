"""The file of dropped duplicates: all of them, each with the record that was kept."""

import functools
import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from batchloom import check
from batchloom.store import compact_store, read_manifest, remove_documents
from batchloom.store.format import (
    DROPPED_ROW,
    EQUAL,
    ProvenanceTable,
    make_part_table,
    map_dropped_duplicates,
    split_pair_numbers,
    write_dropped_duplicates,
)
from preparation.stores import hash_store_files, prepare_store, read_documents, write_jsonl

NAME = "report.duplicates"


@pytest.fixture(autouse=True)
def work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@functools.cache
def make_text(number, changed=0):
    """Return a text; those of one number with few changed letters are near duplicates."""
    text = "".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz ", k=700))
    return text[: len(text) - changed] + "#" * changed


def locate(store, records):
    """Return (file, record) of record numbers."""
    parts, numbers = split_pair_numbers(records)
    zeros = np.zeros(len(records), np.uint64)
    table = make_part_table(read_manifest(Path(store)).sources)
    located = table.resolve_provenance(ProvenanceTable(np.stack([zeros, zeros], 1), numbers, zeros, parts))
    return [(document.source, document.record) for document in located]


def read_rows(store, generation=1):
    """Return (kept, dropped, offset, shared) of each dropped duplicate."""
    rows = map_dropped_duplicates(Path(store), generation).rows
    columns = locate(store, rows["kept"]), locate(store, rows["dropped"])
    return list(zip(*columns, rows["offset"].tolist(), rows["shared"].tolist(), strict=True))


@pytest.mark.parametrize("dedup", ["exact", "near"])
@pytest.mark.parametrize("unit_bytes", [5_000, 1 << 40])
def test_every_dropped_duplicate_is_listed_with_the_kept_one(monkeypatch, dedup, unit_bytes):
    monkeypatch.setattr("batchloom.store.format.dropped_duplicates.RUN_ROWS", 8)
    rng = random.Random(0)
    texts = {name: [make_text(rng.randrange(6), rng.randrange(4)) for _ in range(20)] for name in ("a", "b", "c")}
    files = [write_jsonl(f"{name}.jsonl", [{"text": text} for text in texts[name]]) for name in texts]
    prepare_store(files, "s", dedup=dedup, unit_bytes=unit_bytes, val_fraction=0.2)
    rows = read_rows("s")
    kept_texts = {(origin.source, origin.record): text for origin, text, _ in read_documents("s")}
    all_texts = {(f"{name}.jsonl", record): text for name in texts for record, text in enumerate(texts[name])}
    assert {dropped for _, dropped, _, _ in rows} == all_texts.keys() - kept_texts.keys()
    assert len(rows) == len(all_texts) - len(kept_texts) > 30
    for kept, dropped, offset, shared in rows:
        assert (all_texts[dropped] == kept_texts[kept]) == (shared == EQUAL)
        assert all_texts[dropped][:600] == kept_texts[kept][:600]
        assert json.loads(Path(dropped[0]).read_bytes()[offset:].partition(b"\n")[0])["text"] == all_texts[dropped]
    duplicates, expected = map_dropped_duplicates(Path("s"), 1), defaultdict(set)
    assert (duplicates.banding is None) == (dedup == "exact")
    for number, (_, dropped, _, _) in zip(duplicates.rows["kept"].tolist(), rows, strict=True):
        expected[number].add(dropped)
    for number, copies in expected.items():
        found = np.concatenate(duplicates.list_copies(number))["dropped"]
        assert set(locate("s", found)) == copies
        assert len(found) == len(copies)
    assert duplicates.list_copies(max(expected) + 1) == []
    assert check("s").sound


def append(file, **settings):
    from preparation.test_append import append as append_input

    return append_input(file, "s", dedup="near", val_fraction=0.3, **settings)


def test_without_duplicates_there_is_no_file():
    prepare_store(
        write_jsonl("a.jsonl", [{"text": make_text(n)} for n in range(5)]), "s", dedup="near", val_fraction=0.3
    )
    assert map_dropped_duplicates(Path("s"), 1) is None
    # A job that was killed while it moved its files, and then given up, leaves one.
    Path("s/report.00002.duplicates").write_bytes(b"of another job")
    append(write_jsonl("b.jsonl", [{"text": make_text(n)} for n in range(5, 9)]))
    assert read_manifest(Path("s")).generation == 2
    assert not [*Path("s").glob("*.duplicates")]


def test_an_appended_generation_names_records_of_earlier_ones():
    write_jsonl("a.jsonl", [{"text": make_text(n)} for n in range(30)])
    prepare_store("a.jsonl", "s", dedup="near", val_fraction=0.3, unit_bytes=5_000)
    # The searches number the documents of a shard without and with its removed ones.
    Path("list").write_text("".join(f"a.jsonl {n}\n" for n in (0, 3, 4, 17)))
    remove_documents("s", documents_file="list")
    append(write_jsonl("b.jsonl", [{"text": make_text(n, n % 2)} for n in range(5, 17)]))
    rows = read_rows("s", 3)
    assert [(kept, dropped) for kept, dropped, _, _ in rows] == [
        (("a.jsonl", n), ("b.jsonl", n - 5)) for n in range(5, 17)
    ]
    assert [shared == EQUAL for _, _, _, shared in rows] == [n % 2 == 0 for n in range(5, 17)]
    assert min(shared for _, _, _, shared in rows) > 7
    assert check("s").sound
    before = Path("s/report.00003.duplicates").read_bytes()
    remove_documents("s", sources=["a.jsonl"])
    append(write_jsonl("c.jsonl", [{"text": make_text(n)} for n in (40, 40)]))
    compact_store("s")
    assert Path("s/report.00003.duplicates").read_bytes() == before
    assert [row[:2] for row in read_rows("s", 5)] == [(("c.jsonl", 0), ("c.jsonl", 1))]
    assert check("s").sound, check("s").faults


def test_the_two_documents_of_a_pair_are_one_record():
    pairs = [{"prompt": "p", "chosen": make_text(n), "rejected": make_text(n + 50)} for n in (0, 1, 0, 1, 0)]
    prepare_store(write_jsonl("a.jsonl", pairs), "s", template="plain", val_fraction=0)
    assert [(kept[1], dropped[1]) for kept, dropped, _, _ in read_rows("s")] == [(0, 2), (0, 4), (1, 3)]


def test_damaged_files_are_found():
    write_jsonl("a.jsonl", [{"text": make_text(n % 5)} for n in range(20)])
    prepare_store("a.jsonl", "s", val_fraction=0)
    path = Path("s", NAME)
    data = path.read_bytes()

    def list_faults():
        faults = check("s").faults
        assert len(faults) == 1
        assert faults[0].startswith(str(path))
        return faults[0]

    for position in (26, 40, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert "checksum differs from that in its header" in list_faults()
    path.write_bytes(data[:-1])
    assert "declares 15 rows" in list_faults()
    path.write_bytes(b"B" + data[:20])
    assert "is cut short" in list_faults()
    path.write_bytes(b"X" + data[1:])
    assert "is not a .duplicates file" in list_faults()
    for kept, dropped, fault in ((2, 20, "names records"), (1 << 40, 3, "names records"), (7, 3, "1 of its rows")):
        write_dropped_duplicates(path, [np.array([(kept, dropped, 0, EQUAL)], DROPPED_ROW)], None)
        assert fault in list_faults()
    write_dropped_duplicates(path, [], None)
    assert "it has no rows. Restore it" in list_faults()
    # The file may be deleted with the report.
    path.unlink()
    assert check("s").sound


def test_the_file_of_another_store_is_found():
    for name, texts in (("few", 10), ("many", 12)):
        write_jsonl(f"{name}.jsonl", [{"text": make_text(n % 5)} for n in range(texts)])
        prepare_store(f"{name}.jsonl", name, val_fraction=0)
    Path("few", NAME).write_bytes(Path("many", NAME).read_bytes())
    (fault,) = check("few").faults
    assert "names records that no source has" in fault or "it has 7 rows" in fault


def test_a_repeated_run_writes_the_same_file():
    write_jsonl("a.jsonl", [{"text": make_text(n % 7, n % 3)} for n in range(30)])
    for out, unit_bytes in (("one", 3_000), ("two", 3_000)):
        prepare_store("a.jsonl", out, dedup="near", unit_bytes=unit_bytes)
    assert NAME in hash_store_files("one")
    assert hash_store_files("one") == hash_store_files("two")
