"""Symbolic links that lead out of an input folder are skipped, counted and told, unless they are wanted."""

import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import InputError, InputMissingError
from batchloom.preparation import read_recipe
from batchloom.sources import DeclaredInput, list_sources
from preparation.stores import jsonl

TOLD = "--follow-links follows them."


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A folder ``data`` with one file, and a folder ``outside`` with another."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "outside"):
        Path(name).mkdir()
        jsonl(f"{name}/own.jsonl", [{"text": f"{name} {n}"} for n in range(5)])
    Path("outside/deep").mkdir()
    jsonl("outside/deep/more.jsonl", [{"text": f"more {n}"} for n in range(5)])


def link(place, target):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).symlink_to(target)


def names(given, *, follow_links=False):
    listing = list_sources([given], declared_inputs=[DeclaredInput(follow_links=follow_links)])
    return [source.name for source in listing.sources], " ".join(listing.notes)


LEAVING = {
    "relative file": [("data/a.jsonl", "../outside/own.jsonl")],
    "absolute file": [("data/a.jsonl", "{root}/outside/own.jsonl")],
    "folder": [("data/a", "../outside")],
    "below a folder": [("data/sub/deeper/a.jsonl", "../../../outside/own.jsonl")],
    "chain through a link inside": [
        ("data/b.jsonl", "../outside/own.jsonl"),
        ("data/a.jsonl", "b.jsonl"),
    ],
    "chain through a link outside": [
        ("step.jsonl", "outside/own.jsonl"),
        ("data/a.jsonl", "../step.jsonl"),
    ],
    "packed": [("data/a.tar", "../outside/packed.tar")],
}


def make_links(links):
    for place, target in links:
        link(place, target.replace("{root}", os.getcwd()))


@pytest.mark.parametrize("pattern", ["data", "data/", "data/**/*", "{root}/data", "."])
@pytest.mark.parametrize("case", LEAVING)
def test_a_link_that_leaves_is_skipped_unless_it_is_to_be_followed(case, pattern):
    with tarfile.open("outside/packed.tar", "w") as archive:
        archive.add("outside/own.jsonl", "own.jsonl")
    make_links(LEAVING[case])
    if pattern == ".":
        # From inside of the folder the same links leave it.
        os.chdir("data")
    inside = [f"{pattern.rstrip('/')}/own.jsonl".removeprefix("./")]
    if "*" in pattern or "{" in pattern:
        inside = ["data/own.jsonl"]
    found, notes = names(pattern.replace("{root}", str(Path.cwd().resolve())))
    assert [one.removeprefix("./") for one in found] == inside
    count = sum(place.startswith("data") for place, _ in LEAVING[case])
    counted = "1 symbolic link leads" if count == 1 else f"{count} symbolic links lead"
    assert f"{counted} out of the input folder (" in notes
    assert TOLD in notes
    found, notes = names(pattern.replace("{root}", str(Path.cwd().resolve())), follow_links=True)
    assert len(found) > 1
    assert TOLD not in notes


def test_links_inside_of_the_folder_are_followed_and_give_nothing_twice():
    link("data/again.jsonl", "own.jsonl")
    link("data/sub/up", "..")
    found, notes = names("data")
    # The first name in the order of paths is the one that is read.
    assert found == ["data/again.jsonl"]
    assert "Named more than once, read once: data/own.jsonl." in notes
    assert "1 folder linked twice" in notes
    assert TOLD not in notes


def test_an_input_that_is_a_link_itself_is_followed():
    link("file.jsonl", "outside/own.jsonl")
    link("folder", "outside")
    assert names("file.jsonl")[0] == ["file.jsonl"]
    assert names("folder")[0] == ["folder/deep/more.jsonl", "folder/own.jsonl"]
    # What leaves the folder that is meant is skipped there, too.
    link("outside/back.jsonl", "../data/own.jsonl")
    found, notes = names("folder")
    assert found == ["folder/deep/more.jsonl", "folder/own.jsonl"]
    assert "1 symbolic link leads out of the input folder (folder) and is skipped: " in notes


def test_broken_links_and_loops_are_counted_as_before():
    link("data/nowhere.jsonl", "missing.jsonl")
    link("data/outside.jsonl", "../outside/missing.jsonl")
    link("data/loop", "loop")
    link("data/self", ".")
    for follow_links in (False, True):
        found, notes = names("data", follow_links=follow_links)
        assert found == ["data/own.jsonl"]
        assert "3 broken links" in notes
        assert "1 folder linked twice" in notes
    # A loop through the outside ends, too.
    link("data/out", "../outside")
    link("outside/back", "../data")
    found, notes = names("data", follow_links=True)
    assert sorted(found) == ["data/out/deep/more.jsonl", "data/out/own.jsonl", "data/own.jsonl"]


def test_every_link_is_counted_once_also_where_a_glob_reaches_below_it():
    link("data/a", "../outside")
    link("data/b.jsonl", "../outside/own.jsonl")
    for given in ("data", "data/**", "data/**/*.jsonl", "data/*"):
        found, notes = names(given)
        assert found == ["data/own.jsonl"], given
        assert "2 symbolic links lead out of the input folder" in notes, given
    assert "data/a, ...;" in notes


def test_where_nothing_else_remains_the_error_says_so():
    Path("snapshot").mkdir()
    link("snapshot/train.jsonl", "../outside/own.jsonl")
    for given in ("snapshot", "snapshot/*.jsonl"):
        with pytest.raises(InputMissingError, match=r"1 symbolic link leads out of .*--follow-links"):
            list_sources([given])
    assert names("snapshot", follow_links=True)[0] == ["snapshot/train.jsonl"]


def test_a_saved_dataset_with_files_elsewhere_is_refused_with_the_remedy():
    Path("data/own.jsonl").unlink()
    Path("data/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    Path("data/dataset_info.json").write_text("{}")
    Path("outside/data.arrow").write_bytes(b"ARROW1")
    link("data/data.arrow", "../outside/data.arrow")
    with pytest.raises(InputError, match=r"data/data\.arrow.* leads out of .*--follow-links"):
        list_sources(["data"])


def test_links_in_archives_are_never_followed():
    with tarfile.open("links.tar", "w") as archive:
        archive.add("data/own.jsonl", "own.jsonl")
        for name, kind, target in (
            ("soft.jsonl", tarfile.SYMTYPE, "../outside/own.jsonl"),
            ("hard.jsonl", tarfile.LNKTYPE, "../outside/own.jsonl"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
    with zipfile.ZipFile("links.zip", "w") as archive:
        archive.write("data/own.jsonl", "own.jsonl")
        entry = zipfile.ZipInfo("soft.jsonl")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "../outside/own.jsonl")
    for name, told in (
        ("links.tar", "2 links and special files"),
        ("links.zip", "1 link or special file"),
    ):
        found, notes = names(name, follow_links=True)
        assert found == [f"{name}/own.jsonl"]
        assert told in notes


def test_every_command_skips_and_follows(capsys):
    link("data/a.jsonl", "../outside/own.jsonl")
    link("data/deep", "../outside/deep")
    told = f"2 symbolic links lead out of the input folder (data) and are skipped: data/a.jsonl, ...; {TOLD}"
    for words, out in (
        (["prepare", "data", "--tokenizer", "bytes", "--out"], "store"),
        (["convert", "data", "--out"], "rows.jsonl"),
        (["doctor", "data", "--tokenizer", "bytes"], ""),
    ):
        assert run_command_line([*words, *([out] if out else [])]) == 0
        captured = capsys.readouterr()
        assert told in " ".join((captured.out + captured.err).split()), words
        assert run_command_line([*words, *([f"all-{out}"] if out else []), "--follow-links"]) == 0
        captured = capsys.readouterr()
        assert TOLD not in captured.out + captured.err, words
    assert Path("rows.jsonl").read_text().count("\n") == 5
    assert Path("all-rows.jsonl").read_text().count("\n") == 15
    assert told in json.loads(Path("store/report.json").read_text())["notes"]
    assert run_command_line(["check", "data"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_recipe_and_a_manifest_hold_the_setting_only_where_it_is_given():
    link("data/a.jsonl", "../outside/own.jsonl")
    plain = batchloom.prepare("data", out="plain", tokenizer="bytes")
    assert plain.counts.records == 5
    assert not read_recipe("plain").follow_links
    assert "follow_links" not in Path("plain/dataset_metadata.json").read_text()
    followed = batchloom.prepare("data", out="followed", tokenizer="bytes", follow_links=True)
    assert followed.counts.records == 10
    assert read_recipe("followed").follow_links
    # The inputs differ, and nothing else of the job.
    prints = [
        json.loads(Path(name, "dataset_metadata.json").read_text())["recipe_fingerprint"]
        for name in ("plain", "followed")
    ]
    assert prints[0] == prints[1]
    again = batchloom.prepare(recipe="followed", out="again")
    assert "again is identical to followed, byte for byte." in again.notes
    Path("sets.yaml").write_text("datasets:\n  - path: data\nfollow_links: true\n")
    assert batchloom.prepare("sets.yaml", out="sets", tokenizer="bytes").counts.records == 10
    Path("sets.yaml").write_text("datasets:\n  - path: data\n")
    assert batchloom.prepare("sets.yaml", out="some", tokenizer="bytes").counts.records == 5
    with pytest.raises(batchloom.SettingsError, match="follow_links: 'yes' is neither"):
        batchloom.prepare("data", out="other", tokenizer="bytes", follow_links="yes")


def test_a_stream_skips_and_follows(caplog):
    link("data/a.jsonl", "../outside/own.jsonl")
    order = {"seq_len": 16, "global_batch_size": 1, "steps": 2, "tokenizer": "bytes", "workers": 0}
    with caplog.at_level("INFO", "batchloom"):
        batchloom.stream("data", **order)
        assert "1 symbolic link leads out of the input folder (data) and is skipped" in caplog.text
        caplog.clear()
        batchloom.stream("data", follow_links=True, **order)
        assert TOLD not in caplog.text


def test_files_of_evaluation_sets_are_compared_with_wherever_they_lie():
    """A text that is skipped there would be trained on unseen."""
    link("evaluation/a.jsonl", "../outside/own.jsonl")
    text = "a text of many words that is in the evaluation set and in the training data alike " * 4
    jsonl("outside/own.jsonl", [{"text": text}])
    jsonl("data/own.jsonl", [{"text": text}, {"text": "another text of other words altogether " * 9}])
    clean = [{"decontaminate": {"sets": {"held": "evaluation"}}}]
    result = batchloom.prepare("data", out="s", tokenizer="bytes", clean=clean)
    assert result.counts.documents == 1
