"""CSV files and JSON lists in parts give the records and errors of one pass."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError
from batchloom.sources import ReadLimits, ReadRules, RecordBounds, list_sources
from batchloom.sources.formats import csv_format
from sources.source_reading import read_inputs
from tiers import examples

SMALL = ReadLimits(record_bytes=150)


def describe_reading(path, unit=1 << 40, limits=None):
    """Return the records with their offsets, or the error that ended reading."""
    try:
        result = read_inputs(path, unit=unit, limits=limits)
    except InputError as error:
        return str(error)
    return result.values, result.records, result.offsets, result.bad, result.seen


def list_bounds(path, limits=None):
    """Return the record bound of every nominal offset."""
    (source,) = list_sources([str(path)]).sources
    rules = ReadRules(None, limits=limits or ReadLimits())
    bounds = RecordBounds(rules)
    return [bounds.find_bound(source, nominal) for nominal in range(source.size + 1)]


CELLS = st.sampled_from(
    [
        *("a", "", "é", "1", '"quoted"', '"new\nline"', '"a ""b"""', '"x,\r\ny"', '""', '"\n\n"'),
        # No writer produces these, and Python's csv reads them in its own way.
        *('5" pipe', 'a"b"', '"x"y', '"x"y"\n"', "lone\rreturn", 'a\rb,"c\nd"', "\x00", '"' * 3),
        '"' + "long\n" * 40 + '"',
    ]
)
ROWS = st.lists(st.lists(CELLS, max_size=3).map(",".join), max_size=14)


@settings(max_examples=examples(120))
@given(
    rows=ROWS,
    header=st.sampled_from(["a,b", 'a,"b\nc"', '\ufeff"a",b']),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    unit=st.integers(1, 80),
)
def test_rows_are_the_same_however_a_csv_is_cut(tmp_path_factory, rows, header, end, last, unit):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    text = end.join([header, *rows]) + (end if last else "")
    path.write_bytes(text.encode())
    for limits in (None, SMALL):
        assert describe_reading(path, unit, limits) == describe_reading(path, limits=limits)


@settings(max_examples=examples(150))
@given(rows=ROWS, data=st.data())
def test_a_cut_does_not_depend_on_earlier_lookups(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes("\n".join(["a,b", *rows]).encode())
    (source,) = list_sources([str(path)]).sources
    rules = ReadRules(None)
    offsets = data.draw(st.lists(st.integers(0, source.size), max_size=12))
    reused = RecordBounds(rules)
    try:
        expected = [RecordBounds(rules).find_bound(source, offset) for offset in offsets]
    except InputError:
        return
    assert [reused.find_bound(source, offset) for offset in offsets] == expected


def test_a_csv_is_cut_at_every_row_without_the_reader(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_bytes('a,b\r\n1,"x\r\ny ""z"""\r\n\r\n"é\n",2\r\n3,'.encode())
    monkeypatch.setattr(csv_format, "_read_row_cut", None)
    size = path.stat().st_size
    assert sorted(set(list_bounds(path))) == [0, 5, 21, 23, 32, size]


def test_a_csv_whose_quotes_mean_nothing_is_cut_at_every_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n5" pipe,1\n6" pipe,2\n"x\ny",3\n')
    assert sorted(set(list_bounds(path))) == [0, 4, 14, 24, 32]


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('a"\\[]{},:\n é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text('a"\\{é', max_size=2), VALUES, max_size=3).map(json.dumps)
ODD_ELEMENTS = st.sampled_from(
    [
        *("1", '"a, {"', "null", "{", "}", "[]", '[{"a": 1}]', '{"a" 1}', '{"a": "x}', "tru{}e"),
        *(",", "", 'x"y', '{"long": "' + "é" * 90 + '"}', '"un', "]"),
    ]
)


@settings(max_examples=examples(120))
@given(
    elements=st.lists(OBJECTS, min_size=1, max_size=6).flatmap(
        lambda good: st.lists(st.one_of(OBJECTS, OBJECTS, ODD_ELEMENTS), max_size=6).map(lambda others: good + others)
    ),
    separator=st.sampled_from([",", ",\n", " ,\n\t "]),
    template=st.sampled_from(
        [
            *(
                "[%s]",
                "\ufeff [\n%s\n]\n",
                '{"data": [%s]}',
                '{"n": {"data": []}, "rows":[%s], "z": 1}',
            ),
            *('{"data": [%s], "rows": [1]}', "[%s", "[%s]]", '{"data": [%s]'),
        ]
    ),
    unit=st.integers(1, 60),
)
def test_elements_are_the_same_however_a_list_is_cut(tmp_path_factory, elements, separator, template, unit):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes((template % separator.join(elements)).encode())
    for limits in (None, SMALL):
        assert describe_reading(path, unit, limits) == describe_reading(path, limits=limits)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_valid_list_is_cut_after_every_element(tmp_path, indent):
    path = tmp_path / "a.json"
    rows = [{"text": 'a"}]\\' * n, "more": [n]} for n in range(9)]
    path.write_text(json.dumps({"n": 1, "data": rows}, indent=indent))
    assert len(set(list_bounds(path))) == len(rows) + 2


def test_errors_have_their_line_and_column_in_any_part(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": "é"}, {"a": "ü"}, {"b": 1},\n {"c": nope}, {"d": "é"}]')
    assert describe_reading(path, 5)[3] == describe_reading(path)[3]
    assert "line 2 in a.json, column 8" in describe_reading(path, 5)[3][0]
    path.write_text('[{"a": "é"}, {"a": "ü"} {"b": 1}]')
    assert describe_reading(path, 5) == describe_reading(path)
    assert "line 1 in a.json, column 25" in describe_reading(path, 5)
