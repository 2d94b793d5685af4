"""What a document is: lines, paragraphs, markers, cuts of long texts; and parts that fit together."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from batchloom.sources import (
    PartReader,
    ReadLimits,
    ReadRules,
    RecordBounds,
    SourcePart,
    find_document_end,
    list_sources,
    split_source,
)
from tiers import examples

SMALL = ReadLimits(record_bytes=400, whole_text_bytes=100, document_bytes=40, reach_bytes=60, chunk_bytes=64)


def read(path, rules, unit_bytes=None):
    """(text, offset) of every document, and all bad records, over all parts of a file."""
    (source,) = list_sources([str(path)]).sources
    texts, bad, seen, at = [], [], 0, 0
    bounds = RecordBounds(rules)
    for part in split_source(source, rules, unit_bytes or 1 << 40):
        with PartReader(part, rules, bounds) as reader:
            for found in reader:
                assert len(found.values) == len(found.records) == len(found.offsets)
                texts += zip(found.values, found.offsets, strict=True)
                bad += found.bad
                seen += found.records_read
            reader.finish()
            assert reader.start == at or source.compression
            at = reader.stop
    assert at == source.size or source.compression
    return texts, bad, seen


def texts_of(path, rules, unit_bytes=None):
    return [text for text, _ in read(path, rules, unit_bytes)[0]]


def test_a_file_is_a_document(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import os\n\n\nprint(os)\n" * 50)
    assert texts_of(path, ReadRules()) == [path.read_text()]


@pytest.mark.parametrize(
    ("split_on", "text", "documents"),
    [
        ("line", "one\n\ntwo\r\n  three  \nfour", ["one", "two", "  three  ", "four"]),
        (
            "paragraph",
            "\n\na\nb\n\n  c\n \t\n\n\n    d\ne\n",
            ["a\nb", "  c", "    d\ne"],
        ),
        ("paragraph", "a\r\n\r\nb\r\n", ["a", "b"]),
        ("<|endoftext|>", "a\n<|endoftext|>b<|endoftext|><|endoftext|>c", ["a\n", "b", "c"]),
        ("---", "a-------b---", ["a", "-b"]),
    ],
)
def test_split_on(tmp_path, split_on, text, documents):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert texts_of(path, ReadRules(split_on=split_on, limits=SMALL)) == documents


def test_offsets_point_at_the_documents(tmp_path):
    path = tmp_path / "a.txt"
    data = "äöü\nzwei\n\n€uro\n".encode()
    path.write_bytes(data)
    found, _, seen = read(path, ReadRules(split_on="line", limits=SMALL))
    assert seen == 4
    for text, offset in found:
        assert data[offset:].startswith(text.encode())


def test_a_long_text_is_cut_at_blank_lines_else_lines_else_spaces_else_characters():
    limits = ReadLimits(document_bytes=10)
    assert find_document_end(b"0123456789ab\n\n \n  indented", 0, limits) == 16
    assert find_document_end(b"0123456789ab\ncd ef", 0, limits) == 13
    assert find_document_end(b"0123456789ab cdef ghi", 0, limits) == 12
    assert find_document_end(b"short", 0, limits) == 5
    assert find_document_end(b"0123456789abcdefghi", 0, limits) == 19
    long = "€".encode() * 20
    assert find_document_end(long, 0, limits) == 12
    # Bytes that are no UTF-8 are cut somewhere, and told when they are decoded.
    assert find_document_end(b"\x80" * 60, 0, limits) == 10


def test_a_long_text_keeps_every_byte_in_documents_of_about_the_asked_size(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"Paragraph {i} " + "word " * (i % 37) + "\n" * (1 + i % 3) for i in range(40_000))
    path.write_text(text)
    found = texts_of(path, ReadRules())
    assert "".join(found) == text
    assert all(64 << 10 <= len(one) <= 128 << 10 for one in found[:-1])
    assert all(one.endswith("\n\n") for one in found[:-1])


def test_a_text_of_exactly_the_limit_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x\n\n" * (1 << 20))
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    assert len(texts_of(path, ReadRules())) == 1
    with path.open("ab") as file:
        file.write(b"y")
    assert len(texts_of(path, ReadRules())) > 10


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert texts_of(path, ReadRules()) == ["hello"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text":"hello"}\n{"text":"you"}\n')
    assert texts_of(path, ReadRules()) == ["hello", "you"]


def test_what_is_not_utf8_is_a_bad_record_with_its_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\ncaf\xe9\nfine\n")
    texts, bad, seen = read(path, ReadRules(split_on="line"))
    assert [text for text, _ in texts] == ["good", "fine"]
    assert seen == 3
    assert (bad[0].record, bad[0].offset) == (1, 5)
    assert "byte 0xe9 at offset 8 is not valid UTF-8" in bad[0].reason
    path.write_bytes("hello".encode("utf-16"))
    assert "UTF-16" in read(path, ReadRules())[1][0].reason


@pytest.mark.parametrize("split_on", ["auto", "line", "paragraph", "==="])
def test_a_record_above_the_limit_is_kept_aside_and_the_rest_goes_on(tmp_path, split_on):
    mark = {"line": "\n", "paragraph": "\n\n", "===": "==="}.get(split_on)
    path = tmp_path / "a.txt"
    size = SMALL.record_bytes + 1
    if mark is None:
        path = tmp_path / "a.py"
        path.write_text("x" * size)
        texts, bad, seen = read(path, ReadRules(split_on=split_on, limits=SMALL))
        assert (texts, len(bad), seen) == ([], 1, 1)
        return
    path.write_text(mark.join(["a", "x" * size, "b", "y" * (size - 1), "c"]))
    texts, bad, seen = read(path, ReadRules(split_on=split_on, limits=SMALL))
    assert [text[:1] for text, _ in texts] == ["a", "b", "y", "c"]
    assert seen == 5
    assert bad[0].record == 1
    assert "larger than 400 bytes" in bad[0].reason


def test_an_enormous_record_is_read_through_in_bounded_pieces(tmp_path):
    limits = ReadLimits(record_bytes=1 << 20)
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "z" * (12 << 20)})
    path.write_text(f'{{"text":"a"}}\n{line}\n{{"text":"b"}}\n')
    texts, bad, seen = read(path, ReadRules(limits=limits))
    assert [text for text, _ in texts] == ["a", "b"]
    assert texts[1][1] == 13 + len(line) + 1
    assert (seen, bad[0].record, bad[0].offset) == (3, 1, 13)
    assert bad[0].snippet.startswith('{"text": "zzz')


PIECES = st.lists(
    st.sampled_from(["a", "bb", " ", "\n", "\n\n", "\r\n", "\t", "é", "€", "==", "=", "word word"]),
    max_size=120,
)


@settings(max_examples=examples(150))
@given(
    pieces=PIECES,
    split_on=st.sampled_from(["line", "paragraph", "==", "=\n="]),
    unit=st.integers(1, 60),
)
def test_parts_of_any_size_give_the_documents_of_the_whole(tmp_path_factory, pieces, split_on, unit):
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    path.write_bytes(("x" + "".join(pieces)).encode())
    # Reach and limits above the file, as they are above any sane record in real use.
    rules = ReadRules(split_on=split_on, limits=ReadLimits(chunk_bytes=16))
    assert read(path, rules, unit)[0] == read(path, rules)[0]


@settings(max_examples=examples(100))
@given(pieces=PIECES, unit=st.integers(20, 300), chunk=st.integers(1, 200))
def test_cut_texts_join_to_the_text_whatever_the_units_and_chunks(tmp_path_factory, pieces, unit, chunk):
    path = tmp_path_factory.mktemp("cuts") / "a.txt"
    path.write_bytes(("x" + "".join(pieces) * 4).encode())
    limits = ReadLimits(whole_text_bytes=50, document_bytes=20, reach_bytes=30, chunk_bytes=chunk)
    texts, bad, _ = read(path, ReadRules(limits=limits), unit)
    assert not bad
    assert "".join(text for text, _ in texts).encode() == path.read_bytes()
    again = ReadLimits(whole_text_bytes=50, document_bytes=20, reach_bytes=30, chunk_bytes=7)
    assert read(path, ReadRules(limits=again), unit)[0] == texts


@settings(max_examples=examples(60))
@given(
    lines=st.lists(
        st.sampled_from(
            [
                '{"text":"a"}',
                '{"text":"bé\\n"}',
                "",
                "  ",
                "{",
                '{"x":1}',
                '{"text":"' + "l" * 90 + '"}',
            ]
        ),
        min_size=1,
        max_size=40,
    ),
    unit=st.integers(1, 120),
    end=st.booleans(),
)
def test_jsonl_parts_of_any_size_give_the_records_of_the_whole(tmp_path_factory, lines, unit, end):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    lines = ['{"text":"first"}', *lines]
    path.write_text("\n".join(lines) + ("\n" if end else ""))
    rules = ReadRules(limits=ReadLimits(chunk_bytes=16))
    texts, bad, seen = read(path, rules, unit)
    whole, whole_bad, whole_seen = read(path, rules)
    assert texts == whole
    assert [(one.offset, one.reason, one.column) for one in bad] == [
        (one.offset, one.reason, one.column) for one in whole_bad
    ]
    assert seen == whole_seen
    assert texts == [(json.loads(line)["text"], offset) for line, offset in _good(lines)]


def _good(lines):
    offset = 0
    for line in lines:
        if line.startswith('{"text"'):
            yield line, offset
        offset += len(line.encode()) + 1


def test_bounds_do_not_depend_on_what_was_looked_up_before(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\n" * 30 + "x" * 500 + "\nb\n")
    (source,) = list_sources([str(path)]).sources
    rules = ReadRules(split_on="line", limits=ReadLimits(reach_bytes=5))
    used = RecordBounds(rules)
    places = range(0, source.size + 1, 3)
    fresh = [RecordBounds(rules).find_bound(source, place) for place in places]
    assert [used.find_bound(source, place) for place in places] == fresh
    assert [used.find_bound(source, place) for place in reversed(places)] == fresh[::-1]


def test_a_part_of_one_record_without_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 1000}))
    assert len(texts_of(path, ReadRules(), unit_bytes=100)) == 1
    (source,) = list_sources([str(path)]).sources
    with PartReader(SourcePart(source, 500, 700), ReadRules(), RecordBounds(ReadRules())) as reader:
        assert (reader.start, reader.stop) == (source.size, source.size)
