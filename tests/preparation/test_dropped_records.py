"""The file of dropped duplicates: all of them, each with the record that was kept."""

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchloom import check, open_store
from batchloom.store import compact_store, read_manifest, remove_documents
from batchloom.store.format import (
    DROPPED_ROW,
    EQUAL,
    ProvenanceTable,
    dropped_duplicates,
    make_part_table,
    map_dropped_duplicates,
    split_pair_numbers,
    write_dropped_duplicates,
)
from batchloom.view.documents.document_family import read_removed_copies
from preparation.stores import hash_store_files, prepare_store, read_documents, write_jsonl

NAME = "report.duplicates"


@pytest.fixture(autouse=True)
def work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
    """Return (kept, dropped, offset, shared) of each dropped record."""
    rows = map_dropped_duplicates(Path(store), generation).rows
    columns = locate(store, rows["kept"]), locate(store, rows["dropped"])
    return list(zip(*columns, rows["offset"].tolist(), rows["shared"].tolist(), strict=True))


@pytest.mark.parametrize("dedup", ["exact", "near"])
@pytest.mark.parametrize("unit_bytes", [2_000, 1 << 40])
def test_every_dropped_record_is_listed_with_the_kept_one(monkeypatch, dedup, unit_bytes):
    monkeypatch.setattr(dropped_duplicates, "RUN_ROWS", 8)
    rng = random.Random(0)
    texts = {name: [make_text(rng.randrange(12), rng.randrange(4)) for _ in range(40)] for name in ("a", "b", "c")}
    files = [write_jsonl(f"{name}.jsonl", [{"text": text} for text in texts[name]]) for name in texts]
    prepare_store(files, "s", dedup=dedup, unit_bytes=unit_bytes, val_fraction=0.2)
    rows = read_rows("s")
    kept_texts = {(origin.source, origin.record): text for origin, text, _ in read_documents("s")}
    all_texts = {(f"{name}.jsonl", record): text for name in texts for record, text in enumerate(texts[name])}
    assert {dropped for _, dropped, _, _ in rows} == all_texts.keys() - kept_texts.keys()
    assert len(rows) == len(all_texts) - len(kept_texts) > 60
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


def test_without_duplicates_there_is_no_file():
    prepare_store(write_jsonl("a.jsonl", [{"text": make_text(n)} for n in range(5)]), "s", dedup="near")
    # An abandoned job may have left one.
    assert not Path("s", NAME).exists()
    assert map_dropped_duplicates(Path("s"), 1) is None


def append(file, **settings):
    from preparation.test_append import append as append_input

    return append_input(file, "s", dedup="near", val_fraction=0.3, **settings)


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
    store = open_store("s")
    for number, lines in enumerate((["line 3", "line 5"], ["line 3", "line 5"], ["line 4"], ["line 4"])):
        assert [copy.position for copy in read_removed_copies(store, number).copies] == lines


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
    assert "declares 15 records" in list_faults()
    path.write_bytes(b"B" + data[:20])
    assert "is cut short" in list_faults()
    path.write_bytes(b"X" + data[1:])
    assert "is not a .duplicates file" in list_faults()
    for kept, dropped, fault in ((2, 20, "names records"), (1 << 40, 3, "names records"), (7, 3, "1 of its rows")):
        write_dropped_duplicates(path, [np.array([(kept, dropped, 0, EQUAL)], DROPPED_ROW)], None)
        assert fault in list_faults()
    # Older stores have no such file, and it may be deleted with the report.
    path.unlink()
    assert check("s").sound


def write_table(path, texts):
    pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path, row_group_size=3)


def write_csv(path, texts):
    Path(path).write_text("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))


FORMATS = {
    "a.jsonl": lambda path, texts: write_jsonl(path, [{"text": text} for text in texts]),
    "a.jsonl.gz": lambda path, texts: Path(path).write_bytes(
        gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    ),
    "a.json": lambda path, texts: Path(path).write_text(json.dumps([{"text": text} for text in texts])),
    "a.csv": write_csv,
    "a.parquet": write_table,
    "a.txt": lambda path, texts: Path(path).write_text("\n\n".join(texts)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_a_dropped_record_is_read_from_its_file(name):
    texts = [f"the first text, {'long ' * 40}"] * 3 + [f"text {n} " * 20 for n in range(9)]
    FORMATS[name](name, [*texts, *texts[5:]])
    prepare_store(name, "s", split_on="paragraph", dedup="exact", val_fraction=0)
    store = open_store("s")
    for document, (_, text, _) in enumerate(read_documents("s")):
        for copy in read_removed_copies(store, document).copies:
            assert (copy.fault, copy.similarity) == ("", 1)
            assert copy.words == " ".join(text[:240].split())
    assert sum(read_removed_copies(store, document).total for document in range(len(store))) == 9


def test_a_conversation_is_shown_as_its_record():
    row = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]}
    prepare_store(write_jsonl("a.jsonl", [row, row]), "s", template="plain", val_fraction=0)
    (copy,) = read_removed_copies(open_store("s"), 0).copies
    assert json.loads(copy.words) == row


def test_why_a_text_cannot_be_read():
    prepare_store(write_jsonl("a.jsonl", [{"text": "one text"}] * 2), "s", val_fraction=0)

    def read_fault():
        (copy,) = read_removed_copies(open_store("s"), 0).copies
        assert (copy.source, copy.position, copy.words) == ("a.jsonl", "line 2", "")
        return copy.fault

    Path("a.jsonl").touch()
    assert read_fault() == "Its file was changed after it was prepared."
    Path("a.jsonl").unlink()
    assert read_fault().startswith("Its file cannot be read: ")
    report = json.loads(Path("s/report.json").read_text())
    report["sources"][0]["path"] = "https://example.com/a.jsonl"
    Path("s/report.json").write_text(json.dumps(report))
    assert read_fault() == "Its file is remote and is not read here."
    Path("s/report.json").unlink()
    assert read_fault() == "The report of the store does not name its file."


def test_a_record_far_inside_a_compressed_file_is_not_read():
    texts = ["one text", *("".join(random.Random(n).choices("abcdef ", k=9_000)) for n in range(2000)), "one text"]
    Path("a.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)))
    prepare_store("a.jsonl.gz", "s", val_fraction=0)
    (copy,) = read_removed_copies(open_store("s"), 0).copies
    assert copy.fault == "It is too far inside its file to be read here."


def test_large_families_have_pages(monkeypatch):
    monkeypatch.setattr(dropped_duplicates, "RUN_ROWS", 32)
    prepare_store(write_jsonl("a.jsonl", [{"text": "same"}] * 121), "s", val_fraction=0)
    store, lines, start = open_store("s"), [], 0
    while start is not None:
        copies = read_removed_copies(store, 0, start)
        assert (copies.total, copies.is_complete) == (120, True)
        lines += [copy.position for copy in copies.copies]
        start = copies.next_start
    assert lines == [f"line {number}" for number in range(2, 122)]


def test_a_repeated_run_writes_the_same_file():
    write_jsonl("a.jsonl", [{"text": make_text(n % 7, n % 3)} for n in range(60)])
    for out, unit_bytes in (("one", 3_000), ("two", 3_000)):
        prepare_store("a.jsonl", out, dedup="near", unit_bytes=unit_bytes)
    assert NAME in hash_store_files("one")
    assert hash_store_files("one") == hash_store_files("two")
