"""Names that are not UTF-8, and inputs and outputs with overlapping paths."""

import json
import os

import pytest

import batchloom
from batchloom import InputError, OutputError, SettingsError, check
from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import StoreConflictError
from batchloom.store import read_manifest
from preparation.stores import make_recipe, prepare_store, read_texts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_and_folders_of_any_name_are_used(folder):
    input_folder = os.fsdecode(b"in\xff")
    os.mkdir(input_folder)
    for name in (b"a\xfe.txt", b"a\xff.txt", "a\ufffd.txt".encode(), b"x.\xff"):
        with open(os.fsencode(input_folder) + b"/" + name, "wb") as file:
            file.write(b"\0" if name == b"x.\xff" else b"text of " + name[-5:-4].hex().encode())
    out, notes = os.fsdecode(b"out\xff"), []
    prepare_store(input_folder, out, listener=notes.append)
    labels = {"in\ufffd/a\ufffd.txt", "in\ufffd/a\ufffd.txt (2)", "in\ufffd/a\ufffd.txt (3)"}
    assert {source.name for source in read_manifest(folder / out).sources} == labels
    assert read_manifest(folder / out).recipe["inputs"] == ["in\ufffd"]
    assert set(read_texts(out)) == {"text of fe", "text of ff", "text of bd"}
    assert notes[0].text == "Left out of in\ufffd: 1 binary .\ufffd."
    report = json.loads((folder / out / "report.json").read_bytes())
    assert report["out"].endswith("out\ufffd")
    assert prepare_store(input_folder, out).already_done
    assert check(input_folder).sound


def test_a_job_with_odd_names_goes_on(folder):
    name = os.fsdecode(b"\xff.txt")
    (folder / name).write_text("text\n\n" * 1000)

    def stop(event):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare_store(name, "out", unit_bytes=1000, split_on="line", listener=stop)
    assert prepare_store(name, "out", unit_bytes=1000, split_on="line").counts.documents == 1


def test_a_working_folder_that_was_deleted_is_not_needed(folder, monkeypatch):
    (folder / "in.txt").write_text("text")
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert prepare_store(folder / "in.txt", folder / "out").counts.documents == 1


def test_no_two_inputs_are_called_the_same():
    paths = [os.fsdecode(name) for name in (b"/a/\xff", b"/a/\xfe", b"/b/\xff")]
    assert make_input_labels([*paths, "/x", "x", paths[0]]) == [
        "a/\ufffd",
        "\ufffd",
        "b/\ufffd",
        "x",
        "x (2)",
        "a/\ufffd",
    ]


@pytest.mark.parametrize("name", ["split_on", "tokenizer", "end_token", "text_field"])
@pytest.mark.parametrize("value", ["a\udcff", "", 5])
def test_options_that_cannot_be_written_down_are_refused(name, value):
    with pytest.raises(SettingsError, match=f"^{name}: .* is not a text"):
        make_recipe(inputs=("a",), **{name: value})


@pytest.mark.parametrize("inputs", [5, [5], b"a", "a\0b", [""], ["a\ud800"], [None, "a"]])
def test_invalid_paths_are_wrong_settings(inputs):
    with pytest.raises(
        SettingsError, match=r"^inputs: .* is no path; name files|^inputs: an object of type int is neither path"
    ):
        batchloom.prepare(inputs, out="out")


@pytest.mark.parametrize("out", [None, 5, "", "a\0b"])
def test_an_output_that_is_no_path(out):
    with pytest.raises(SettingsError, match=r"^out: .* is no path; name the folder"):
        batchloom.prepare("a", out=out)


@pytest.mark.parametrize(
    ("source", "out", "sentence"),
    [
        ("in", "in", "--out in is the folder of the input in itself"),
        ("in/*.txt", "in", "--out in is the folder of the input in/"),
        ("in/a.txt", "in", "The input in/a.txt lies inside --out in"),
        ("in/sub", "in", "The input in/sub lies inside --out in"),
        (".", "link", "--out link is the folder of the input . itself"),
    ],
)
def test_an_input_in_the_output_is_named(folder, source, out, sentence):
    (folder / "in" / "sub").mkdir(parents=True)
    for name in ("in/a.txt", "in/sub/b.txt"):
        (folder / name).write_text("text")
    (folder / "link").symlink_to(folder)
    with pytest.raises(StoreConflictError, match="choose another --out") as error:
        prepare_store(source, out)
    assert str(error.value).startswith(sentence)


def test_the_output_may_lie_inside_an_input(folder):
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").write_text("text")
    for _ in range(2):
        assert prepare_store("in", "in/store").counts.documents == 1


@pytest.mark.parametrize(
    ("out", "remedy"),
    [("loop", "its symbolic links form a loop; choose another"), ("x" * 300, "choose a shorter --out")],
)
def test_an_output_the_system_refuses_has_its_remedy(folder, out, remedy):
    (folder / "a.txt").write_text("text")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match=remedy):
        prepare_store("a.txt", out)
    with pytest.raises(InputError, match="choose a shorter one|a broken link"):
        check(out)
    with pytest.raises(InputError, match="choose a shorter one|a broken link"):
        prepare_store(out, "out")


def test_a_missing_path_is_reported_with_a_suggestion(folder):
    (folder / "corpus").mkdir()
    (folder / "corpus" / "wiki.jsonl").write_text("{}")
    for source, suggestion in {
        "corpus/wikis.jsonl": "corpus/wiki.jsonl",
        "korpus/wiki.jsonl": "corpus/wiki.jsonl",
    }.items():
        for read in (check, lambda path: prepare_store(path, "out")):
            with pytest.raises(InputError, match=f"; did you mean '{suggestion}'\\?$"):
                read(source)
