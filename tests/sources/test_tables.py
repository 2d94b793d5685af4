"""Parquet and Arrow: rows, parts at row groups and record batches, and errors."""

import datetime as dt
import decimal
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from batchloom import InputError
from batchloom.core.document import JsonObject
from batchloom.core.errors import RecordError
from batchloom.sources import ReadLimits
from sources.source_reading import read_inputs

ROWS = [{"text": f"row {i} é", "n": i, "l": [1, None], "s": {"a": None, "b": [{"c": 1.5}]}} for i in range(400)]
TABLE = pa.Table.from_pylist(ROWS)
DICTIONARY_TABLE = TABLE.set_column(0, "text", TABLE["text"].dictionary_encode())


def write_table(path, table=TABLE, rows=25, **options):
    form = path.name.split(".", 1)[1]
    if form == "parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
    elif form == "feather":
        pyarrow.feather.write_feather(table, path, chunksize=rows)
    else:
        make = pa.ipc.new_stream if form == "stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, make(file, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


FORMS = ["a.parquet", "a.arrow", "a.stream.arrow", "a.feather"]


@pytest.mark.parametrize("unit", [1 << 40, pytest.param(1500, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize(
    "table", [TABLE, pytest.param(DICTIONARY_TABLE, marks=pytest.mark.slow)], ids=["plain", "dictionary"]
)
@pytest.mark.parametrize("name", FORMS)
def test_rows_are_the_same_for_any_parts(tmp_path, name, table, unit):
    path = write_table(tmp_path / name, table)
    result = read_inputs(path, unit=unit)
    assert result.values == ROWS
    assert result.records == list(range(400))
    assert (len(result.hashes) > 3) == (unit < 1 << 40)
    assert len(set(result.offsets)) == 16
    assert result.offsets == sorted(result.offsets)
    assert read_inputs(path, unit=unit, field="text").values == [row["text"] for row in ROWS]


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_file_is_named(tmp_path, name):
    data = write_table(tmp_path / name).read_bytes()
    path = tmp_path / ("b." + name.split(".", 1)[1])
    for cut in (9, 300, len(data) // 2, len(data) - 20):
        path.write_bytes(data[:cut])
        with pytest.raises(InputError, match=rf"{path.name} is not a valid \w+ file \(.+\); fetch or write"):
            read_inputs(path)
    path.write_bytes(b"this is something else altogether, without any magic")
    with pytest.raises(InputError, match=r"is not supported \(text named \.\w+\): rename it to end in \.txt if"):
        read_inputs(path)


def test_values_without_a_json_type_become_text(tmp_path):
    timestamp = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    table = pa.table(
        {
            "decimal": [decimal.Decimal("1.50"), None],
            "moment": pa.array([timestamp, None], pa.timestamp("ns", "UTC")),
            "inside": [[{"day": dt.date(2024, 1, 2), "x": 1}], []],
            "span": pa.array([5, None], pa.duration("s")),
            "bytes": [b"\xff", None],
            "pairs": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
            "nan": [float("inf"), None],
        }
    )
    expected = {
        "decimal": "1.50",
        "moment": "2024-01-02 03:04:05.000000000Z",
        "inside": [{"day": "2024-01-02", "x": 1}],
        "span": 5,
        "bytes": b"\xff",
        "pairs": [("a", 1)],
        "nan": float("inf"),
    }
    empty_row = dict.fromkeys(expected) | {"inside": []}
    for name in FORMS:
        assert read_inputs(write_table(tmp_path / name, table)).values == [expected, empty_row]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()])
def test_a_row_above_the_limit_is_a_bad_record(tmp_path, kind):
    turns = [[{"content": "x" * (500 if n == 7 else 90)}] for n in range(20)]
    table = pa.table({"messages": pa.array(turns, pa.list_(pa.struct([("content", kind)])))})
    result = read_inputs(write_table(tmp_path / "a.arrow", table), limits=ReadLimits(record_bytes=400))
    assert result.records == [n for n in range(20) if n != 7]
    assert "record larger than 400 bytes" in result.bad[0]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_bad_texts_are_reported_with_their_row(tmp_path, kind):
    values = pa.array([b"good", b"caf\xe9", None, b"x" * 500, b"more"], pa.large_binary())
    column = pa.array(["good", "caf?", None, "x" * 500, "more"], kind)
    table = pa.table({"text": column, "n": range(5)})
    path = write_table(tmp_path / "a.parquet", table)
    # Writers refuse invalid UTF-8, so the bytes of one value are replaced in the file.
    path.write_bytes(path.read_bytes().replace(b"caf?", b"caf\xe9"))
    result = read_inputs(path, field="text", limits=ReadLimits(record_bytes=400))
    assert (result.values, result.records) == (["good", "more"], [0, 4])
    assert [sentence.split(":")[0] for sentence in result.bad] == [
        "a.parquet, row 2",
        "a.parquet, row 3",
        "a.parquet, row 4",
    ]
    assert "byte 0xe9 of the text is not valid UTF-8" in result.bad[0]
    assert len(values) == 5
    rows = read_inputs(path)
    assert [row["n"] for row in rows.values] == [0, 2, 3, 4]


@pytest.mark.parametrize("name", FORMS)
def test_columns_are_checked_before_rows_are_read(tmp_path, name):
    path = write_table(tmp_path / name)
    with pytest.raises(RecordError, match="no field 'txt': .* did you mean --text-field 'text'"):
        read_inputs(path, field="txt")
    with pytest.raises(RecordError, match="column 'n' holds int64, not text; --text-field 'text' does"):
        read_inputs(path, field="n")
    twice = pa.table([[1], [2]], names=["a", "a"])
    with pytest.raises(InputError, match="several columns named 'a'"):
        read_inputs(write_table(tmp_path / name, twice))


def test_empty_tables_have_no_rows(tmp_path):
    for name in FORMS:
        assert read_inputs(write_table(tmp_path / name, TABLE[:0])).values == []


def test_an_encrypted_file_is_named(tmp_path):
    path = write_table(tmp_path / "a.parquet")
    data = path.read_bytes()
    path.write_bytes(b"PARE" + data[4:-4] + b"PARE")
    with pytest.raises(InputError, match="a.parquet is encrypted, which is not supported: write it again"):
        read_inputs(path)


def test_a_parquet_file_like_a_zip_bomb_is_refused(tmp_path, monkeypatch):
    table = pa.table({"text": ["x" * 5_000_000] * 3})
    path = write_table(tmp_path / "a.parquet", table, use_dictionary=False, compression="zstd")
    assert len(read_inputs(path, field="text").values) == 3
    monkeypatch.setattr("batchloom.sources.formats.table_format.BOMB_BYTES", 1 << 20)
    with pytest.raises(InputError, match="more than 1,000 times its size, like a zip bomb"):
        read_inputs(path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "arrow", "arrows"])
def test_large_row_groups_are_read_in_bounded_memory(tmp_path, form):
    """Read a row group or record batch of 120 MiB in less than 220 MiB, of which the libraries take 140."""
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
    column = pa.array([f"{i:07d}" * 300 for i in range(10_000)])
    columns, rows = [column] * 6, range(60_000)
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        with pq.ParquetWriter(path, schema, use_dictionary=False, compression="none") as writer:
            table = pa.table([pa.concat_arrays(columns), rows], schema=schema)
            writer.write_table(table, row_group_size=len(rows))
    elif form == "arrows":
        table = pa.table([pa.concat_arrays(columns), rows], schema=schema)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            writer.write_batch(table.combine_chunks().to_batches()[0])
        del table
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for part in columns:
                writer.write_table(pa.table([part, range(10_000)], schema=schema))
    code = (
        "import sys\n"
        "from sources.source_reading import *\n"
        "(s,) = list_sources([sys.argv[1]]).sources\n"
        "n = 0\n"
        "for field in (None, 'text'):\n"
        "    for part in split_source(s, ReadRules(field), 1 << 40):\n"
        "        with PartReader(part, ReadRules(field)) as reader:\n"
        "            n += sum(len(found.values) for found in reader)\n"
        "            reader.finish()\n"
        "print(n, open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    count, peak = map(int, process.stdout.split())
    assert count == 2 * len(rows)
    assert peak < 220 * 1024


def test_columns_of_json_are_decoded_at_any_depth(tmp_path):
    """As Hugging Face datasets write values of several types."""
    parts = [{"type": "text", "text": "Hi", "n": None}]
    rows = [
        {"id": 1, "messages": [{"role": "user", "content": json.dumps("Hi")}], "tools": [json.dumps({"a": None})]},
        {"id": 2, "messages": [{"role": "user", "content": json.dumps(parts)}], "tools": None},
    ]
    text = pa.string()

    def make_schema(json_type):
        message = pa.struct([("role", text), ("content", json_type)])
        return pa.schema([("id", pa.int64()), ("messages", pa.list_(message)), ("tools", pa.list_(json_type))])

    table = pa.Table.from_pylist(rows, make_schema(text)).cast(make_schema(pa.json_()))
    for name in FORMS[:3]:
        first, second = read_inputs(write_table(tmp_path / name, table)).values
        assert first["messages"] == [{"role": "user", "content": "Hi"}]
        assert first["tools"] == [{"a": None}]
        assert second["messages"] == [{"role": "user", "content": parts}]
        # Arrow adds nulls to objects, but not to their JSON.
        assert isinstance(second["messages"][0]["content"][0], JsonObject)
