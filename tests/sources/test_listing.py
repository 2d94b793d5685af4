"""Which files are read, in which order, under which names, and what is left out."""

import gzip
import os
import time

import pytest

from batchloom.core.errors import InputError, InputMissingError
from batchloom.sources.listing import STORE_MARK, input_labels, list_sources
from batchloom.store.format import MANIFEST_NAME


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder with everything in it; the working folder is beside it."""
    monkeypatch.chdir(tmp_path)
    files = {
        "corpus/b.txt": b"text",
        "corpus/a/z.jsonl": b'{"text":"x"}\n',
        "corpus/a/code.py": b"x = 1",
        "corpus/a-b/c.md": b"# c",
        "corpus/.git/config": b"hidden",
        "corpus/.hidden.txt": b"hidden",
        "corpus/__pycache__/x.py": b"cache",
        "corpus/empty.txt": b"",
        "corpus/image.png": b"\x89PNG\x00\x00",
        "corpus/table.csv": b"a,b",
        "corpus/table2.csv": b"a,b",
        "corpus/data.parquet": b"PAR1",
        "corpus/README": b"no ending, plain text",
        "corpus/records": b'{"text": "sniffed"}\n{"text": "two"}\n',
        "corpus/store/" + STORE_MARK: b"{}",
        "corpus/store/tokenizer_state.json": b"{}",
    }
    for name, data in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "corpus"


def names(*inputs, **options):
    return [source.name for source in list_sources([str(one) for one in inputs], **options).sources]


def test_a_folder_is_read_in_the_order_of_its_paths(corpus):
    listing = list_sources(["corpus"])
    assert [(source.name, source.kind) for source in listing.sources] == [
        ("corpus/README", "text"),
        ("corpus/a/code.py", "code"),
        ("corpus/a/z.jsonl", "jsonl"),
        ("corpus/a-b/c.md", "text"),
        ("corpus/b.txt", "text"),
        ("corpus/records", "jsonl"),
    ]
    (note,) = listing.notes
    assert note == (
        "Left out of corpus: 2 .csv, 1 .parquet, 1 __pycache__, 1 binary .png, 1 empty, 2 hidden, 1 stores."
    )


def test_the_mark_of_a_store_is_its_manifest():
    assert STORE_MARK == MANIFEST_NAME


def test_inputs_come_in_the_order_given(corpus):
    assert names("corpus/b.txt", "corpus/a") == [
        "corpus/b.txt",
        "corpus/a/code.py",
        "corpus/a/z.jsonl",
    ]


def test_names_hold_no_absolute_path(corpus):
    assert names(corpus / "b.txt") == ["b.txt"]
    assert names(corpus / "a")[0] == "a/code.py"
    assert names(corpus / "*" / "*.md") == ["a-b/c.md"]
    assert names("corpus/*/*.md") == ["corpus/a-b/c.md"]
    assert names(f"{corpus}/./a//") == ["a/code.py", "a/z.jsonl"]


def test_absolute_inputs_of_one_name_keep_what_tells_them_apart():
    assert input_labels(["/d/a/x.jsonl", "/d/b/x.jsonl", "y.jsonl", "/e/y.jsonl"]) == [
        "a/x.jsonl",
        "b/x.jsonl",
        "y.jsonl",
        "e/y.jsonl",
    ]
    assert input_labels(["/d/*/x.jsonl", "/"]) == ["*/x.jsonl", ""]


def test_globs(corpus):
    assert names("corpus/**/*.py") == ["corpus/__pycache__/x.py", "corpus/a/code.py"]
    assert names("corpus/a*") == ["corpus/a/code.py", "corpus/a/z.jsonl", "corpus/a-b/c.md"]
    assert names("corpus/**") == [
        "corpus/README",
        "corpus/__pycache__/x.py",
        "corpus/a/code.py",
        "corpus/a/z.jsonl",
        "corpus/a-b/c.md",
        "corpus/b.txt",
        "corpus/records",
    ]
    with pytest.raises(InputMissingError, match=r"Nothing matches nothing\*; wanted are"):
        names("nothing*")
    with pytest.raises(InputMissingError, match="matches no usable file, only 2 .csv"):
        names("corpus/*.csv")


def test_a_name_with_brackets_is_a_file_where_there_is_one(corpus):
    (corpus / "a[1].txt").write_text("x")
    assert names("corpus/a[1].txt") == ["corpus/a[1].txt"]


def test_a_file_named_twice_is_read_once_and_told(corpus):
    os.symlink(corpus / "b.txt", corpus / "link.txt")
    listing = list_sources(
        ["corpus/b.txt", "corpus/a", f"{corpus}/a/../b.txt", "corpus/link.txt", "corpus/a"]
    )
    assert [source.name for source in listing.sources] == [
        "corpus/b.txt",
        "corpus/a/code.py",
        "corpus/a/z.jsonl",
    ]
    assert "Named more than once, read once: corpus/link.txt." in listing.notes
    assert "Named more than once, read once: corpus/a/code.py and 1 more." in listing.notes


def test_links_in_circles_end(corpus):
    os.symlink(corpus, corpus / "a" / "up")
    os.symlink("nowhere", corpus / "a" / "broken.txt")
    os.symlink("itself", corpus / "a" / "itself")
    listing = list_sources(["corpus/a"])
    assert "corpus/a/up/b.txt" in [source.name for source in listing.sources]
    assert "3 broken links" in listing.notes[0] or "2 broken links" in listing.notes[0]
    assert "folders linked twice" in listing.notes[0]


def test_the_output_is_no_input(corpus):
    (corpus / "out").mkdir()
    (corpus / "out" / "left.txt").write_text("x")
    assert "corpus/out/left.txt" not in names("corpus", exclude=corpus / "out")
    with pytest.raises(InputError, match="is a store already"):
        names("corpus/store")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing.txt", "There is no file or folder corpus/missing.txt: name files"),
        ("empty.txt", "corpus/empty.txt is empty: it has 0 bytes."),
        ("table.csv", r"corpus/table.csv is not read yet \(.csv\): convert it to JSON Lines"),
        ("data.parquet", r"not read yet \(.parquet\)"),
        ("image.png", r"not read yet \(binary .png\): only text, code and JSON Lines are read"),
        ("pipe", "neither a file nor a folder"),
    ],
)
def test_a_file_named_by_itself_that_is_of_no_use_is_an_error(corpus, name, sentence):
    os.mkfifo(corpus / "pipe")
    with pytest.raises(InputError, match=sentence):
        names(f"corpus/{name}")


def test_a_folder_without_usable_files_is_an_error(corpus):
    (corpus / "nothing").mkdir()
    with pytest.raises(InputMissingError, match="corpus/nothing holds no files; wanted are"):
        names("corpus/nothing")
    (corpus / "nothing" / "x.csv").write_text("a")
    with pytest.raises(InputMissingError, match="holds no usable file, only 1 .csv"):
        names("corpus/nothing")


def test_a_folder_that_cannot_be_read(corpus, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="Folder corpus cannot be read: permission denied"):
        names("corpus")


def test_what_a_packed_file_is_is_told_by_what_it_holds(corpus):
    (corpus / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text":"a"}'))
    (corpus / "dump.gz").write_bytes(gzip.compress(b"plain text"))
    (corpus / "long.gz").write_bytes(gzip.compress(b'{"text":"' + b"x" * 20_000 + b'"}\n'))
    (corpus / "a.tar.gz").write_bytes(gzip.compress(b"tar"))
    found = list_sources(["corpus/x.jsonl.gz", "corpus/dump.gz", "corpus/long.gz"]).sources
    assert [(source.kind, source.compression) for source in found] == [
        ("jsonl", "gzip"),
        ("text", "gzip"),
        ("jsonl", "gzip"),
    ]
    with pytest.raises(InputError, match="unpack it first"):
        names("corpus/a.tar.gz")


def test_a_name_that_is_no_utf8_can_be_written_down(corpus):
    with open(os.fsencode(corpus) + b"/caf\xe9.txt", "w") as file:
        file.write("x")
    assert "corpus/caf\ufffd.txt" in names("corpus")


def test_very_many_absolute_inputs_are_named_in_linear_time():
    began = time.perf_counter()
    assert input_labels([f"/data/part{i % 7}/{i}.txt" for i in range(20_000)])[8] == "8.txt"
    assert time.perf_counter() - began < 5
