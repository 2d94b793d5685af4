"""JSON files that hold a list: streamed with element offsets, in bounded memory."""

import json
import time

import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError
from batchloom.core.errors import InvalidJsonError, RecordError
from batchloom.sources import ReadLimits
from batchloom.sources.formats import scan_brackets
from sources.source_reading import read_inputs
from tiers import examples

ROWS = [{"text": f'row {i} \\ "quoted" }}]{{[ é 😀', "n": i, "deep": [{"a": [1, {}]}, []]} for i in range(300)]


NAN = "; NaN and Infinity are not JSON: write null instead (Python: json.dumps(..., allow_nan=False))"


@pytest.fixture(params=[1 << 20, 50], ids=["large", "small"])
def chunk(request, monkeypatch):
    """Read small chunks, so that records cross the ends of chunks."""
    monkeypatch.setattr("batchloom.sources.formats.json_list_format._CHUNK_BYTES", request.param)


def write_file(tmp_path, text, name="a.json"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.usefixtures("chunk")
def test_every_element_is_a_record_with_its_offset(tmp_path, indent, wrapped):
    value = {"v": "1.0", "x": [{"no": "]"}], "data": ROWS, "z": [None]} if wrapped else ROWS
    text = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    result = read_inputs(write_file(tmp_path, text))
    assert result.values == ROWS
    assert result.records == list(range(300))
    assert [json.JSONDecoder().raw_decode(text[at:].decode())[0] for at in result.offsets] == ROWS
    assert read_inputs(write_file(tmp_path, text), field="text").values == [row["text"] for row in ROWS]


@pytest.mark.usefixtures("chunk")
def test_bad_elements_are_reported_with_row_line_and_column(tmp_path):
    text = (
        '\ufeff[\n {"a": 1}, 5,\n  "x,]}",[1],\n'
        ' {"é": NaN}, {"a":\n "\\ud800"}, null, {"a": 2},\n ' + "[" * 9999 + "]" * 9999 + "\n]\n"
    )
    result = read_inputs(write_file(tmp_path, text))
    assert result.values == [{"a": 1}, {"a": 2}]
    assert (result.records, result.seen) == ([0, 7], 9)
    assert [sentence.split(" (it ")[0] for sentence in result.bad] == [
        "a.json, line 2, column 12: a number, not a JSON object",
        "a.json, line 3, column 3: a string, not a JSON object",
        "a.json, line 3, column 10: an array, not a JSON object",
        "Invalid JSON on line 4 in a.json, column 8: unexpected character, expected a JSON value" + NAN,
        "Invalid JSON on line 5 in a.json, column 3: no low surrogate in string",
        "a.json, line 5, column 13: null, not a JSON object",
        "Invalid JSON on line 6 in a.json, column 1027: depth limit exceeded; nested too deeply: flatten it, or write it as JSON text in a string",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[{"a":1},]', "line 1 in a.json, column 10: expected a value"),
        ('[{"a":1} {"b":2}]', "line 1 in a.json, column 10: expected a comma or ]"),
        ('[{"a":1}', "line 1 in a.json, column 9: the list is not closed; the file is cut short"),
        ('[{"a":1},\n{"b":[2', "line 2 in a.json, column 1: the file ends inside the record"),
        ('[{"a":1}] x', "line 1 in a.json, column 11: there is text after"),
        # A quote is missing: the remaining text must not become one bad record.
        ('[{"a":"x}, {"b":"y"}, {"c":"z"}]', "line 1 in a.json, column 14: unexpected character"),
        ('[{"a":"x"y"},\n{"b":"y"},{"c":"z"y"}]', "line 1 in a.json, column 10: unexpected char"),
        ('{"data":[{}]', "line 1 in a.json, column 13: expected a comma or }"),
        ('{"v":\n', "line 2 in a.json, column 1: expected a value"),
    ],
)
@pytest.mark.usefixtures("chunk")
def test_reading_stops_at_malformed_separators(tmp_path, text, sentence):
    with pytest.raises(InvalidJsonError) as error:
        read_inputs(write_file(tmp_path, text))
    assert str(error.value).startswith(f"Invalid JSON on {sentence}")


@pytest.mark.parametrize("text", ["5", '"x"', " \n ", '{"data":[],\n"rows":[{}]}'])
def test_json_without_a_list_of_objects_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="^JSON file must contain a list of objects: a.json "):
        read_inputs(write_file(tmp_path, text))


@pytest.mark.parametrize("text", ['{"a": 1}', '{\n"a": 1}', '\ufeff{\n"a":\n1\n}\n', ' {"a": 1}\n\n'])
def test_one_object_is_a_record(tmp_path, text):
    result = read_inputs(write_file(tmp_path, text))
    assert (result.values, result.records, result.bad) == ([{"a": 1}], [0], [])


def test_an_object_that_is_no_record_is_bad(tmp_path):
    result = read_inputs(write_file(tmp_path, '{\n"text": 5}'), field="text")
    assert result.values == []
    assert result.bad[0].startswith("a.json, line 1: field 'text' holds a number")
    large = read_inputs(write_file(tmp_path, json.dumps({"text": "x" * 500})), limits=ReadLimits(record_bytes=400))
    assert "record larger than 400 bytes" in large.bad[0]


def test_utf16_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match="a.json cannot be read: this is UTF-16, not UTF-8 .* --encoding utf-16"):
        read_inputs(write_file(tmp_path, '[{"a":1}]'.encode("utf-16")))


def test_a_list_without_the_field_is_refused_at_once(tmp_path):
    with pytest.raises(RecordError, match="a.json, line 1: no field 'text': the record has 'txt'"):
        read_inputs(write_file(tmp_path, json.dumps([{"txt": "a"}] * 200)), field="text")


@pytest.mark.usefixtures("chunk")
def test_an_element_above_the_limit_is_a_bad_record(tmp_path):
    rows = [{"a": 1}, {"a": '}]\\"' * 400}, {"a": [[2]] * 900}, {"a": 3}]
    for indent in (None, 1):
        path = write_file(tmp_path, json.dumps(rows, indent=indent))
        result = read_inputs(path, limits=ReadLimits(record_bytes=400))
        assert (result.values, result.records) == ([rows[0], rows[3]], [0, 3])
        assert all("record larger than 400 bytes" in sentence for sentence in result.bad)


@pytest.mark.parametrize("count", [1 << 20, (1 << 20) + 1])
def test_a_long_run_of_backslashes_is_scanned_in_linear_time(count):
    begin = time.process_time()
    scan = scan_brackets(b'[{"a": "' + b"\\" * count + b'"}]')
    assert time.process_time() - begin < 5
    # After an odd number of backslashes the quote is escaped, and the string stays open.
    assert (scan.depth, scan.in_string) == ((0, False) if count % 2 == 0 else (2, True))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a"\\[]{},:\n é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\{', max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(60))
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=2), VALUES, max_size=3), max_size=12),
    chunk_bytes=st.integers(1, 40),
    indent=st.sampled_from([None, 0, 1]),
)
def test_a_scan_in_chunks_equals_a_complete_scan(rows, chunk_bytes, indent):
    data = json.dumps(rows, indent=indent).encode()
    complete = scan_brackets(data)
    state = scan_brackets(b"")
    offsets, depths = [], []
    for start in range(0, len(data), chunk_bytes):
        state = scan_brackets(
            data[start : start + chunk_bytes],
            depth=state.depth,
            in_string=state.in_string,
            escaped=state.escaped,
        )
        offsets += (state.offsets[1:] + start).tolist()
        depths += state.depths[1:].tolist()
    assert (offsets, depths) == (complete.offsets[1:].tolist(), complete.depths[1:].tolist())
    assert complete.depth == 0
    closed = ((complete.depths == 1) & (complete.steps < 0)).sum()
    assert closed == len(rows)
