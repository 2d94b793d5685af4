"""CSV and TSV: rows are those of Python's csv, with their line numbers."""

import csv
import io
import json
import re

import pytest

from batchloom import InputError
from batchloom.core.errors import RecordError
from batchloom.sources import ReadLimits
from sources.source_reading import read_inputs


def write_file(tmp_path, text, name="a.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(params=[1 << 20, 7], ids=["large", "small"])
def chunk(request, monkeypatch):
    """Read large or small chunks."""
    monkeypatch.setattr("batchloom.sources.formats.csv_format._CHUNK_BYTES", request.param)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t")])
@pytest.mark.usefixtures("chunk")
def test_rows_are_those_of_python_csv(tmp_path, name, delimiter, end):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    rows = [["text", "n"], ["a\nb\r\n\n", "1"], ['say "x"', "é"], ["", "0"], ["NA", delimiter]]
    writer.writerows(rows)
    for start in ("", "\ufeff"):
        path = write_file(tmp_path, start + text.getvalue(), name)
        result = read_inputs(path)
        assert result.values == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        assert read_inputs(path, field="n").values == [row[1] for row in rows[1:]]
        data = path.read_bytes()
        beginnings = [data[at:].split(delimiter.encode())[0][:2] for at in result.offsets]
        assert beginnings == [b'"a', b'"s', b"", b"NA"]


@pytest.mark.usefixtures("chunk")
def test_bad_rows_are_reported_with_their_first_line(tmp_path):
    text = b'text,n\n"two\nlines",1\n\nonly one\n"three\n\n",2,3\ncaf\xe9,4\nnul\x00,5\nok,6\nx\ry,7'
    result = read_inputs(write_file(tmp_path, text))
    assert [row["n"] for row in result.values] == ["1", "6"]
    assert (result.records, result.seen) == ([0, 6], 8)
    assert result.bad[2].endswith(r"(it begins 'caf\xe9,4')")
    assert result.bad[3].endswith(r"(it begins 'nul\x00,5')")
    assert [re.split(r" \(it begins| \(cp|; name the file", sentence)[0] for sentence in result.bad] == [
        "a.csv, line 5: 1 field where the header names 2; the ones from 'n' on are missing",
        "a.csv, line 6: 3 fields where the header names 2; quote the fields that hold delimiters",
        "a.csv, line 9, column 4: byte 0xe9 is not valid UTF-8",
        "a.csv, line 10, column 4: a NUL byte, which is not text; if the file is UTF-16: --encoding utf-16-le",
        "a.csv, line 12: not readable as CSV: new-line character seen in unquoted field",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"a,a,b\n1,2,3\n", "no valid header .'a' occurs twice.: the first line must name"),
        (b",text\n0,a\n", "column 1 has no name.*pandas: to_csv.index=False"),
        (b"\n", "the first line is blank"),
        (
            "text,n\na,1\n".encode("utf-16"),
            "a.csv cannot be read: this is UTF-16, not UTF-8 .* --encoding utf-16",
        ),
        ("text,n\na,1\n".encode("utf-16-le"), "this seems to be UTF-16, .* --encoding utf-16-le"),
        ("text,n\na,1\n".encode("utf-32"), "this is UTF-32, not UTF-8 .* --encoding utf-32"),
        (b"text,n\ra,1\r", "ends its lines with CR alone; convert it with: tr"),
        (
            b'text,n\na,1\n"b,2\nc,3\n',
            "a.csv, line 3: a quoted field opens in this record and is never",
        ),
        (
            b'"text,n\na,1\n',
            "a.csv, line 1: a quoted field opens in this record and is never closed",
        ),
        (b"te\xe9xt,n\na,1\n", "a.csv, line 1, column 3: byte 0xe9 is not valid UTF-8"),
    ],
)
@pytest.mark.usefixtures("chunk")
def test_files_with_ambiguous_rows_are_refused(tmp_path, text, sentence):
    with pytest.raises(InputError, match=sentence):
        read_inputs(write_file(tmp_path, text))


def test_a_missing_column_is_named_at_once(tmp_path):
    with pytest.raises(RecordError, match="no field 'text': the record has 'txt', 'n'; did you mean"):
        read_inputs(write_file(tmp_path, "txt,n\na,1\n"), field="text")


@pytest.mark.parametrize("row", ['"' + 'x""\n' * 200 + '",2', "y" * 900 + ",4", '"' + "x" * 900])
@pytest.mark.usefixtures("chunk")
def test_a_row_above_the_limit_is_refused(tmp_path, row):
    path = write_file(tmp_path, f"text,n\na,1\n{row}\nb,3\n")
    with pytest.raises(InputError, match="a.csv, line 3: the record that begins here has more than 400 bytes; close"):
        read_inputs(path, limits=ReadLimits(record_bytes=400))


def test_a_field_far_above_the_limit_of_the_csv_module(tmp_path):
    long = "x" * 1_000_000
    assert read_inputs(write_file(tmp_path, f"text,n\n{long},1\n"), field="text").values == [long]


def test_the_rows_of_a_csv_equal_those_of_its_json_lines(tmp_path):
    rows = [{"a": f'{i}"\n', "b": "x,;\t" * (i % 3)} for i in range(3000)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["a", "b"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_inputs(tmp_path / "a.csv").values == read_inputs(tmp_path / "a.jsonl").values == rows


def test_quotes_escaped_by_backslashes_are_faults(tmp_path):
    rows = ['1,"He said \\"hello\\" to me."', '2,"C:\\dir\\"', '3,"5\\" disk"', '4,"a ""b"" \\""c\\"" d"']
    (tmp_path / "a.csv").write_text("id,text\n" + "\n".join(rows) + "\n")
    result = read_inputs(tmp_path / "a.csv", field="text")
    assert result.values == ["C:\\dir\\", 'a "b" \\"c\\" d']
    assert len(result.bad) == 2
    assert all("a quote is escaped by a backslash; write the file with doubled quotes" in bad for bad in result.bad)
