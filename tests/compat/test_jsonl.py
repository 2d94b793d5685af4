"""``load_jsonl_file``: compressions and layouts, exact values, error positions."""

import gzip
import json

import pytest

from batchloom.compat import iter_jsonl_file, load_jsonl_file

ROWS = [{"a": 1, "b": [None, "x"]}, {"a": "one"}, {"text": "ä\n", "n": {"m": 1.5}}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES.encode()),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("a.txt", LINES.encode()),
        ("no_ending", ("\ufeff" + LINES.replace("\n", "\r\n\n")).encode()),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", json.dumps({"data": ROWS}).encode()),
    ],
)
def test_records_are_what_json_makes_of_them(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert load_jsonl_file(tmp_path / name) == ROWS
    assert list(iter_jsonl_file(str(tmp_path / name))) == ROWS


def test_what_comes_before_a_bad_line_is_given_and_the_line_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n' * 4 + '{"a": 1, "b": x}\n' + '{"a": 2}\n')
    rows = iter_jsonl_file(path)
    assert [next(rows) for _ in range(4)] == [{"a": 1}] * 4
    with pytest.raises(json.JSONDecodeError, match=r"Invalid JSON on line 5 in data.jsonl, column"):
        next(rows)


def test_it_streams(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": "' + "x" * 1000 + '"}\n' + '{"a": 1}\n' * 200_000 + "broken\n")
    assert len(next(iter_jsonl_file(path))["a"]) == 1000


def test_missing_files_and_invalid_records(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"JSONL file not found: {tmp_path}/no.jsonl"):
        load_jsonl_file(tmp_path / "no.jsonl")
    (tmp_path / "list.json").write_text('{\n"name": "x"\n}')
    with pytest.raises(ValueError, match="JSON file must contain a list of objects"):
        load_jsonl_file(tmp_path / "list.json")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[1, 2]\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 2, column 1: an array, not a JSON object"):
        load_jsonl_file(tmp_path / "a.jsonl")


def test_real_files(real_data):
    for name in ("gsm8k_train.jsonl", "c4_demo.jsonl"):
        path = real_data / name
        assert load_jsonl_file(path) == [json.loads(line) for line in path.read_text().splitlines()]
