"""Missing paths: every command reports the same error without asking the Hub."""

import json
from pathlib import Path

import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import InputMissingError, StoreMissingError

ORDER_OPTIONS = ["--seq-len", "64", "--global-batch-size", "2"]
COMMANDS = {
    "prepare": ["prepare", "PATH", "--out", "made", "--tokenizer", "bytes"],
    "doctor": ["doctor", "PATH"],
    "check": ["check", "PATH"],
    "convert": ["convert", "PATH", "--out", "rows.jsonl"],
    "import": ["import", "PATH", "--out", "made", "--tokenizer", "bytes"],
    "inspect": ["inspect", "PATH"],
    "plan": ["plan", "PATH", *ORDER_OPTIONS],
    "explain": ["explain", "PATH", "--step", "0", *ORDER_OPTIONS],
    "when": ["when", "PATH", "--document", "0", *ORDER_OPTIONS],
    "export": ["export", "PATH", "--to", "flat", "--out", "made"],
    "upload": ["upload", "PATH", "memory://bucket/a"],
    "log": ["log", "PATH"],
    "remove": ["remove", "PATH", "--source", "a"],
    "remove of nothing": ["remove", "PATH"],
    "edit": ["edit", "PATH", "--at-step", "3", "--skip", "2", "--data", "dummy"],
    "explain --checkpoint": ["explain", "dummy", "--step", "0", "--checkpoint", "PATH"],
    "when --checkpoint": ["when", "dummy", "--document", "0", "--checkpoint", "PATH"],
    "plan --mixture": ["plan", "--mixture", "PATH", *ORDER_OPTIONS],
    "prepare --recipe": ["prepare", "--recipe", "PATH", "--out", "made"],
    "compact": ["compact", "PATH"],
    "compare": ["compare", "PATH"],
    "train --data": ["train", "--data", "PATH", "--out", "made", "--max-iters", "1"],
    "train --stream": ["train", "--stream", "PATH", "--out", "made", "--max-iters", "1"],
    "train --input-file": ["train", "--input-file", "PATH", "--out", "made", "--max-iters", "1"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Folder with ``stores/web``; a request to the Hub would raise another error."""
    (tmp_path / "stores/web").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_a_missing_path_alike(command, folder, capsys):
    for path, ending in (
        ("stores/wbe", "; did you mean 'stores/web'?"),
        (f"{folder}/store/web", f"; did you mean '{folder}/stores/web'?"),
        ("stores/nothing/below", "."),
        ("nothing", "."),
        (f"{folder}/stores/wbe", f"; did you mean '{folder}/stores/web'?"),
    ):
        assert run_command_line([path if argument == "PATH" else argument for argument in COMMANDS[command]]) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert f"There is no file or folder {path}: name " in message, command
        assert message.endswith(ending), command
        assert "download" not in message


def test_check_reports_a_missing_path_as_json(capsys):
    assert run_command_line(["check", "stores/wbe", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["data"] == "absent"
    assert report["faults"][0].startswith("There is no file or folder stores/wbe: name ")


def test_a_url_without_its_second_slash_is_suggested_with_it(capsys):
    for location in ("hf:/datasets/a/b", "s3:/bucket/x.jsonl"):
        assert run_command_line(["prepare", location, "--out", "x"]) == 1
        assert capsys.readouterr().err.endswith(f"; did you mean '{location.replace(':/', '://')}'?\n")
    assert run_command_line(["inspect", "s3:/bucket/store"]) == 1
    assert "The store begins with s3:/ and one slash" in capsys.readouterr().err
    assert run_command_line(["prepare", "hf://dataset/a/b", "--out", "x"]) == 1
    assert "check its address, which begins with hf://datasets/ORG/NAME" in capsys.readouterr().err


def test_python_reports_a_missing_path_alike():
    with pytest.raises(StoreMissingError, match="There is no file or folder stores/wbe: .*'stores/web'"):
        batchloom.open_store("stores/wbe")
    settings = {"seq_len": 64, "global_batch_size": 2, "steps": 1}
    with pytest.raises(InputMissingError, match="There is no file or folder stores/wbe: .*'stores/web'"):
        batchloom.stream("stores/wbe", **settings)


def test_a_hub_name_is_a_path_if_a_folder_has_its_first_part():
    with pytest.raises(InputMissingError, match="a data set of the Hub: hf://datasets/stores/wbe"):
        batchloom.check("stores/wbe")
    # Without such a folder, and with more than a path, the name is a Hub name.
    for name in ("org/name", "stores/wbe@main", "stores/wbe:config/train"):
        with pytest.raises(batchloom.BatchloomError, match="org/name|stores/wbe") as caught:
            batchloom.check(name)
        assert "There is no file or folder stores/wbe: name" not in str(caught.value)
    Path("org").mkdir()
    with pytest.raises(InputMissingError, match="There is no file or folder org/name: "):
        batchloom.check("org/name")
