"""JSON Lines: records, their offsets, and errors of bad records."""

import json
import re

import pytest

from batchloom import InputError
from batchloom.core.errors import RecordError
from batchloom.sources import PartReader, ReadLimits, ReadRules, SourcePart, list_sources


def read_records(path, rules=None):
    (source,) = list_sources([str(path)]).sources
    texts, bad, records = [], [], []
    with PartReader(SourcePart(source, 0, source.size), rules or ReadRules()) as reader:
        for block in reader:
            texts += block.values
            records += block.records
            bad += block.bad
    return texts, records, bad


def write_lines(tmp_path, *lines):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_every_record_has_its_number_blank_lines_counted(tmp_path):
    path = write_lines(
        tmp_path,
        '{"text":"a"}',
        "",
        "   ",
        '  {"x":[1,{"text":2}],"text":"b\\u00e9\\ud83d\\ude00"} ',
        '{"text":"c"}\r',
        "",
    )
    assert read_records(path) == (["a", "bé😀", "c"], [0, 3, 4], [])


def test_any_column_can_be_the_text(tmp_path):
    path = write_lines(tmp_path, '{"te.xt with é":"a","text":1}')
    assert read_records(path, ReadRules("te.xt with é"))[0] == ["a"]


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ('{"text":"a"', 12, "not valid JSON: unexpected end of data"),
        ('{"text":"a"} {"text":"b"}', 14, "not valid JSON: unexpected content after document"),
        ("not json", 1, "not valid JSON: "),
        ('{"text": NaN}', 10, "not valid JSON: "),
        ('{"text":"\\ud800"}', 10, "not valid JSON: "),
        (b'{"text":"caf\xe9"}', 13, "byte 0xe9 is not valid UTF-8"),
        ('{"text":5}', None, "field 'text' holds a number, not text"),
        ('{"text":null}', None, "field 'text' holds null, not text"),
        ('{"text":["a"]}', None, "field 'text' holds an array, not text"),
        ('["a"]', 1, "an array, not a JSON object with a field 'text'"),
        ("17", 1, "a number, not a JSON object"),
        ("{}", None, "no field 'text': the object is empty"),
        (
            '{"Text":"a","id":1}',
            None,
            "no field 'text': the record has 'Text', 'id'; did you mean --text-field 'Text'?",
        ),
        (
            '{"test":1}',
            None,
            "the record has 'test'; name the field that holds the text with --text-field",
        ),
    ],
)
def test_a_bad_record_has_a_position_and_a_reason(tmp_path, line, column, reason):
    texts, records, bad = read_records(write_lines(tmp_path, '{"text":"a"}', line, '{"text":"b"}'))
    assert (texts, records) == (["a", "b"], [0, 2])
    (bad_record,) = bad
    assert (bad_record.record, bad_record.offset, bad_record.column) == (1, 13, column)
    assert reason in bad_record.reason
    assert "\n" not in bad_record.reason


def test_values_across_lines_are_never_taken_for_records(tmp_path):
    # There are as many values as lines, but not one on each line.
    path = write_lines(tmp_path, '{"text":"a"} {"text":"b"}', '{"text":', '"c"}')
    texts, _, bad = read_records(path)
    assert texts == []
    assert [bad_record.record for bad_record in bad] == [0, 1, 2]


def test_very_deep_nesting_is_a_bad_record(tmp_path):
    texts, _, bad = read_records(
        write_lines(tmp_path, '{"x":' + "[" * 100_000 + "]" * 100_000 + ',"text":"a"}', '{"text":"b"}')
    )
    assert texts == ["b"]
    assert "not valid JSON" in bad[0].reason


def test_a_source_without_the_field_is_refused_at_once(tmp_path):
    lines = [json.dumps({"txt": "a", "id": i}) for i in range(100)]
    with pytest.raises(
        RecordError, match="a.jsonl, line 1: no field 'text': .* did you mean --text-field 'txt'"
    ) as caught:
        read_records(write_lines(tmp_path, *lines, *['{"text":"b"}'] * 1000))
    assert (caught.value.line, caught.value.column) == (1, None)
    with pytest.raises(RecordError):
        read_records(write_lines(tmp_path, *lines[:3]))
    assert len(read_records(write_lines(tmp_path, *lines[:99], '{"text":"b"}'))[2]) == 99
    assert len(read_records(write_lines(tmp_path, '{"text":"b"}', *lines, *lines))[2]) == 200


def test_a_record_above_the_limit_is_bad_for_any_buffer_size(tmp_path):
    lines = ['{"text":"a"}', json.dumps({"text": "x" * 500}), '{"text":"b"}']
    for chunk in (10, 100, 10_000):
        rules = ReadRules(limits=ReadLimits(record_bytes=400, chunk_bytes=chunk))
        texts, records, bad = read_records(write_lines(tmp_path, *lines), rules)
        assert (texts, records) == (["a", "b"], [0, 2])
        assert bad[0].reason.startswith("record larger than 400 bytes")


@pytest.mark.parametrize("field", ['a"b', "a\\b", "a\nb", "\x01"])
def test_a_text_field_whose_name_json_escapes_is_refused(tmp_path, field):
    path = write_lines(tmp_path, json.dumps({field: "t"}))
    with pytest.raises(InputError, match="its name holds a quote, a backslash or a control character; rename it"):
        read_records(path, ReadRules(field))


@pytest.mark.parametrize(
    ("mark", "encoding", "reason"),
    [
        (b"\xff\xfe", "utf-16-le", "UTF-16, .* byte order mark FF FE.*: --encoding utf-16$"),
        (b"\xfe\xff", "utf-16-be", "UTF-16, .* byte order mark FE FF.*: --encoding utf-16$"),
        (b"\xff\xfe\0\0", "utf-32-le", "UTF-32, .* mark FF FE 00 00.*: --encoding utf-32$"),
        (b"", "utf-16-le", "seems to be UTF-16, .*: --encoding utf-16-le$"),
        (b"", "utf-16-be", "seems to be UTF-16, .*: --encoding utf-16-be$"),
    ],
)
def test_another_encoding_is_named_with_its_conversion(tmp_path, mark, encoding, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + '{"text":"a"}\n'.encode(encoding) * 2)
    assert re.search(reason, read_records(path)[2][0].reason)


def test_columns_of_enormous_names_are_cut_in_the_reason(tmp_path):
    path = write_lines(tmp_path, '{"text":"a"}', json.dumps({"k" * 10**6: 1, "txt": 2}))
    (bad,) = read_records(path)[2]
    assert len(bad.reason) < 400
    assert bad.reason.endswith("did you mean --text-field 'txt'?")


def test_without_a_text_field_a_record_is_its_whole_row(tmp_path):
    rows = [
        {"a": 1, "b": [None, {"c": 2.5}]},
        {"a": "now text", "extra": {}},
        {"a": ["and a list"]},
    ]
    path = write_lines(tmp_path, *map(json.dumps, rows), "5", '{"a":1,"a":2}')
    values, records, bad = read_records(path, ReadRules(text_field=None))
    # The last value of a duplicate key counts, as in Python's json.
    assert values == [*rows, {"a": 2}]
    assert records == [0, 1, 2, 4]
    assert (bad[0].column, bad[0].reason) == (1, "a number, not a JSON object")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ('{"x": NaN}', "write null instead"),
        ('{"x": -Infinity}', "write null instead"),
        ("{'x': 1}", "this is Python, not JSON"),
        ('{"x": None}', "this is Python, not JSON"),
    ],
)
def test_values_of_other_languages_are_reported_with_a_remedy(tmp_path, line, remedy):
    values, _, bad = read_records(write_lines(tmp_path, line, "{}"), ReadRules(text_field=None))
    assert values == [{}]
    assert remedy in bad[0].reason


@pytest.mark.parametrize("count", [1, 16, 17, 200])
def test_offsets_are_the_beginnings_of_lines(tmp_path, count):
    lines = [json.dumps({"text": "x" * (n % 7)}) for n in range(count)]
    path = write_lines(tmp_path, *lines)
    (source,), data = list_sources([str(path)]).sources, path.read_bytes()
    with PartReader(SourcePart(source, 0, source.size), ReadRules()) as reader:
        records = [pair for block in reader for pair in zip(block.offsets, block.values, strict=True)]
    assert [value for _, value in records] == ["x" * (n % 7) for n in range(count)]
    assert [data[at:].split(b"\n")[0].decode() for at, _ in records] == lines
