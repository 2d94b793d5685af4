"""Files that were cut, flipped or spliced end in rows that are there, or in an error with a name.

BATCHLOOM_MUTATIONS says how many of each format (1,000 hold; both tiers take fewer).
"""

import csv
import io
import json
import os
import random
import time

import pyarrow as pa
import pytest

from batchloom import BatchloomError
from sources.source_reading import Read
from sources.test_archives import PACK, make
from sources.test_tables import write as write_table
from tiers import examples

COUNT = int(os.environ.get("BATCHLOOM_MUTATIONS", examples(300)))
ROWS = [{"text": f'row {i} "q" \\ é, {{}}' * (1 + i % 3), "n": i, "l": [1, {"x": None}]} for i in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def tabular():
    text = io.StringIO()
    writer = csv.DictWriter(text, ["text", "n", "l"])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def saved(tmp_path, name, **options):
    rows = [row | {"l": [{"x": row["n"]}, None]} for row in ROWS]
    return write_table(tmp_path / name, pa.Table.from_pylist(rows), 20, **options).read_bytes()


def packed(ending):
    return lambda tmp_path: PACK[ending](LINES)


def archived(name):
    files = [
        ("a.jsonl", LINES),
        ("b.json.gz", PACK["gz"](json.dumps(ROWS).encode())),
        ("c.csv", tabular()),
    ]
    return lambda tmp_path: make(tmp_path / f"whole.{name}", files).read_bytes()


FORMATS = {
    "jsonl": lambda tmp_path: LINES,
    "json": lambda tmp_path: json.dumps(ROWS, indent=1).encode(),
    "data.json": lambda tmp_path: json.dumps({"v": "x", "data": ROWS, "z": [{}]}).encode(),
    "csv": lambda tmp_path: tabular(),
    "txt": lambda tmp_path: LINES,
    "parquet": lambda tmp_path: saved(tmp_path, "whole.parquet", write_page_checksum=True),
    "arrow": lambda tmp_path: saved(tmp_path, "whole.arrow"),
    "stream.arrow": lambda tmp_path: saved(tmp_path, "whole.stream.arrow"),
    **{f"jsonl.{ending}": packed(ending) for ending in PACK},
    **{name: archived(name) for name in ("zip", "stored.zip", "tar", "tar.gz", "tar.zst")},
}


def mutated(data, choose):
    """The bytes with up to three of them flipped, a stretch cut out, doubled, moved or overwritten."""
    data = bytearray(data)
    for _ in range(choose.randint(1, 3)):
        a, b = sorted(choose.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + choose.choice([1, 8, 100, len(data)]))
        how = choose.randrange(6)
        if how == 0:
            del data[choose.choice([a, b]) :]
        elif how == 1:
            del data[a:b]
        elif how == 2:
            data[a:a] = data[a:b]
        elif how == 3:
            data[a:b] = choose.randbytes(b - a)
        elif how == 4:
            piece = choose.choice([b'"', b"\\", b"{", b"]", b",", b"\n", b"\0", b"\xff", b'"]}'])
            data[a:a] = piece
        elif data:
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        if not data:
            return b"\0"
    return bytes(data)


def check_json_row(data, offset, row):
    text = data[offset:].decode("utf-8", "replace")
    assert json.JSONDecoder().raw_decode(text)[0] == row


def check_rows(name, data, found):
    """Rows of plain formats are compared with what the standard library reads at their place."""
    if name in ("json", "data.json", "jsonl"):
        for offset, row in zip(found.offsets, found.values, strict=True):
            check_json_row(data, offset, row)
    if name == "jsonl" and found.sources[0].kind == "jsonl":
        lines = data.removesuffix(b"\n").split(b"\n")
        assert len(found.values) + len(found.bad) <= len(lines)
    if name == "csv":
        text = data.decode("utf-8", "replace").removeprefix("\ufeff")
        header = text.split("\n")[0]
        delimiter = max(",;\t", key=lambda one: len(next(csv.reader([header], delimiter=one))))
        rows = []
        reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter)
        while True:
            try:
                rows.append(next(reader))
            except StopIteration:
                break
            except csv.Error:
                continue
        assert all(list(row.values()) in rows for row in found.values)


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_ends_in_its_rows_or_in_an_error_with_a_name(tmp_path, name):
    whole = FORMATS[name](tmp_path)
    choose = random.Random(name)
    path = tmp_path / f"a.{name}"
    path.write_bytes(whole)
    assert Read(path, unit=1 << 40, field=None).values
    errors = []
    for number in range(COUNT):
        data = mutated(whole, choose)
        path.write_bytes(data)
        unit, field = choose.choice([1 << 40, 700]), choose.choice([None, None, "text"])
        begin = time.process_time()
        try:
            found = Read(path, unit=unit, field=field)
        except BatchloomError as error:
            errors.append(str(error))
        else:
            if field is None:
                check_rows(name, data, found)
        assert time.process_time() - begin < 5, f"number {number} takes too long"
    assert [one for one in errors if path.name not in one or "\n" in one] == []
