"""Local data without a network: nothing is looked up, whatever the environment says."""

import json
import os
import subprocess
import sys

import pytest

from chat.conftest import byte_level
from chat.conversations import CHATML
from preparation.stores import jsonl
from train.folders import write_model

# Every attempt is refused and written down: one that is made and forgiven is an attempt, too.
BLOCKED = """
import os, socket

def refuse(*call):
    with open(os.environ["ATTEMPTS"], "a") as file:
        file.write(repr(call) + "\\n")
    raise OSError("there is no network")

class Blocked(socket.socket):
    # Bound to this machine a socket reaches nobody: urllib3 looks so whether there is IPv6.
    def connect(self, address):
        self.refuse_far("connect", address)
        super().connect(address)

    def connect_ex(self, address):
        self.refuse_far("connect_ex", address)
        return super().connect_ex(address)

    def sendto(self, *given):
        self.refuse_far("sendto", given[-1])
        return super().sendto(*given)

    def refuse_far(self, *call):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse(*call)

socket.socket = Blocked
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
"""
TRAIN = ["--device", "cpu", "--seq-len", "64", "--batch-size", "2", "--max-iters", "3"]
ASKED = [{"question": f"How much is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(300)]


@pytest.fixture(scope="module")
def blocked(tmp_path_factory):
    """An environment in which no connection can be opened."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKED)
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_"))
    }
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The cache of the Hub is empty, too.
    return given | {"PYTHONPATH": path, "HF_HOME": str(folder / "cache")}


RUN = """
import json, sys
from batchloom.cli import run_command_line

for words in json.loads(sys.argv[1]):
    if code := run_command_line(words):
        sys.exit(code)
"""


@pytest.fixture
def batchloom(blocked, tmp_path):
    """Runs command lines there, and sees to it that no connection was asked for."""
    attempts = tmp_path / "attempts"
    environment = {**blocked, "ATTEMPTS": str(attempts)}

    def run(*lines):
        words = json.dumps([list(map(str, line)) for line in lines])
        command = [sys.executable, "-W", "ignore", "-c", RUN, words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        assert not attempts.exists(), attempts.read_text()
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "code",
    [
        *(
            f"import urllib.request; urllib.request.urlopen('http://{host}:9')"
            for host in ("127.0.0.1", "[::1]", "localhost")
        ),
        "import socket; socket.socket().connect(('127.0.0.1', 9))",
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
    ],
)
def test_the_block_blocks(tmp_path, blocked, code):
    environment = {**blocked, "ATTEMPTS": str(tmp_path / "attempts")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert b"there is no network" in done.stderr
    assert (tmp_path / "attempts").read_text()


@pytest.mark.parametrize("tokenizer", ["gpt2", pytest.param("train:300", marks=pytest.mark.slow)])
def test_texts_prepare_check_and_train(tmp_path, batchloom, tokenizer):
    jsonl(tmp_path / "in.jsonl", [{"text": f"{n} times {n} is {n * n}."} for n in range(400)])
    store = tmp_path / "store"
    words = ["--out", store, "--tokenizer", tokenizer, "--val-fraction", 0.1]
    said = batchloom(
        ["prepare", tmp_path / "in.jsonl", *words],
        ["check", store],
        ["train", "--data", store, "--out", tmp_path / "run", *TRAIN],
    )
    assert "sound" in said


def test_conversations_prepare_check_and_finetune_from_folders(tmp_path, batchloom):
    folder = byte_level(tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    jsonl(tmp_path / "in.jsonl", ASKED)
    write_model(tmp_path / "model", vocab_size=600)
    store = tmp_path / "store"
    words = ["--out", store, "--tokenizer", folder, "--val-fraction", 0.1]
    finetuning = ["--data", store, "--init", tmp_path / "model", "--out", tmp_path / "run"]
    said = batchloom(
        ["prepare", tmp_path / "in.jsonl", *words],
        ["check", store],
        ["train", *finetuning, *TRAIN],
    )
    assert "plain is used" not in said
    assert "sound" in said
