"""Equal records in any format give equal documents, provenance and quarantine."""

import bz2
import csv
import json
import lzma

import pytest

from batchloom import check
from batchloom.core.errors import RecordError, TooManyBadRecordsError
from batchloom.store import read_manifest
from preparation.stores import hash_store_files, prepare_store, read_documents, read_texts
from sources.test_archives import make_archive
from sources.test_tables import pa, write_table

RECORDS = [{"text": f'Record {i} says "é" {"and more " * (i % 7)}', "n": i} for i in range(120)]
EXPECTED = [record["text"] for record in RECORDS]


def write_csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["n", "text"])
        writer.writeheader()
        writer.writerows(RECORDS)


LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.json": lambda path: path.write_text(json.dumps(RECORDS, indent=2)),
    "data.json": lambda path: path.write_text(json.dumps({"data": RECORDS})),
    "a.csv": write_csv,
    "a.parquet": lambda path: write_table(path, pa.Table.from_pylist(RECORDS), 30),
    "a.arrow": lambda path: write_table(path, pa.Table.from_pylist(RECORDS), 30),
    "a.stream.arrow": lambda path: write_table(path, pa.Table.from_pylist(RECORDS), 30),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "a.json.bz2": lambda path: path.write_bytes(bz2.compress(json.dumps(RECORDS).encode())),
    "a.zip": lambda path: make_archive(path, [("x/a.jsonl", LINES)]),
    "a.tar.gz": lambda path: make_archive(path, [("x/a.json", json.dumps(RECORDS).encode())]),
}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *((name, 2500) for name in WRITERS),
        ("a.jsonl", 1 << 40),
        *(pytest.param(name, 1 << 40, marks=pytest.mark.slow) for name in WRITERS if name != "a.jsonl"),
    ],
)
def test_documents_are_those_of_the_records(tmp_path, name, unit):
    path = tmp_path / name
    WRITERS[name](path)
    prepare_store(path, tmp_path / "out", unit_bytes=unit, normalize=False, val_fraction=0.1)
    rows = read_documents(tmp_path / "out")
    assert [text for _, text, _ in rows] == EXPECTED
    assert [origin.record for origin, _, _ in rows] == list(range(len(RECORDS)))
    assert check(tmp_path / "out").faults == []
    before = hash_store_files(tmp_path / "out")
    assert prepare_store(path, tmp_path / "out", unit_bytes=unit, normalize=False, val_fraction=0.1).already_done
    assert hash_store_files(tmp_path / "out") == before
    # A file with another time is recognized by its content.
    path.touch()
    assert prepare_store(path, tmp_path / "out", unit_bytes=unit, normalize=False, val_fraction=0.1).already_done


def test_a_table_is_cut_at_its_groups_and_learned_from(tmp_path):
    path = write_table(tmp_path / "a.parquet", pa.Table.from_pylist(RECORDS), 30)
    prepare_store(path, tmp_path / "out", unit_bytes=600, tokenizer="train:300")
    (source,) = read_manifest(tmp_path / "out").sources
    assert source.kind == "parquet"
    assert len(source.parts) > 3
    assert [part.stop for part in source.parts[:-1]] == [part.start for part in source.parts[1:]]
    assert sum(part.records for part in source.parts) == len(RECORDS)


@pytest.mark.parametrize("unit", [1 << 40, 500])
def test_bad_records_of_every_format_are_quarantined_by_line_or_row(tmp_path, unit):
    (tmp_path / "a.json").write_text('[{"text": "good"},\n {"text": NaN},\n {"text": 5}]')
    (tmp_path / "b.csv").write_text('text,n\n"two\nlines",1\nragged\ngood,2\n')
    rows = [{"text": f"good {i}" if i != 37 else None} for i in range(60)]
    write_table(tmp_path / "c.parquet", pa.Table.from_pylist(rows), 20)
    inputs = [tmp_path / name for name in ("a.json", "b.csv", "c.parquet")]
    prepare_store(inputs, tmp_path / "out", unit_bytes=unit, max_bad=4, dedup="none")
    quarantined = map(json.loads, (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines())
    assert [(record["source"], record["line"], record["row"], record["column"]) for record in quarantined] == [
        ("a.json", 2, 2, 11),
        ("a.json", 3, 3, None),
        ("b.csv", 4, 2, None),
        ("c.parquet", None, 38, None),
    ]
    with pytest.raises(TooManyBadRecordsError, match="The first: Invalid JSON on line 2 in a.json, column 11: "):
        prepare_store(inputs, tmp_path / "out2", unit_bytes=unit, max_bad=3)
    assert len(read_texts(tmp_path / "out")) == 1 + 2 + 59


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.parquet", "a.zip"])
def test_a_wrong_field_stops_before_any_work(tmp_path, name):
    WRITERS[name](tmp_path / name)
    with pytest.raises(RecordError, match="no field 'txt': .* did you mean --text-field 'text'"):
        prepare_store(tmp_path / name, tmp_path / "out", text_field="txt")
    assert not (tmp_path / "out").exists()
