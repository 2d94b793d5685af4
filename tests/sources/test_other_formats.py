"""Files that are no text though their names say so, or none at all: never documents without a word."""

import gzip
import io
import json
import tarfile

import pytest

import batchloom
from batchloom.core.errors import InputError
from batchloom.preparation import Note
from preparation.stores import read_texts

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 987654\n"
WIKI = '<doc id="1" url="u" title="A">\nA\n\nArticle a.\n</doc>\n'
CDX = 'com,a)/ 20200101000000 {"url": "http://a.com/", "status": "200"}\n'
RECORDS = '{"text": "one"}\n{"text": "two"}\n'


def prepare(path, out, **options):
    return batchloom.prepare(path, out=out, tokenizer="bytes", val_fraction=0, dedup="none", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            (f"a.{ending}", POINTER, r"Git LFS pointers\): fetch the file itself: git lfs pull")
            for ending in ("txt", "jsonl", "csv", "parquet", "jsonl.gz", "bin", "py")
        ),
        ("wiki_00", WIKI, "output of wikiextractor.* wikiextractor --json"),
        ("wiki.txt", WIKI, "no text \\(output of wikiextractor\\)"),
        ("dump.txt", "<mediawiki xmlns='x'>\n<page>", "no text \\(dump of MediaWiki\\)"),
        ("Posts.xml", '<?xml version="1.0"?>\n<posts>\n  <row Id="1"/>\n</posts>', "dump of Stack Exchange"),
        ("cdx-00000", CDX, "index of a web archive"),
        ("warc.paths", "crawl-data/a/b.warc.gz\ncrawl-data/a/c.warc.gz\n", "index of a web archive"),
        (
            "page.wet.txt",
            "WARC/1.0\r\nWARC-Type: conversion\r\n",
            "no text \\(web archive\\); rename it to end in .warc",
        ),
        (
            "a.txt",
            RECORDS,
            r"no text \(JSON Lines\); rename it to end in \.jsonl, or keep its lines .* --split-on line",
        ),
        ("a.log", '{"text": "one"}', "no text .JSON Lines"),
        (
            "a.md",
            '[{"text": "one"},\n {"text": "two"}]',
            r"list of JSON objects\); rename it to end in \.json",
        ),
        ("a.txt", RECORDS * 100_000, "no text .JSON Lines"),
        ("a.arrows", "a plain text", r"text named \.arrows"),
        ("0_x.ds", "\x00\x01" * 8, "token ids: batchloom import reads them"),
        ("part-0.npy", "\x93NUMPY\x01", "token ids: batchloom import reads them"),
    ],
)
def test_another_format_is_refused_with_its_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content.encode())
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / name, tmp_path / "s")
    (tmp_path / "in").mkdir()
    (tmp_path / name).rename(tmp_path / "in" / name)
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "in", tmp_path / "s")


@pytest.mark.parametrize(
    "text",
    [
        "{x} is a set.\n",
        '{"a": 1} is JSON.\n',
        '[{"a": 1}] is a list, and this is prose.',
        "[1, 2]\n[3]\n",
        "version https://git-lfs.github.com/ is described here.",
        '<doc id="1">',
        "WARC is a format.",
        "CDX",
        "He said :) 20200101000000",
    ],
)
def test_prose_that_resembles_another_format_is_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    prepare(tmp_path / "a.txt", tmp_path / "s")
    assert read_texts(tmp_path / "s") == [text]


def test_lines_are_kept_when_asked_for_and_a_file_among_many_is_counted(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/records.txt").write_text(RECORDS)
    result = prepare(tmp_path / "in", tmp_path / "lines", split_on="line")
    assert [json.loads(text) for text in read_texts(result.path)] == [{"text": "one"}, {"text": "two"}]
    for number in range(20):
        (tmp_path / f"in/{number}.txt").write_text(f"text {number}")
    result = prepare(tmp_path / "in", tmp_path / "s")
    assert (result.counts.documents, result.counts.quarantined) == (20, 1)


def test_a_compressed_index_is_no_text(tmp_path):
    (tmp_path / "cdx-00000.gz").write_bytes(gzip.compress(CDX.encode(), mtime=0))
    with pytest.raises(InputError, match="index of a web archive"):
        prepare(tmp_path / "cdx-00000.gz", tmp_path / "s")


@pytest.mark.parametrize("text", ['{\n"text": "a"\n}\n{\n"text": "b"\n}\n', '{"text": "a"}{"text": "b"}'])
def test_objects_behind_each_other_are_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"holds several objects; write one object per line with: jq -c \. FILE"):
        prepare(tmp_path / "a.json", tmp_path / "s")


def test_a_truncated_file_is_named_with_its_last_byte(tmp_path):
    data = gzip.compress(bytes(range(256)) * 4000, mtime=0)
    (tmp_path / "a.txt.gz").write_bytes(data[:1000])
    with pytest.raises(InputError, match=r"its gzip data ends or fails at byte 1,000 of 1,000"):
        prepare(tmp_path / "a.txt.gz", tmp_path / "s")


def test_text_on_standard_input_is_announced(tmp_path, monkeypatch):
    for content, is_text in ((b"text,label\na,1\n", True), (b'{"text": "a"}\n', False)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        notes = []
        prepare("-", tmp_path / str(is_text), progress=notes.append)
        texts = [note.text for note in notes if isinstance(note, Note)]
        assert any("Standard input is read as plain text; write CSV" in text for text in texts) == is_text


@pytest.mark.parametrize("text_suffix", [".txt", ".json", ".md"])
@pytest.mark.parametrize("form", ["tar", "folder"])
def test_labels_of_samples_are_no_documents(tmp_path, text_suffix, form):
    folder = tmp_path / "samples"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}{text_suffix}").write_text('{"text": "x"}' if text_suffix == ".json" else f"text {number}")
        (folder / f"{number}.cls").write_text("1")
    (folder / "3.url").write_text("https://a.com/")
    (folder / "about.txt").write_text("About these samples")
    path = folder
    if form == "tar":
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as archive:
            archive.add(folder, "")
    result = prepare(path, tmp_path / "s")
    assert len(read_texts(result.path)) == 10
    assert any("9 .cls" in note and "1 .url" in note for note in result.notes)
    with pytest.raises(InputError, match="labels are no documents"):
        prepare(folder / "0.cls", tmp_path / "t")
