"""Splitting texts into documents, and files into parts."""

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


def read_parts(path, rules, unit_bytes=None):
    """Return (text, offset) of every document of a file, bad records and their count."""
    (source,) = list_sources([str(path)]).sources
    texts, bad, records_read, position = [], [], 0, 0
    bounds = RecordBounds(rules)
    for part in split_source(source, rules, unit_bytes or 1 << 40):
        with PartReader(part, rules, bounds) as reader:
            for block in reader:
                assert len(block.values) == len(block.records) == len(block.offsets)
                texts += zip(block.values, block.offsets, strict=True)
                bad += block.bad
                records_read += block.records_read
            reader.finish()
            assert reader.start == position or source.compression
            position = reader.stop
    assert position == source.size or source.compression
    return texts, bad, records_read


def read_texts(path, rules, unit_bytes=None):
    return [text for text, _ in read_parts(path, rules, unit_bytes)[0]]


def test_a_file_is_a_document(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import os\n\n\nprint(os)\n" * 50)
    assert read_texts(path, ReadRules()) == [path.read_text()]


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
    assert read_texts(path, ReadRules(split_on=split_on, limits=SMALL)) == documents


def test_offsets_point_at_the_documents(tmp_path):
    path = tmp_path / "a.txt"
    data = "äöü\nzwei\n\n€uro\n".encode()
    path.write_bytes(data)
    documents, _, records_read = read_parts(path, ReadRules(split_on="line", limits=SMALL))
    assert records_read == 4
    for text, offset in documents:
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
    # Invalid UTF-8 is cut anywhere, and reported when it is decoded.
    assert find_document_end(b"\x80" * 60, 0, limits) == 10


def test_a_long_text_keeps_every_byte_in_documents_of_the_target_size(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"Paragraph {i} " + "word " * (i % 37) + "\n" * (1 + i % 3) for i in range(40_000))
    path.write_text(text)
    documents = read_texts(path, ReadRules())
    assert "".join(documents) == text
    assert all(64 << 10 <= len(document) <= 128 << 10 for document in documents[:-1])
    assert all(document.endswith("\n\n") for document in documents[:-1])


def test_a_text_of_exactly_the_limit_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x\n\n" * (1 << 20))
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    assert len(read_texts(path, ReadRules())) == 1
    with path.open("ab") as file:
        file.write(b"y")
    assert len(read_texts(path, ReadRules())) > 10


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert read_texts(path, ReadRules()) == ["hello"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text":"hello"}\n{"text":"you"}\n')
    assert read_texts(path, ReadRules()) == ["hello", "you"]


def test_invalid_utf8_is_a_bad_record_with_its_offset(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\ncaf\xe9\nfine\n")
    texts, bad, records_read = read_parts(path, ReadRules(split_on="line"))
    assert [text for text, _ in texts] == ["good", "fine"]
    assert records_read == 3
    assert (bad[0].record, bad[0].offset) == (1, 5)
    assert "byte 0xe9 at offset 8 is not valid UTF-8" in bad[0].reason
    path.write_bytes("hello".encode("utf-16"))
    assert "UTF-16" in read_parts(path, ReadRules())[1][0].reason


@pytest.mark.parametrize("split_on", ["auto", "line", "paragraph", "==="])
def test_a_record_above_the_limit_is_bad_and_reading_continues(tmp_path, split_on):
    separator = {"line": "\n", "paragraph": "\n\n", "===": "==="}.get(split_on)
    path = tmp_path / "a.txt"
    size = SMALL.record_bytes + 1
    if separator is None:
        path = tmp_path / "a.py"
        path.write_text("x" * size)
        texts, bad, records_read = read_parts(path, ReadRules(split_on=split_on, limits=SMALL))
        assert (texts, len(bad), records_read) == ([], 1, 1)
        return
    path.write_text(separator.join(["a", "x" * size, "b", "y" * (size - 1), "c"]))
    texts, bad, records_read = read_parts(path, ReadRules(split_on=split_on, limits=SMALL))
    assert [text[:1] for text, _ in texts] == ["a", "b", "y", "c"]
    assert records_read == 5
    assert bad[0].record == 1
    assert "larger than 400 bytes" in bad[0].reason


def test_an_enormous_record_is_skipped_in_bounded_memory(tmp_path):
    limits = ReadLimits(record_bytes=1 << 20)
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "z" * (12 << 20)})
    path.write_text(f'{{"text":"a"}}\n{line}\n{{"text":"b"}}\n')
    texts, bad, records_read = read_parts(path, ReadRules(limits=limits))
    assert [text for text, _ in texts] == ["a", "b"]
    assert texts[1][1] == 13 + len(line) + 1
    assert (records_read, bad[0].record, bad[0].offset) == (3, 1, 13)
    assert bad[0].snippet.startswith('{"text": "zzz')


TOKENS = st.lists(
    st.sampled_from(["a", "bb", " ", "\n", "\n\n", "\r\n", "\t", "é", "€", "==", "=", "word word"]),
    max_size=120,
)


@settings(max_examples=examples(150))
@given(
    tokens=TOKENS,
    split_on=st.sampled_from(["line", "paragraph", "==", "=\n="]),
    unit=st.integers(1, 60),
)
def test_parts_of_any_size_give_the_documents_of_the_file(tmp_path_factory, tokens, split_on, unit):
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    path.write_bytes(("x" + "".join(tokens)).encode())
    # Limits exceed the file size, as they exceed any reasonable record in practice.
    rules = ReadRules(split_on=split_on, limits=ReadLimits(chunk_bytes=16))
    assert read_parts(path, rules, unit)[0] == read_parts(path, rules)[0]


@settings(max_examples=examples(100))
@given(tokens=TOKENS, unit=st.integers(20, 300), chunk=st.integers(1, 200))
def test_cut_texts_join_to_the_text_whatever_the_units_and_chunks(tmp_path_factory, tokens, unit, chunk):
    path = tmp_path_factory.mktemp("cuts") / "a.txt"
    path.write_bytes(("x" + "".join(tokens) * 4).encode())
    limits = ReadLimits(whole_text_bytes=50, document_bytes=20, reach_bytes=30, chunk_bytes=chunk)
    texts, bad, _ = read_parts(path, ReadRules(limits=limits), unit)
    assert not bad
    assert "".join(text for text, _ in texts).encode() == path.read_bytes()
    other_limits = ReadLimits(whole_text_bytes=50, document_bytes=20, reach_bytes=30, chunk_bytes=7)
    assert read_parts(path, ReadRules(limits=other_limits), unit)[0] == texts


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
    has_final_newline=st.booleans(),
)
def test_jsonl_parts_of_any_size_give_the_records_of_the_file(tmp_path_factory, lines, unit, has_final_newline):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    lines = ['{"text":"first"}', *lines]
    path.write_text("\n".join(lines) + ("\n" if has_final_newline else ""))
    rules = ReadRules(limits=ReadLimits(chunk_bytes=16))
    texts, bad, records_read = read_parts(path, rules, unit)
    expected, expected_bad, expected_records_read = read_parts(path, rules)
    assert texts == expected
    assert [(record.offset, record.reason, record.column) for record in bad] == [
        (record.offset, record.reason, record.column) for record in expected_bad
    ]
    assert records_read == expected_records_read
    assert texts == [(json.loads(line)["text"], offset) for line, offset in _iter_valid_lines(lines)]


def _iter_valid_lines(lines):
    offset = 0
    for line in lines:
        if line.startswith('{"text"'):
            yield line, offset
        offset += len(line.encode()) + 1


def test_bounds_do_not_depend_on_earlier_lookups(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\n" * 30 + "x" * 500 + "\nb\n")
    (source,) = list_sources([str(path)]).sources
    rules = ReadRules(split_on="line", limits=ReadLimits(reach_bytes=5))
    reused = RecordBounds(rules)
    offsets = range(0, source.size + 1, 3)
    expected = [RecordBounds(rules).find_bound(source, offset) for offset in offsets]
    assert [reused.find_bound(source, offset) for offset in offsets] == expected
    assert [reused.find_bound(source, offset) for offset in reversed(offsets)] == expected[::-1]


def test_a_part_of_one_record_without_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 1000}))
    assert len(read_texts(path, ReadRules(), unit_bytes=100)) == 1
    (source,) = list_sources([str(path)]).sources
    with PartReader(SourcePart(source, 500, 700), ReadRules(), RecordBounds(ReadRules())) as reader:
        assert (reader.start, reader.stop) == (source.size, source.size)
