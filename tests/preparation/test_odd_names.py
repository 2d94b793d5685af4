"""Names that are no UTF-8, and paths that lie in each other's way."""

import json
import os

import pytest

import batchloom
from batchloom import InputError, OutputError, SettingsError, check
from batchloom.core.errors import StoreConflictError
from batchloom.sources import make_input_labels
from batchloom.store import read_manifest
from preparation.stores import make, recipe_of, texts


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_and_folders_of_any_name_are_used(here):
    folder = os.fsdecode(b"in\xff")
    os.mkdir(folder)
    for name in (b"a\xfe.txt", b"a\xff.txt", "a\ufffd.txt".encode(), b"x.\xff"):
        with open(os.fsencode(folder) + b"/" + name, "wb") as file:
            file.write(b"\0" if name == b"x.\xff" else b"text of " + name[-5:-4].hex().encode())
    out, notes = os.fsdecode(b"out\xff"), []
    make(folder, out, listener=notes.append)
    labels = {"in\ufffd/a\ufffd.txt", "in\ufffd/a\ufffd.txt (2)", "in\ufffd/a\ufffd.txt (3)"}
    assert {source.name for source in read_manifest(here / out).sources} == labels
    assert read_manifest(here / out).recipe["inputs"] == ["in\ufffd"]
    assert set(texts(out)) == {"text of fe", "text of ff", "text of bd"}
    assert notes[0].text == "Left out of in\ufffd: 1 binary .\ufffd."
    report = json.loads((here / out / "report.json").read_bytes())
    assert report["out"].endswith("out\ufffd")
    assert make(folder, out).already_done
    assert check(folder).sound


def test_a_job_with_odd_names_goes_on(here):
    name = os.fsdecode(b"\xff.txt")
    (here / name).write_text("text\n\n" * 1000)

    def stop(event):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        make(name, "out", unit_bytes=1000, split_on="line", listener=stop)
    assert make(name, "out", unit_bytes=1000, split_on="line").counts.documents == 1


def test_a_working_folder_that_was_deleted_is_not_needed(here, monkeypatch):
    (here / "in.txt").write_text("text")
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    assert make(here / "in.txt", here / "out").counts.documents == 1


def test_no_two_inputs_are_called_the_same():
    odd = [os.fsdecode(name) for name in (b"/a/\xff", b"/a/\xfe", b"/b/\xff")]
    assert make_input_labels([*odd, "/x", "x", odd[0]]) == [
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
    with pytest.raises(SettingsError, match=f"^{name}: .* is not a word"):
        recipe_of(inputs=("a",), **{name: value})


@pytest.mark.parametrize("inputs", [5, [5], b"a", "a\0b", [""], ["a\ud800"], [None, "a"]])
def test_what_is_no_path_is_a_setting_that_is_wrong(inputs):
    with pytest.raises(SettingsError, match=r"^inputs: .* is no path; name files"):
        batchloom.prepare(inputs, out="out")


@pytest.mark.parametrize("out", [None, 5, "", "a\0b"])
def test_an_output_that_is_no_path(out):
    with pytest.raises(SettingsError, match=r"^out: .* is no path; name the folder"):
        batchloom.prepare("a", out=out)


@pytest.mark.parametrize(
    ("given", "out", "sentence"),
    [
        ("in", "in", "--out in is the folder of the input in itself"),
        ("in/*.txt", "in", "--out in is the folder of the input in/"),
        ("in/a.txt", "in", "The input in/a.txt lies inside --out in"),
        ("in/sub", "in", "The input in/sub lies inside --out in"),
        (".", "link", "--out link is the folder of the input . itself"),
    ],
)
def test_an_input_in_the_output_is_named(here, given, out, sentence):
    (here / "in" / "sub").mkdir(parents=True)
    for name in ("in/a.txt", "in/sub/b.txt"):
        (here / name).write_text("text")
    (here / "link").symlink_to(here)
    with pytest.raises(StoreConflictError, match="choose another --out") as error:
        make(given, out)
    assert str(error.value).startswith(sentence)


def test_the_output_may_lie_inside_an_input(here):
    (here / "in").mkdir()
    (here / "in" / "a.txt").write_text("text")
    for _ in range(2):
        assert make("in", "in/store").counts.documents == 1


@pytest.mark.parametrize(
    ("out", "remedy"),
    [("loop", "its symbolic links form a loop; choose another"), ("x" * 300, "choose a shorter --out")],
)
def test_an_output_the_system_refuses_has_its_remedy(here, out, remedy):
    (here / "a.txt").write_text("text")
    (here / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match=remedy):
        make("a.txt", out)
    with pytest.raises(InputError, match="choose a shorter one|a broken link"):
        check(out)
    with pytest.raises(InputError, match="choose a shorter one|a broken link"):
        make(out, "out")


def test_a_path_that_is_not_there_is_told_its_neighbour(here):
    (here / "corpus").mkdir()
    (here / "corpus" / "wiki.jsonl").write_text("{}")
    for given, meant in {"corpus/wikis.jsonl": "wiki.jsonl", "korpus/wiki.jsonl": "corpus"}.items():
        for act in (check, lambda path: make(path, "out")):
            with pytest.raises(InputError, match=f"; did you mean '{meant}'\\?$"):
                act(given)
