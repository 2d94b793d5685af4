"""Symbolic links out of an input folder are skipped, counted and reported."""

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
from preparation.stores import write_jsonl

FOLLOW_HINT = "--follow-links follows them."


@pytest.fixture(autouse=True)
def input_folders(tmp_path, monkeypatch):
    """Make a folder ``data`` with one file, and a folder ``outside`` with two."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "outside"):
        Path(name).mkdir()
        write_jsonl(f"{name}/own.jsonl", [{"text": f"{name} {n}"} for n in range(5)])
    Path("outside/deep").mkdir()
    write_jsonl("outside/deep/more.jsonl", [{"text": f"more {n}"} for n in range(5)])


def make_link(path, target):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).symlink_to(target)


def list_names(path, *, follow_links=False):
    listing = list_sources([path], declared_inputs=[DeclaredInput(follow_links=follow_links)])
    return [source.name for source in listing.sources], " ".join(listing.notes)


LEAVING_LINKS = {
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
    for path, target in links:
        make_link(path, target.replace("{root}", os.getcwd()))


@pytest.mark.parametrize("pattern", ["data", "data/", "data/**/*", "{root}/data", "."])
@pytest.mark.parametrize("case", LEAVING_LINKS)
def test_a_link_that_leaves_is_skipped_unless_it_is_to_be_followed(case, pattern):
    with tarfile.open("outside/packed.tar", "w") as archive:
        archive.add("outside/own.jsonl", "own.jsonl")
    make_links(LEAVING_LINKS[case])
    if pattern == ".":
        # Seen from inside the folder, the same links lead out of it.
        os.chdir("data")
    inside = [f"{pattern.rstrip('/')}/own.jsonl".removeprefix("./")]
    if "*" in pattern or "{" in pattern:
        inside = ["data/own.jsonl"]
    names, notes = list_names(pattern.replace("{root}", str(Path.cwd().resolve())))
    assert [name.removeprefix("./") for name in names] == inside
    count = sum(path.startswith("data") for path, _ in LEAVING_LINKS[case])
    count_text = "1 symbolic link leads" if count == 1 else f"{count} symbolic links lead"
    assert f"{count_text} out of the input folder (" in notes
    assert FOLLOW_HINT in notes
    names, notes = list_names(pattern.replace("{root}", str(Path.cwd().resolve())), follow_links=True)
    assert len(names) > 1
    assert FOLLOW_HINT not in notes


def test_links_inside_of_the_folder_are_followed_and_give_nothing_twice():
    make_link("data/again.jsonl", "own.jsonl")
    make_link("data/sub/up", "..")
    names, notes = list_names("data")
    # The first name in path order is read.
    assert names == ["data/again.jsonl"]
    assert "Named more than once, read once: data/own.jsonl." in notes
    assert "1 folder linked twice" in notes
    assert FOLLOW_HINT not in notes


def test_an_input_that_is_a_link_itself_is_followed():
    make_link("file.jsonl", "outside/own.jsonl")
    make_link("folder", "outside")
    assert list_names("file.jsonl")[0] == ["file.jsonl"]
    assert list_names("folder")[0] == ["folder/deep/more.jsonl", "folder/own.jsonl"]
    # Links that lead out of the linked folder are skipped as well.
    make_link("outside/back.jsonl", "../data/own.jsonl")
    names, notes = list_names("folder")
    assert names == ["folder/deep/more.jsonl", "folder/own.jsonl"]
    assert "1 symbolic link leads out of the input folder (folder) and is skipped: " in notes


def test_broken_links_and_loops_are_counted_as_before():
    make_link("data/nowhere.jsonl", "missing.jsonl")
    make_link("data/outside.jsonl", "../outside/missing.jsonl")
    make_link("data/loop", "loop")
    make_link("data/self", ".")
    for follow_links in (False, True):
        names, notes = list_names("data", follow_links=follow_links)
        assert names == ["data/own.jsonl"]
        assert "3 broken links" in notes
        assert "1 folder linked twice" in notes
    # A loop through another folder ends.
    make_link("data/out", "../outside")
    make_link("outside/back", "../data")
    names, notes = list_names("data", follow_links=True)
    assert sorted(names) == ["data/out/deep/more.jsonl", "data/out/own.jsonl", "data/own.jsonl"]


def test_every_link_is_counted_once_also_where_a_glob_reaches_below_it():
    make_link("data/a", "../outside")
    make_link("data/b.jsonl", "../outside/own.jsonl")
    for source in ("data", "data/**", "data/**/*.jsonl", "data/*"):
        names, notes = list_names(source)
        assert names == ["data/own.jsonl"], source
        assert "2 symbolic links lead out of the input folder" in notes, source
    assert "data/a, ...;" in notes


def test_where_nothing_else_remains_the_error_says_so():
    Path("snapshot").mkdir()
    make_link("snapshot/train.jsonl", "../outside/own.jsonl")
    for source in ("snapshot", "snapshot/*.jsonl"):
        with pytest.raises(InputMissingError, match=r"1 symbolic link leads out of .*--follow-links"):
            list_sources([source])
    assert list_names("snapshot", follow_links=True)[0] == ["snapshot/train.jsonl"]


def test_a_saved_dataset_with_files_outside_is_refused_with_the_remedy():
    Path("data/own.jsonl").unlink()
    Path("data/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    Path("data/dataset_info.json").write_text("{}")
    Path("outside/data.arrow").write_bytes(b"ARROW1")
    make_link("data/data.arrow", "../outside/data.arrow")
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
    for name, note in (
        ("links.tar", "2 links and special files"),
        ("links.zip", "1 link or special file"),
    ):
        names, notes = list_names(name, follow_links=True)
        assert names == [f"{name}/own.jsonl"]
        assert note in notes


def test_every_command_skips_and_follows(capsys):
    make_link("data/a.jsonl", "../outside/own.jsonl")
    make_link("data/deep", "../outside/deep")
    note = f"2 symbolic links lead out of the input folder (data) and are skipped: data/a.jsonl, ...; {FOLLOW_HINT}"
    for command, out in (
        (["prepare", "data", "--tokenizer", "bytes", "--out"], "store"),
        (["convert", "data", "--out"], "rows.jsonl"),
        (["doctor", "data", "--tokenizer", "bytes"], ""),
    ):
        assert run_command_line([*command, *([out] if out else [])]) == 0
        captured = capsys.readouterr()
        assert note in " ".join((captured.out + captured.err).split()), command
        assert run_command_line([*command, *([f"all-{out}"] if out else []), "--follow-links"]) == 0
        captured = capsys.readouterr()
        assert FOLLOW_HINT not in captured.out + captured.err, command
    assert Path("rows.jsonl").read_text().count("\n") == 5
    assert Path("all-rows.jsonl").read_text().count("\n") == 15
    assert note in json.loads(Path("store/report.json").read_text())["notes"]
    assert run_command_line(["check", "data"]) == 0
    assert note in " ".join(capsys.readouterr().out.split())


def test_a_recipe_and_a_manifest_hold_the_setting_only_where_it_is_given():
    make_link("data/a.jsonl", "../outside/own.jsonl")
    plain = batchloom.prepare("data", out="plain", tokenizer="bytes")
    assert plain.counts.records == 5
    assert not read_recipe("plain").follow_links
    assert "follow_links" not in Path("plain/dataset_metadata.json").read_text()
    followed = batchloom.prepare("data", out="followed", tokenizer="bytes", follow_links=True)
    assert followed.counts.records == 10
    assert read_recipe("followed").follow_links
    # Only the inputs differ between the two jobs.
    fingerprints = [
        json.loads(Path(name, "dataset_metadata.json").read_text())["recipe_fingerprint"]
        for name in ("plain", "followed")
    ]
    assert fingerprints[0] == fingerprints[1]
    rerun = batchloom.prepare(recipe="followed", out="again")
    assert "again is identical to followed, byte for byte." in rerun.notes
    Path("sets.yaml").write_text("datasets:\n  - path: data\nfollow_links: true\n")
    assert batchloom.prepare("sets.yaml", out="sets", tokenizer="bytes").counts.records == 10
    Path("sets.yaml").write_text("datasets:\n  - path: data\n")
    assert batchloom.prepare("sets.yaml", out="some", tokenizer="bytes").counts.records == 5
    with pytest.raises(batchloom.SettingsError, match="follow_links: 'yes' is neither"):
        batchloom.prepare("data", out="other", tokenizer="bytes", follow_links="yes")


def test_a_stream_skips_and_follows(caplog):
    make_link("data/a.jsonl", "../outside/own.jsonl")
    settings = {"seq_len": 16, "global_batch_size": 1, "steps": 2, "tokenizer": "bytes", "workers": 0}
    with caplog.at_level("INFO", "batchloom"):
        batchloom.stream("data", **settings)
        assert "1 symbolic link leads out of the input folder (data) and is skipped" in caplog.text
        caplog.clear()
        batchloom.stream("data", follow_links=True, **settings)
        assert FOLLOW_HINT not in caplog.text


def test_linked_files_of_evaluation_sets_are_read():
    """Skipping such a text would leave evaluation text in the training data."""
    make_link("evaluation/a.jsonl", "../outside/own.jsonl")
    text = "a text of many words that is in the evaluation set and in the training data alike " * 4
    write_jsonl("outside/own.jsonl", [{"text": text}])
    write_jsonl("data/own.jsonl", [{"text": text}, {"text": "another text of other words altogether " * 9}])
    clean = [{"decontaminate": {"sets": {"held": "evaluation"}}}]
    result = batchloom.prepare("data", out="s", tokenizer="bytes", clean=clean)
    assert result.counts.documents == 1
