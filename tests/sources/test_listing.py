"""Listing of inputs: files, their order and names, and skipped files."""

import gzip
import os
import re
import time
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, strategies as st

from batchloom import InputError
from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import InputMissingError
from batchloom.core.files import make_absolute
from batchloom.sources import STORE_MARKER_NAME, DeclaredInput, list_sources
from batchloom.sources.files import get_suffix
from batchloom.store import MANIFEST_NAME


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("part-{0..2}.txt", ["part-0.txt", "part-1.txt", "part-2.txt"]),
        ("part-{2..1}.txt", ["part-2.txt", "part-1.txt"]),
        ("{part,piece}-{0,1}.txt", ["part-0.txt", "part-1.txt", "piece-0.txt", "piece-1.txt"]),
        ("shard-{008..010}.txt", ["shard-008.txt", "shard-009.txt", "shard-010.txt"]),
        ("{part,piece}-*.txt", ["part-0.txt", "part-1.txt", "part-2.txt", "piece-0.txt", "piece-1.txt"]),
        ("odd-{x}.txt", ["odd-{x}.txt"]),
        ("odd-{1,2}.txt", ["odd-{1,2}.txt"]),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_braces_in_quotes_are_those_of_a_shell(tmp_path, monkeypatch, pattern, expected, is_absolute):
    monkeypatch.chdir(tmp_path)
    names = ("part-0", "part-1", "part-2", "piece-0", "piece-1", "shard-008", "shard-009", "shard-010")
    for name in (*names, "odd-{x}", "odd-{1,2}"):
        (tmp_path / f"{name}.txt").write_text(name)
    listing = list_sources([str(tmp_path / pattern) if is_absolute else pattern])
    assert [source.name for source in listing.sources] == expected


def test_each_alternative_in_braces_must_be_there(tmp_path):
    (tmp_path / "a-0.txt").write_text("x")
    for pattern in ("a-{0,1}.txt", "{a,b}-*.txt"):
        with pytest.raises(InputMissingError, match=r"a-1\.txt|Nothing matches .*b-"):
            list_sources([str(tmp_path / pattern)])


@pytest.mark.parametrize("below", ["", "datasets--org--name", "datasets--org--name/snapshots"])
def test_of_a_repository_in_the_hub_cache_the_main_revision_is_read(tmp_path, monkeypatch, below):
    cache = tmp_path / "datasets--org--name"
    for number, revision in enumerate("01"):
        for split in ("train", "test"):
            blob = cache / "blobs" / f"{split}{number}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(f'{{"text": "{split} {number}"}}\n')
            link = cache / "snapshots" / (revision * 40) / f"{split}.jsonl"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    with pytest.raises(InputError, match=r"holds 2 revisions, and no refs/main says which is read: name one of"):
        list_sources([str(tmp_path / below)])
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1" * 40)
    monkeypatch.chdir(tmp_path / below)
    for folder in (str(tmp_path / below), "."):
        listing = list_sources([folder])
        assert [Path(source.path).read_text() for source in listing.sources] == ['{"text": "train 1"}\n']
        assert any(f"revision {'1' * 40} (main) is read, and not 1 more" in note for note in listing.warnings)


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(tmp_path):
    """As ``snapshot_download`` writes it; links to elsewhere stay outside."""
    cache = tmp_path / "datasets--org--name"
    snapshot = cache / "snapshots" / ("0" * 40)
    (cache / "blobs").mkdir(parents=True)
    (snapshot / "data").mkdir(parents=True)
    (cache / "blobs" / "abc").write_text('{"text": "inside"}\n')
    (tmp_path / "secret.jsonl").write_text('{"text": "outside"}\n')
    (snapshot / "data" / "train-0.jsonl").symlink_to("../../../blobs/abc")
    (snapshot / "data" / "other.jsonl").symlink_to("../../../../secret.jsonl")
    listing = list_sources([str(snapshot)])
    assert [source.name for source in listing.sources] == [f"{'0' * 40}/data/train-0.jsonl"]
    assert any("1 symbolic link leads out" in note for note in listing.warnings)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder of usable and unusable files, next to the working folder."""
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
        "corpus/notes.docx": b"PK",
        "corpus/more.docx": b"PK",
        "corpus/data.parquet": b"PAR1",
        "corpus/README": b"no ending, plain text",
        "corpus/records": b'{"text": "sniffed"}\n{"text": "two"}\n',
        "corpus/store/" + STORE_MARKER_NAME: b"{}",
        "corpus/store/tokenizer_state.json": b"{}",
    }
    for name, data in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "corpus"


def list_names(*inputs, **options):
    return [source.name for source in list_sources([str(path) for path in inputs], **options).sources]


def test_a_folder_is_read_in_the_order_of_its_paths(corpus):
    listing = list_sources(["corpus"])
    assert [(source.name, source.kind) for source in listing.sources] == [
        ("corpus/README", "text"),
        ("corpus/a/code.py", "code"),
        ("corpus/a/z.jsonl", "jsonl"),
        ("corpus/a-b/c.md", "text"),
        ("corpus/b.txt", "text"),
        ("corpus/data.parquet", "parquet"),
        ("corpus/records", "jsonl"),
        ("corpus/table.csv", "csv"),
    ]
    (note,) = listing.notes
    assert note == (
        "Left out of corpus: 2 .docx, 1 __pycache__, 1 binary .png, 1 empty, 2 hidden, 1 store. A processor "
        "reads images and audio (--processor FOLDER)."
    )


def test_the_store_marker_is_the_manifest():
    assert STORE_MARKER_NAME == MANIFEST_NAME


def test_inputs_come_in_the_order_given(corpus):
    assert list_names("corpus/b.txt", "corpus/a") == [
        "corpus/b.txt",
        "corpus/a/code.py",
        "corpus/a/z.jsonl",
    ]


def test_names_hold_no_absolute_path(corpus):
    assert list_names(corpus / "b.txt") == ["b.txt"]
    assert list_names(corpus / "a")[0] == "a/code.py"
    assert list_names(corpus / "*" / "*.md") == ["a-b/c.md"]
    assert list_names("corpus/*/*.md") == ["corpus/a-b/c.md"]
    assert list_names(f"{corpus}/./a//") == ["a/code.py", "a/z.jsonl"]


def test_absolute_inputs_of_one_name_have_distinct_labels():
    assert make_input_labels(["/d/a/x.jsonl", "/d/b/x.jsonl", "y.jsonl", "/e/y.jsonl"]) == [
        "a/x.jsonl",
        "b/x.jsonl",
        "y.jsonl",
        "e/y.jsonl",
    ]
    assert make_input_labels(["/d/*/x.jsonl", "/"]) == ["*/x.jsonl", ""]


def test_globs(corpus):
    assert list_names("corpus/**/*.py") == ["corpus/__pycache__/x.py", "corpus/a/code.py"]
    assert list_names("corpus/a*") == ["corpus/a/code.py", "corpus/a/z.jsonl", "corpus/a-b/c.md"]
    assert list_names("corpus/**") == [
        "corpus/README",
        "corpus/__pycache__/x.py",
        "corpus/a/code.py",
        "corpus/a/z.jsonl",
        "corpus/a-b/c.md",
        "corpus/b.txt",
        "corpus/data.parquet",
        "corpus/records",
        "corpus/table.csv",
    ]
    with pytest.raises(InputMissingError, match=r"Nothing matches nothing\*; supported are"):
        list_names("nothing*")
    with pytest.raises(InputMissingError, match="matches no usable file, only 2 .docx"):
        list_names("corpus/*.docx")


def test_a_name_with_brackets_may_be_a_file(corpus):
    (corpus / "a[1].txt").write_text("x")
    assert list_names("corpus/a[1].txt") == ["corpus/a[1].txt"]


def test_a_file_named_twice_is_read_once_with_a_note(corpus):
    os.symlink(corpus / "b.txt", corpus / "link.txt")
    listing = list_sources(["corpus/b.txt", "corpus/a", f"{corpus}/a/../b.txt", "corpus/link.txt", "corpus/a"])
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
    listing = list_sources(["corpus/a"], declared_inputs=[DeclaredInput(follow_links=True)])
    assert "corpus/a/up/b.txt" in [source.name for source in listing.sources]
    assert "3 broken links" in listing.notes[0] or "2 broken links" in listing.notes[0]
    assert "1 folder linked twice" in listing.notes[0]


@pytest.mark.parametrize("pattern", ["corpus/**/*.jsonl", "corpus/**", "corpus/**/a/**/*.jsonl"])
def test_a_glob_enters_a_folder_once_however_links_lead_to_it(corpus, pattern):
    before = list_names(pattern)
    for name in ("self", "self2"):
        os.symlink(".", corpus / name)
        os.symlink("..", corpus / "a" / name)
    listing = list_sources([pattern])
    assert [source.name for source in listing.sources] == before
    assert len(listing.notes) == 1
    assert re.search(r"\d folders linked twice", listing.notes[0])


def test_a_glob_enters_a_linked_folder_by_its_first_name(corpus):
    os.symlink("a", corpus / "0")
    listing = list_sources(["corpus/**/*.jsonl"])
    assert [source.name for source in listing.sources] == ["corpus/0/z.jsonl"]


def test_the_output_is_not_an_input(corpus):
    (corpus / "out").mkdir()
    (corpus / "out" / "left.txt").write_text("x")
    assert "corpus/out/left.txt" not in list_names("corpus", exclude=corpus / "out")
    with pytest.raises(InputError, match="is already a store"):
        list_names("corpus/store")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing.txt", "There is no file or folder corpus/missing.txt: name files"),
        ("empty.txt", "corpus/empty.txt is empty: it has 0 bytes."),
        ("missing.jsonl", "JSONL file not found: corpus/missing.jsonl"),
        ("missing.parquet", "Parquet file not found: corpus/missing.parquet"),
        ("notes.docx", r"corpus/notes.docx is not supported \(.docx\): extract its text first"),
        (
            "image.png",
            r"not supported \(binary .png\): only text, code, JSON, CSV and tables are read",
        ),
        ("pipe", "neither a file nor a folder"),
    ],
)
def test_an_unusable_file_named_directly_is_an_error(corpus, name, sentence):
    os.mkfifo(corpus / "pipe")
    with pytest.raises(InputError, match=sentence):
        list_names(f"corpus/{name}")


def test_a_folder_without_usable_files_is_an_error(corpus):
    (corpus / "nothing").mkdir()
    with pytest.raises(InputMissingError, match="corpus/nothing holds no files; supported are"):
        list_names("corpus/nothing")
    (corpus / "stores" / "web").mkdir(parents=True)
    (corpus / "stores" / "web" / "dataset_metadata.json").write_text("{}")
    with pytest.raises(InputMissingError, match="corpus/stores holds only 1 store: name one of them"):
        list_names("corpus/stores")
    (corpus / "nothing" / "x.pdf").write_text("a")
    with pytest.raises(InputMissingError, match="holds no usable file, only 1 .pdf"):
        list_names("corpus/nothing")


def test_a_folder_that_cannot_be_read(corpus, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="Folder corpus cannot be read: permission denied"):
        list_names("corpus")


def test_a_compressed_file_is_recognized_by_its_content(corpus):
    (corpus / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text":"a"}'))
    (corpus / "dump.gz").write_bytes(gzip.compress(b"plain text"))
    (corpus / "long.gz").write_bytes(gzip.compress(b'{"text":"' + b"x" * 20_000 + b'"}\n'))
    (corpus / "packed").write_bytes(gzip.compress(b'{"text":"told by its first bytes"}\n'))
    sources = list_sources([f"corpus/{name}" for name in ("x.jsonl.gz", "dump.gz", "long.gz", "packed")]).sources
    assert [(source.kind, source.compression) for source in sources] == [
        ("jsonl", "gzip"),
        ("text", "gzip"),
        ("jsonl", "gzip"),
        ("jsonl", "gzip"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", '[{"a":1},\n{"a":2}]', "json"),
        ("a.json", ' {\n "data": [{"a":1}]}', "json"),
        ("a.json", '{"version":1,"data":[{"a":1}]}', "json"),
        ("a.json", '{"data":"no list"}', "json_object"),
        ("a.json", '{"a":1}\n{"a":2}\n', "jsonl"),
        ("a.json", '\ufeff{"a":1}\n', "json_object"),
        ("a.json", "[1]\n[2]\n", "jsonl"),
        ("a.json", '{"a":\n{"a":2}\n', "jsonl"),
        ("a.json", "nonsense", "json"),
        ("a.json", '{"v":1,"data":[{"text":"' + "x" * 2_000_000 + '"}]}', "json"),
        ("a.json", '{"text":"' + "x" * 2_000_000 + '"}', "jsonl"),
        ("a.jsonl", '[{"a":1},\n{"a":2}]', "json"),
        ("a.jsonl", '[{"a":1}]\n[{"a":2}]\n', "jsonl"),
        ("a.jsonl", '{"data":[{}]}', "jsonl"),
        ("a.jsonl", "nonsense", "jsonl"),
        ("a", '[\n{"a":1}]', "json"),
        ("a.json", "[1, 2]", "json"),
        ("a.json", '{\n"a": 1}', "json_object"),
        ("a.json", '{"a": 1}', "json_object"),
        ("a.json", '{\n"a": 1}{"a": 2}', "json"),
        ("a", "[1, 2]", "text"),
        ("a", "PAR1", "parquet"),
        ("a.arrow", "PAR1", "parquet"),
        ("a", "ARROW1", "arrow"),
    ],
)
def test_content_decides_between_json_lines_and_lists(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content.encode())
    listing = list_sources([str(tmp_path / name)])
    assert listing.sources[0].kind == kind
    declared_kinds = {"a": None, "a.json": "json", "a.jsonl": "jsonl", "a.arrow": "arrow"}
    differs = declared_kinds.get(name, kind) not in (None, kind) and kind != "json_object"
    assert bool(listing.notes) == differs
    assert not differs or f"Read by content, not by name: {name} as " in listing.notes[0]


def test_json_without_records_is_left_out_of_folders_and_globs(tmp_path):
    for name, content in {
        "words.json": '["x"]',
        "text.json": '"x"',
        "numbers.json": "[1, 2]",
        "rows.json": '[\n  {"text": "a"}]',
        "more.json": '{\n  "version": 1, "data": [{"text": "a"}]}',
        "lines.json": '{"text": "a"}\n{"text": "b"}',
    }.items():
        (tmp_path / name).write_text(content)
    listing = list_sources([str(tmp_path)])
    assert {source.name.split("/")[1] for source in listing.sources} == {
        "rows.json",
        "more.json",
        "lines.json",
    }
    assert "3 JSON without records" in listing.notes[0]
    assert len(list_sources([str(tmp_path / "*.json")]).sources) == 3


def test_feather_version_1_and_compressed_tables_are_refused(tmp_path):
    (tmp_path / "a.feather").write_bytes(b"FEA1")
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(InputError, match="Feather version 1.*write_feather"):
        list_names(tmp_path / "a.feather")
    with pytest.raises(InputError, match="decompress it first: tables need random access"):
        list_names(tmp_path / "a.parquet.gz")


def test_a_name_that_is_not_utf8_is_escaped(corpus):
    with open(os.fsencode(corpus) + b"/caf\xe9.txt", "w") as file:
        file.write("x")
    assert "corpus/caf\ufffd.txt" in list_names("corpus")


def test_very_many_absolute_inputs_are_named_in_linear_time():
    started = time.process_time()
    assert make_input_labels([f"/data/part{i % 7}/{i}.txt" for i in range(20_000)])[8] == "8.txt"
    assert time.process_time() - started < 20


@given(st.text(st.sampled_from("ab./ \u00e9")).filter(lambda name: "/." not in f"/{name}/"))
def test_endings_are_those_of_pathlib(name):
    assert get_suffix(name) == PurePosixPath(name).suffix


@given(st.text(st.sampled_from("ab./ \u00e9")))
def test_absolute_paths_are_those_of_the_standard_library(path):
    assert make_absolute(path) == os.path.abspath(path)
