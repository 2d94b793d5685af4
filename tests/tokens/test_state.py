"""State of a tokenizer in a store: complete, plain and checked."""

import copy
import json
import os
import subprocess
import sys

import msgspec
import pytest

from batchloom import TokenizerError
from batchloom.tokens import UnknownTokenizer, encode_state, resolve_tokenizer, restore_tokenizer

from .conftest import TEXTS, encode_text


@pytest.mark.parametrize("spec", ["bytes", pytest.param("gpt2", marks=pytest.mark.slow), "trained"])
def test_round_trip(spec, request):
    tokenizer = resolve_tokenizer(spec) if spec == "bytes" else request.getfixturevalue(spec)
    state = tokenizer.state()
    assert state["state_version"] == 1
    restored = restore_tokenizer(json.loads(json.dumps(state)))
    for field in (
        "name",
        "vocab_size",
        "end_id",
        "bos_id",
        "fingerprint",
        "vocabulary_hash",
        "engine",
    ):
        assert getattr(restored, field) == getattr(tokenizer, field)
    assert encode_text(restored, TEXTS[0]) == encode_text(tokenizer, TEXTS[0])
    assert restored.decode(encode_text(restored, "é<|endoftext|>")) == "é<|endoftext|>"
    assert restored.state() == state
    assert encode_state(restored) == msgspec.json.encode(state)


def test_a_state_holds_no_paths_and_no_engine(tmp_path, trained):
    (tmp_path / "secret_place").mkdir()
    (tmp_path / "secret_place" / "tokenizer.json").write_text(json.dumps(trained.state()["tokenizer"]))
    state_json = json.dumps(resolve_tokenizer(str(tmp_path / "secret_place" / "tokenizer.json")).state())
    assert "secret_place" not in state_json
    assert "fastokens" not in state_json


def test_a_state_suffices_without_network_and_packages(tmp_path, trained):
    """The state works without network, home folder and optional packages."""
    (tmp_path / "state.json").write_text(json.dumps(trained.state()))
    script = (
        "import json, socket, sys; socket.socket.connect = None;"
        "sys.modules |= dict.fromkeys(('huggingface_hub', 'tiktoken', 'transformers'));"
        "from batchloom.tokens import restore_tokenizer;"
        "t = restore_tokenizer(json.load(open('state.json')));"
        "print(t.decode(t.encode_batch(['the dog'])[0]), t.fingerprint)"
    )
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    completed = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert completed.stdout.strip() == f"the dog {trained.fingerprint}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"state_version": 2}, "has version 2, and this batchloom reads version 1"),
        ({"state_version": "1"}, "has version '1'"),
        ({"kind": "pickle"}, "unknown kind 'pickle'"),
        ({"kind": None}, "unknown kind None"),
        ({"fingerprint": "0" * 32}, "was changed: its fingerprint is"),
        ({"fingerprint": 5}, "Expected `str`, got `int` - at `$.fingerprint`"),
        ({"end_id": 3}, "was changed"),
        ({"end_id": 10**6}, "is not in its vocabulary"),
        ({"end_id": True}, "Expected `int`, got `bool` - at `$.end_id`"),
        ({"bos_id": "x"}, "got `str` - at `$.bos_id`"),
        ({"name": None}, "got `null` - at `$.name`"),
        ({"nmae": "x"}, "unknown field `nmae`"),
        ({"tokenizer": []}, "got `array` - at `$.tokenizer`"),
        ({"tokenizer": {}}, "has no model with a vocabulary"),
    ],
)
def test_an_inconsistent_state_is_refused(trained, change, sentence):
    with pytest.raises(TokenizerError) as caught:
        restore_tokenizer(trained.state() | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("state", [{}, [], None, "x", {"kind": "bytes"}])
def test_invalid_states_are_refused(state):
    with pytest.raises(TokenizerError, match="not the state of a tokenizer"):
        restore_tokenizer(state)


def test_a_missing_field_is_reported(trained):
    state = trained.state()
    del state["name"]
    with pytest.raises(TokenizerError, match="state is damaged: .*missing required field `name`; restore the file"):
        restore_tokenizer(state)


def test_an_inconsistent_bytes_state_is_refused():
    state = resolve_tokenizer("bytes").state()
    with pytest.raises(TokenizerError, match="was changed"):
        restore_tokenizer(state | {"fingerprint": "x"})


def test_unknown_tokenizers_have_a_state():
    tokenizer = UnknownTokenizer(300, 256)
    state = json.loads(json.dumps(tokenizer.state()))
    restored = restore_tokenizer(state)
    assert (restored.fingerprint, restored.state()) == (tokenizer.fingerprint, state)
    assert restored.decode([7, 256]) == "7 256"
    with pytest.raises(TokenizerError, match="id 300 is not an id of tokenizer 'none'"):
        restored.decode([300])
    with pytest.raises(TokenizerError, match="2 texts cannot be encoded"):
        restored.encode_batch(["a", "b"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": 301}, "was changed"),
        ({"end_id": 300}, "end token 300 is not in a vocabulary of 300 ids"),
        ({"end_id": -1}, "end token -1 is not"),
        ({"end_id": True}, "got `bool` - at"),
        ({"vocab_size": "300"}, "got `str` - at"),
        ({"vocab_size": None}, "got `null` - at"),
    ],
)
def test_an_inconsistent_state_without_a_tokenizer_is_refused(change, sentence):
    with pytest.raises(TokenizerError, match=sentence):
        restore_tokenizer(UnknownTokenizer(300, 256).state() | change)


@pytest.mark.parametrize("part", ["vocab", "merges", "normalizer", "added", "dropout", "surrogate", "deep"])
def test_a_changed_tokenizer_is_refused(trained, part):
    state = copy.deepcopy(trained.state())
    tokenizer_json = state["tokenizer"]
    if part == "vocab":
        tokenizer_json["model"]["vocab"]["new"] = trained.vocab_size
    elif part == "merges":
        tokenizer_json["model"]["merges"].pop()
    elif part == "normalizer":
        tokenizer_json["normalizer"] = {"type": "Lowercase"}
    elif part == "added":
        tokenizer_json["added_tokens"][0]["special"] = False
        tokenizer_json["added_tokens"].append({"id": trained.vocab_size, "content": "the", "special": False})
    elif part == "dropout":
        tokenizer_json["model"]["dropout"] = 0.5
    elif part == "surrogate":
        tokenizer_json["version"] = "\ud800"
    else:
        nested: list[object] = []
        for _ in range(500):
            nested = [nested]
        tokenizer_json["version"] = nested
    with pytest.raises(TokenizerError):
        restore_tokenizer(state)
