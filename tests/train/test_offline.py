"""Local data needs no network: no connection is attempted."""

import json
import os
import subprocess
import sys

import pytest

from chat.conftest import make_byte_level_tokenizer
from chat.conversations import CHATML
from preparation.stores import write_jsonl
from processes import start_processes
from train.model_folders import write_model
from train.runs import BASE_SETTINGS

# Every attempt is refused and recorded, also one whose error the caller ignores.
BLOCK_SCRIPT = """
import os, socket

def refuse(*call):
    with open(os.environ["ATTEMPTS"], "a") as file:
        file.write(repr(call) + "\\n")
    raise OSError("there is no network")

class Blocked(socket.socket):
    # A socket bound to this machine is allowed: urllib3 checks for IPv6 that way.
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
TRAIN_OPTIONS = ["--device=cpu", "--seq-len=64", "--global-batch-size=2", "--max-iters=1", "--eval-batches=1"]
QUESTIONS = [{"question": f"How much is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(100)]


@pytest.fixture(scope="module")
def no_network(tmp_path_factory):
    """Environment variables under which no connection can be opened."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCK_SCRIPT)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_"))
    }
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The Hub's cache is empty.
    return variables | {"PYTHONPATH": path, "HF_HOME": str(folder / "cache")}


RUN_SCRIPT = """
import json, os, sys, warnings
from batchloom.cli import run_command_line

warnings.simplefilter("ignore")
for words in json.loads(sys.argv[1]):
    if code := run_command_line(words):
        sys.exit(code)
"""
# In a process that has imported the libraries: refuse connections from now on, with an empty cache of the Hub.
FORKED_SCRIPT = (
    BLOCK_SCRIPT
    + """
import huggingface_hub
huggingface_hub.constants.HF_HUB_CACHE = os.environ["HF_HOME"]
"""
    + RUN_SCRIPT
)


@pytest.fixture(params=["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def run_commands(no_network, tmp_path, request):
    """Function that runs commands without a network and requires no attempt."""
    attempts = tmp_path / "attempts"
    environment = {**no_network, "ATTEMPTS": str(attempts)}

    def start(args):
        if request.param == "fresh":
            command = [sys.executable, "-c", RUN_SCRIPT, args]
            return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        script = tmp_path / "forked.py"
        script.write_text(FORKED_SCRIPT)
        with start_processes(script, args, environments=[environment]) as (process,):
            return process.wait()

    def run(*commands):
        result = start(json.dumps([list(map(str, line)) for line in commands]))
        assert result.returncode == 0, result.stderr
        assert not attempts.exists(), attempts.read_text()
        return result.stdout + result.stderr

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
def test_connections_are_blocked(tmp_path, no_network, code):
    environment = {**no_network, "ATTEMPTS": str(tmp_path / "attempts")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert b"there is no network" in result.stderr
    assert (tmp_path / "attempts").read_text()


@pytest.mark.parametrize("tokenizer", ["gpt2", pytest.param("train:300", marks=pytest.mark.slow)])
def test_texts_prepare_check_and_train(tmp_path, run_commands, tokenizer):
    write_jsonl(tmp_path / "in.jsonl", [{"text": f"{n} times {n} is {n * n}."} for n in range(100)])
    store, config = tmp_path / "store", tmp_path / "small.json"
    config.write_text(json.dumps({**BASE_SETTINGS, "model": {"layers": 1, "heads": 1, "width": 8}}))
    options = ["--out", store, "--tokenizer", tokenizer, "--val-fraction", 0.1]
    output = run_commands(
        ["prepare", tmp_path / "in.jsonl", *options],
        ["check", store],
        ["train", "--data", store, "--config-file", config, "--out", tmp_path / "run", *TRAIN_OPTIONS],
    )
    assert "sound" in output


@pytest.mark.slow
def test_conversations_prepare_check_and_finetune_from_folders(tmp_path, run_commands):
    folder = make_byte_level_tokenizer(tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    write_model(tmp_path / "model", vocab_size=600)
    store = tmp_path / "store"
    options = ["--out", store, "--tokenizer", folder, "--val-fraction", 0.1]
    train_options = ["--data", store, "--init", tmp_path / "model", "--out", tmp_path / "run"]
    output = run_commands(
        ["prepare", tmp_path / "in.jsonl", *options],
        ["check", store],
        ["train", *train_options, *TRAIN_OPTIONS],
    )
    assert "plain is used" not in output
    assert "sound" in output
