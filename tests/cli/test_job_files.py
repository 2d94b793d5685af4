"""Configuration files of other trainers: options override them, and doctor's command does not repeat them."""

import json
import shlex
from pathlib import Path

import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.store import read_manifest


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    """A job of ms-swift with a system prompt and a limit of tokens."""
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "job.yaml").write_text("dataset: [chat.jsonl]\nsystem: Be kind.\nmax_length: 512\n")
    return "job.yaml"


def prepare(*words):
    assert run_command_line(["prepare", *words, "--val-fraction", "0"]) == 0
    store = batchloom.open_store(words[words.index("--out") + 1])
    return store.tokenizer.decode(store[0].ids.tolist()), read_manifest(store.path).recipe


def test_an_empty_system_prompt_removes_that_of_a_job_file(job_file, capsys):
    text, recipe = prepare(job_file, "--out", "kind", "--tokenizer", "bytes")
    assert "Be kind." in text
    text, recipe = prepare(job_file, "--out", "plain", "--tokenizer", "bytes", "--default-system", "")
    assert "Be kind." not in text
    assert "System" not in text
    assert "default_system" not in recipe["chat"]
    assert "overridden by options: system" in capsys.readouterr().err
    recipe_file = Path("recipe.yaml")
    assert run_command_line(["prepare", job_file, "--tokenizer", "bytes", "--print-recipe"]) == 0
    recipe_file.write_text(capsys.readouterr().out)
    assert "Be kind." in prepare("--recipe", "recipe.yaml", "--out", "again")[0]
    assert "Be kind." not in prepare("--recipe", "recipe.yaml", "--out", "without", "--default-system", "")[0]


@pytest.mark.parametrize(
    ("options", "repeated"),
    [
        ([], []),
        (["--max-tokens", "512"], ["--max-tokens", "512"]),
        (["--max-tokens", "100"], ["--max-tokens", "100"]),
        (["--default-system", ""], ["--default-system", ""]),
    ],
)
def test_the_next_command_repeats_the_options_but_not_the_job_file(job_file, options, repeated, capsys):
    assert run_command_line(["doctor", job_file, "--tokenizer", "bytes", *options, "--json"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    words = shlex.split(command)
    assert words == ["batchloom", "prepare", job_file, "--out", "store", "--tokenizer", "bytes", *repeated]
    text, recipe = prepare(*words[2:])
    assert ("Be kind." in text) == ("--default-system" not in repeated)
    assert recipe["chat"]["max_tokens"] == (100 if "100" in repeated else 512)
