import copy
import hashlib
import json
import socket
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer

from batchloom import tokens
from batchloom.tokens import resolve_tokenizer, train_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog didn't mind the fox at all.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2), add(10, 20), add(100, 200))\n",
    "In 2024 the river rose 12 metres; in 2025 it rose 13 metres; the towns are the same towns.",
] * 3


@pytest.fixture(scope="session")
def gpt2():
    return resolve_tokenizer("gpt2")


@pytest.fixture(scope="session")
def trained():
    return train_tokenizer(TEXTS, 400)


@pytest.fixture
def tokenizer_json(trained):
    """Small tokenizer.json that a test may change."""
    return copy.deepcopy(trained.state()["tokenizer"])


def make_reference(tokenizer) -> HFTokenizer:
    """Make a HF tokenizer of the same definition that reads control tokens as text."""
    hf = HFTokenizer.from_str(json.dumps(tokenizer.state()["tokenizer"]))
    hf.encode_special_tokens = True
    return hf


def encode_with_reference(hf: HFTokenizer, text: str) -> list[int]:
    return hf.encode(text, add_special_tokens=False).ids


def encode_text(tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0].tolist()


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def resolve_definition(folder: Path, definition: object):
    """Resolve the tokenizer of a tokenizer.json."""
    return resolve_tokenizer(str(write_json(folder / "tokenizer.json", definition)))


@pytest.fixture
def engine_cache(tmp_path, monkeypatch):
    """Folder of comparison results, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchloom" / "engines"


def make_added_token(content: str, number: int, *, is_special: bool = True) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": is_special}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("the network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture(scope="session")
def r50k(gpt2, tmp_path_factory):
    """Published r50k ranks, converted from GPT-2's files by tiktoken."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    merges = Path(tokens.__file__).with_name("gpt2_vocab.bpe")
    encoder = tmp_path_factory.mktemp("gpt2") / "encoder.json"
    encoder.write_text(json.dumps(gpt2.state()["tokenizer"]["model"]["vocab"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        return data_gym_to_mergeable_bpe_ranks(str(merges), str(encoder))


@pytest.fixture(scope="session")
def first_ranks(r50k):
    """First ranks of r50k: a smaller encoding of the same kind."""
    return {token: rank for token, rank in r50k.items() if rank < 2000}


@pytest.fixture(scope="session")
def r50k_file(r50k, tmp_path_factory):
    import base64

    path = tmp_path_factory.mktemp("ranks") / "r50k_base.tiktoken"
    lines = sorted(r50k.items(), key=lambda pair: pair[1])
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in lines))
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("306cd27f03c1a714")
    return path
