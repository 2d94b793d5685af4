"""``convert`` writes any input to one file of equal rows."""

import gc
import json
import math
import os
import subprocess
import sys
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError, SettingsError
from batchloom.cli import run_command_line
from batchloom.core.errors import (
    InputMissingError,
    OutputError,
    RecordError,
    SchemaError,
    StoreConflictError,
    TooManyBadRecordsError,
)
from batchloom.preparation import convert
from batchloom.sources import PartReader, ReadRules, SourcePart, list_sources
from preparation.test_formats import RECORDS, WRITERS
from sources.test_tables import write_table
from tiers import examples

OUTPUTS = ["a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet"]


def read_rows(path):
    """Return the rows that the readers find in a file, with all columns."""
    values = []
    for source in list_sources([str(path)]).sources:
        with PartReader(SourcePart(source, 0, source.size), ReadRules(text_field=None)) as reader:
            for records in reader:
                assert records.bad == []
                values += records.values
            reader.finish()
    return values


def write_rows(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("name", "out"),
    [
        *((name, "a.jsonl") for name in WRITERS),
        *(("a.arrow", out) for out in OUTPUTS[1:]),
        *(
            pytest.param(name, out, marks=pytest.mark.slow)
            for name in WRITERS
            for out in OUTPUTS[1:]
            if name != "a.arrow"
        ),
    ],
)
def test_every_format_becomes_every_other_and_comes_back(tmp_path, name, out):
    (tmp_path / "in").mkdir()
    WRITERS[name](tmp_path / "in" / name)
    result = convert(tmp_path / "in" / name, out=tmp_path / out)
    expected = [
        # CSV cells are read as text.
        {"n": str(row["n"]), "text": row["text"]} if name == "a.csv" else row
        for row in RECORDS
    ]
    assert read_rows(tmp_path / out) == expected
    assert (result.rows, result.quarantined, result.notes) == (len(RECORDS), 0, ())
    assert result.bytes == (tmp_path / out).stat().st_size
    converted_back = convert(tmp_path / out, out=tmp_path / "back.jsonl")
    assert read_rows(converted_back.path) == expected
    assert sorted(os.listdir(tmp_path)) == sorted([out, "back.jsonl", "in"])


def test_texts_become_rows_of_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    convert(tmp_path / "a.txt", out=tmp_path / "whole.jsonl")
    convert(tmp_path / "a.txt", out=tmp_path / "lines.parquet", split_on="line")
    assert read_rows(tmp_path / "whole.jsonl") == [{"text": "one\ntwo\n"}]
    assert read_rows(tmp_path / "lines.parquet") == [{"text": "one"}, {"text": "two"}]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), VALUES, max_size=4)


def encode_exactly(value):
    """Return JSON text, which distinguishes 1, 1.0 and true."""
    return json.dumps(value)


@pytest.mark.parametrize("out", ["b.jsonl", pytest.param("b.jsonl.zst", marks=pytest.mark.slow), "b.json"])
@settings(max_examples=examples(60))
@given(records=st.lists(ROWS, min_size=1, max_size=5))
def test_rows_of_any_types_pass_through_json_untouched(tmp_path_factory, out, records):
    folder = tmp_path_factory.mktemp("rows")
    convert(write_rows(folder / "a.jsonl", *records), out=folder / out)
    assert [encode_exactly(row) for row in read_rows(folder / out)] == [encode_exactly(row) for row in records]


@settings(max_examples=examples(100))
@given(records=st.lists(st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=2), min_size=1, max_size=5))
def test_parquet_holds_equal_rows_or_is_refused_by_column(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "a.jsonl", *records)
    try:
        result = convert(folder / "a.jsonl", out=folder / "b.parquet")
    except InputError:
        with pytest.raises(InputError, match=r"use \.jsonl"):
            convert(folder / "a.jsonl", out=folder / "b.parquet")
        assert not (folder / "b.parquet").exists()
        return
    if not any("Null is written" in note for note in result.notes):
        columns = {name for row in records for name in row}
        assert [{n: row[n] for n in columns} for row in read_rows(folder / "b.parquet")] == records


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (1, "x", "'v' holds whole numbers and text"),
        ("x", ["x"], "'v' holds text and lists"),
        ({"a": [1]}, {"a": [True]}, "'v.a[]' holds whole numbers and true or false"),
        ([{"c": "x"}], [{"c": [{}]}], "'v[].c' holds text and lists"),
        (1.5, 2**53 + 1, "'v' holds fractions and whole numbers too large"),
    ],
)
def test_a_column_of_mixed_types_is_refused_by_name_and_line(tmp_path, first, second, message):
    path = write_rows(tmp_path / "a.jsonl", {"v": first}, {"v": None}, {"v": second})
    with pytest.raises(InputError) as caught:
        convert(path, out=tmp_path / "b.parquet")
    assert message in str(caught.value)
    assert "use .jsonl" in str(caught.value)
    if isinstance(caught.value, RecordError):
        assert caught.value.line == 3
    else:
        assert isinstance(first, float)
    assert not list(tmp_path.glob("b.parquet*"))
    convert(path, out=tmp_path / "b.jsonl")
    assert [row["v"] for row in read_rows(tmp_path / "b.jsonl")] == [first, None, second]


def test_changes_by_a_table_are_reported(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"n": 1, "call": {"x": 1}}, {"n": 0.5, "call": {"y": 2}})
    result = convert(path, out=tmp_path / "b.parquet")
    assert result.notes == (
        "Whole numbers are written as fractions of equal value in 'n'.",
        "Null is written where rows lack 'call.x', 'call.y'; .jsonl keeps rows as they are.",
    )
    assert read_rows(tmp_path / "b.parquet")[0] == {"n": 1, "call": {"x": 1, "y": None}}


@pytest.mark.parametrize("value", [math.nan, math.inf, b"\xff"])
def test_values_that_json_cannot_hold_are_quarantined(tmp_path, value):
    table = pa.Table.from_pylist([{"n": None, "v": None}, {"n": 1, "v": value}])
    write_table(tmp_path / "a.parquet", table, 10)
    result = convert(tmp_path / "a.parquet", out=tmp_path / "b.jsonl")
    (quarantined,) = map(json.loads, result.quarantine.read_text().splitlines())
    assert (result.rows, result.quarantined, quarantined["row"]) == (1, 1, 2)
    assert "column 'v' holds" in quarantined["reason"]
    convert(tmp_path / "a.parquet", out=tmp_path / "c.parquet")
    assert len(read_rows(tmp_path / "c.parquet")) == 2


@pytest.mark.parametrize("out", ["b.jsonl", "b.parquet"])
def test_bad_records_are_quarantined_within_the_budget(tmp_path, out):
    (tmp_path / "a.jsonl").write_text('{"v": 1}\n{"v": \n[]\n{"v": 2}\n')
    result = convert(tmp_path / "a.jsonl", out=tmp_path / out)
    assert read_rows(tmp_path / out) == [{"v": 1}, {"v": 2}]
    quarantined_lines = [json.loads(line)["line"] for line in result.quarantine.read_text().splitlines()]
    assert (quarantined_lines, result.quarantined) == ([2, 3], 2)
    with pytest.raises(TooManyBadRecordsError, match="The first: Invalid JSON on line 2 in"):
        convert(tmp_path / "a.jsonl", out=tmp_path / out, max_bad=1, force=True)
    assert read_rows(tmp_path / out) == [{"v": 1}, {"v": 2}]
    write_rows(tmp_path / "good.jsonl", {"v": 3})
    convert(tmp_path / "good.jsonl", out=tmp_path / out, force=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["a.jsonl", "good.jsonl", out])


def test_a_command_killed_between_quarantine_and_output_is_repeated(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"v": 1}\nx\n')
    result = convert(tmp_path / "a.jsonl", out=tmp_path / "b.jsonl")
    result.path.unlink()
    assert convert(tmp_path / "a.jsonl", out=tmp_path / "b.jsonl").quarantined == 1


def test_a_link_at_the_partial_name_is_not_followed(tmp_path):
    write_rows(tmp_path / "a.jsonl", {"v": 1})
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "b.jsonl.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match="b.jsonl.partial is a symbolic link: delete it"):
        convert(tmp_path / "a.jsonl", out=tmp_path / "b.jsonl")
    assert (tmp_path / "mine").read_text() == "mine"


def test_columns_are_renamed_chosen_and_ordered(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl",
        {"id": 1, "q": "Q", "answers": {"text": ["A"]}},
        {"id": 2, "q": "R"},
    )
    mapping = {"prompt": "q", "response": "answers.text[0]"}
    convert(path, out=tmp_path / "b.jsonl", mapping=mapping, columns=["response", "prompt"])
    assert (tmp_path / "b.jsonl").read_text() == '{"response":"A","prompt":"Q"}\n{"prompt":"R"}\n'
    convert(path, out=tmp_path / "c.jsonl", mapping=mapping)
    assert list(read_rows(tmp_path / "c.jsonl")[0]) == ["id", "prompt", "answers", "response"]
    convert(path, out=tmp_path / "d.jsonl", text_field="q")
    assert read_rows(tmp_path / "d.jsonl") == [{"text": "Q"}, {"text": "R"}]


def test_a_role_never_hides_a_column(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"q": "Q", "a": "A"}, {"q": "Q", "prompt": "P", "a": "A"})
    result = convert(path, out=tmp_path / "b.jsonl", mapping={"prompt": "q", "response": "a"})
    assert read_rows(tmp_path / "b.jsonl") == [{"prompt": "Q", "response": "A"}]
    assert "a column 'prompt' already exists" in result.quarantine.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["txt"]}, "a.jsonl: no column 'txt' .*; did you mean 'text'?"),
        ({"mapping": {"text": "txet"}}, "no column 'txet' .*; did you mean 'text'?"),
    ],
)
def test_an_unknown_column_is_reported_before_any_work(tmp_path, options, message):
    path = write_rows(tmp_path / "a.jsonl", {"text": "x", "n": 1})
    with pytest.raises(SchemaError, match=message):
        convert(path, out=tmp_path / "b.jsonl", **options)
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "b.csv"}, "'b.csv' does not end in .jsonl"),
        ({"out": "b.parquet.gz"}, "does not end in"),
        ({"columns": "a,b"}, "columns: 'a,b' is not a list"),
        ({"columns": ["a", "a"]}, "'a' is named twice"),
        ({"columns": ["a"], "text_field": "b"}, "give only one of the two"),
        ({"mapping": {"prompt": "q", "response": "q"}}, "'q' is named for several roles"),
        ({"mapping": {"text": "q"}, "columns": ["q"]}, "'q' is called 'text' after --map"),
        ({"max_bad": "many"}, "max_bad: 'many' is neither"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, options, message):
    path = write_rows(tmp_path / "a.jsonl", {"q": 1})
    with pytest.raises(SettingsError, match=message):
        convert(path, **{"out": tmp_path / "b.jsonl", **options})


def test_an_output_that_exists_is_kept_and_never_read(tmp_path):
    write_rows(tmp_path / "a.jsonl", {"n": 1})
    write_rows(tmp_path / "all.jsonl", {"n": 2})
    write_rows(tmp_path / "all.jsonl.partial", {"n": 3})
    with pytest.raises(StoreConflictError, match="all.jsonl already exists; .* --force"):
        convert(tmp_path, out=tmp_path / "all.jsonl")
    assert read_rows(tmp_path / "all.jsonl") == [{"n": 2}]
    convert(tmp_path, out=tmp_path / "all.jsonl", force=True)
    assert read_rows(tmp_path / "all.jsonl") == [{"n": 1}]
    with pytest.raises(InputMissingError, match="the output and the only input"):
        convert(tmp_path / "all.jsonl", out=tmp_path / "all.jsonl", force=True)


def test_no_record_is_no_file(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    for out in ("b.json", "b.parquet"):
        with pytest.raises(InputMissingError, match="holds no record"):
            convert(tmp_path / "a.json", out=tmp_path / out)
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_command_writes_files_and_standard_output(tmp_path, capsysbinary):
    path = write_rows(tmp_path / "a.jsonl", {"q": "Q", "a": 1}, {"q": "R", "a": "x"})
    path.write_text(path.read_text() + "broken\n")
    assert run_command_line(["convert", str(path), "--out", "-", "--columns", "a"]) == 0
    out, messages = capsysbinary.readouterr()
    assert out == b'{"a":1}\n{"a":"x"}\n'
    assert b"Left out: Invalid JSON on line 3" in messages
    assert b"standard output: 2 rows; 1 bad record left out." in messages
    target = str(tmp_path / "b.parquet")
    assert run_command_line(["convert", str(path), "--out", target]) == 1
    assert b"line 2: column 'a' holds whole numbers and text" in capsysbinary.readouterr().err
    assert run_command_line(["convert", str(path), "--out", target, "--columns", "q", "--json"]) == 0
    facts = json.loads(capsysbinary.readouterr().out)
    assert (facts["rows"], facts["quarantined"], facts["form"]) == (2, 1, "parquet")


def write_long_rows(path, count):
    """Write a CSV file of rows of 10 kB each."""
    with path.open("w", newline="") as file:
        file.write("id,text\n")
        file.writelines(f"{number},{number}{' some text' * 1_000}\n" for number in range(count))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_three_times_the_rows_take_no_more_memory(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("batchloom.preparation.conversion.row_files._GROUP_BYTES", 1 << 18)
    peaks = []
    for count in (300, 900):
        path = write_long_rows(tmp_path / f"{count}.csv", count)
        tracemalloc.start()
        try:
            convert(path, out=tmp_path / f"{count}{suffix}")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2 << 20
    if suffix == ".parquet":
        # Memory of columns, which Python does not count, is released with each group.
        assert pq.ParquetFile(tmp_path / "900.parquet").num_row_groups > 6


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_memory_stays_bounded(tmp_path, suffix):
    """Converting 250 MB of lines to a JSON array or a table takes under 400 MiB."""
    write_long_rows(tmp_path / "a.csv", 25_000)
    code = (
        "import sys; from batchloom.preparation import convert; convert(sys.argv[1], out=sys.argv[2]);"
        # Not getrusage: its value begins with the memory of the forking process.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.csv"), str(tmp_path / f"b{suffix}")]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(process.stdout) < 400 << 10


def test_real_rows_come_back(real_data, tmp_path):
    outputs = {
        "c4_demo.jsonl": "b.jsonl.zst",
        "alpaca_en_demo.json": "b.json",
        "HumanEval.jsonl.gz": "b.parquet",
    }
    for name, out in outputs.items():
        convert(real_data / name, out=tmp_path / out)
        assert read_rows(tmp_path / out) == read_rows(real_data / name)
    convert(real_data / "tinyshakespeare.txt", out=tmp_path / "t.jsonl")
    texts = [row["text"] for row in read_rows(tmp_path / "t.jsonl")]
    assert "".join(texts) == (real_data / "tinyshakespeare.txt").read_text()


def test_a_conversion_to_parquet_that_is_stopped_leaves_nothing(tmp_path, monkeypatch, capfd):
    """pyarrow's writer closed itself when it was deleted, after its file was closed."""
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    write_table = pq.ParquetWriter.write_table

    def stop(writer, table, **options):
        write_table(writer, table, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(pq.ParquetWriter, "write_table", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "in.jsonl", out=tmp_path / "out.parquet")
    gc.collect()
    assert "closed file" not in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("rows", "text_field"),
    [
        ([{"doc": {"text": "a"}, "n": 1}, {"doc": {"text": "b"}, "n": 2}], "doc.text"),
        ([{"pages": ["a"]}, {"pages": ["b"]}], "pages[]"),
        ([{"a.b": "a", "a": 1}, {"a.b": "b", "a": 2}], "a.b"),
    ],
)
def test_a_text_field_may_be_a_path(tmp_path, rows, text_field):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(tmp_path / "in.jsonl", out=tmp_path / "out.jsonl", text_field=text_field)
    assert (tmp_path / "out.jsonl").read_text() == '{"text":"a"}\n{"text":"b"}\n'
