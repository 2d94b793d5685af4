"""Mutated files give rows of the file, or an error with its name.

BATCHLOOM_MUTATIONS is the number of mutations per format. 1,000 pass; both tiers run fewer.
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
from sources.source_reading import read_inputs
from sources.test_archives import COMPRESSORS, make_archive
from sources.test_tables import write_table
from tiers import examples

COUNT = int(os.environ.get("BATCHLOOM_MUTATIONS", examples(300)))
ROWS = [{"text": f'row {i} "q" \\ é, {{}}' * (1 + i % 3), "n": i, "l": [1, {"x": None}]} for i in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def encode_csv():
    text = io.StringIO()
    writer = csv.DictWriter(text, ["text", "n", "l"])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def save_table(tmp_path, name, **options):
    rows = [row | {"l": [{"x": row["n"]}, None]} for row in ROWS]
    return write_table(tmp_path / name, pa.Table.from_pylist(rows), 20, **options).read_bytes()


def compress_lines(ending):
    return lambda tmp_path: COMPRESSORS[ending](LINES)


def write_archive(name):
    files = [
        ("a.jsonl", LINES),
        ("b.json.gz", COMPRESSORS["gz"](json.dumps(ROWS).encode())),
        ("c.csv", encode_csv()),
    ]
    return lambda tmp_path: make_archive(tmp_path / f"whole.{name}", files).read_bytes()


FORMATS = {
    "jsonl": lambda tmp_path: LINES,
    "json": lambda tmp_path: json.dumps(ROWS, indent=1).encode(),
    "data.json": lambda tmp_path: json.dumps({"v": "x", "data": ROWS, "z": [{}]}).encode(),
    "csv": lambda tmp_path: encode_csv(),
    "txt": lambda tmp_path: b"Lines:\n" + LINES,
    "parquet": lambda tmp_path: save_table(tmp_path, "whole.parquet", write_page_checksum=True),
    "arrow": lambda tmp_path: save_table(tmp_path, "whole.arrow"),
    "stream.arrow": lambda tmp_path: save_table(tmp_path, "whole.stream.arrow"),
    **{f"jsonl.{ending}": compress_lines(ending) for ending in COMPRESSORS},
    **{name: write_archive(name) for name in ("zip", "stored.zip", "tar", "tar.gz", "tar.zst")},
}


def mutate(data, rng):
    """Flip, delete, duplicate, insert or overwrite bytes, up to three times."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + rng.choice([1, 8, 100, len(data)]))
        action = rng.randrange(6)
        if action == 0:
            del data[rng.choice([a, b]) :]
        elif action == 1:
            del data[a:b]
        elif action == 2:
            data[a:a] = data[a:b]
        elif action == 3:
            data[a:b] = rng.randbytes(b - a)
        elif action == 4:
            token = rng.choice([b'"', b"\\", b"{", b"]", b",", b"\n", b"\0", b"\xff", b'"]}'])
            data[a:a] = token
        elif data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if not data:
            return b"\0"
    return bytes(data)


def check_json_row(data, offset, row):
    text = data[offset:].decode("utf-8", "replace")
    assert json.JSONDecoder().raw_decode(text)[0] == row


def check_rows(name, data, result):
    """Compare rows of plain formats with the standard library at their offsets."""
    if name in ("json", "data.json", "jsonl"):
        for offset, row in zip(result.offsets, result.values, strict=True):
            check_json_row(data, offset, row)
    if name == "jsonl" and result.sources[0].kind == "jsonl":
        lines = data.removesuffix(b"\n").split(b"\n")
        assert len(result.values) + len(result.bad) <= len(lines)
    if name == "csv":
        text = data.decode("utf-8", "replace").removeprefix("\ufeff")
        header = text.split("\n")[0]
        delimiter = max(",;\t", key=lambda mark: len(next(csv.reader([header], delimiter=mark))))
        rows = []
        reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter)
        while True:
            try:
                rows.append(next(reader))
            except StopIteration:
                break
            except csv.Error:
                continue
        assert all(list(row.values()) in rows for row in result.values)


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_gives_its_rows_or_a_named_error(tmp_path, name):
    original = FORMATS[name](tmp_path)
    rng = random.Random(name)
    path = tmp_path / f"a.{name}"
    path.write_bytes(original)
    assert read_inputs(path, unit=1 << 40, field=None).values
    errors = []
    for number in range(COUNT):
        data = mutate(original, rng)
        path.write_bytes(data)
        unit, field = rng.choice([1 << 40, 700]), rng.choice([None, None, "text"])
        started = time.process_time()
        try:
            result = read_inputs(path, unit=unit, field=field)
        except BatchloomError as error:
            errors.append(str(error))
        else:
            if field is None:
                check_rows(name, data, result)
        assert time.process_time() - started < 5, f"number {number} takes too long"
    assert [message for message in errors if path.name not in message or "\n" in message] == []
