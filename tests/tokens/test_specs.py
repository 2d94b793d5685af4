"""Tokenizer specs, and suggestions for wrong ones."""

import os

import numpy as np
import pytest

from batchloom import BatchloomError, TokenizerError
from batchloom.tokens import parse_train_spec, resolve_tokenizer
from processes import run_python

from .conftest import encode_text, write_json


def test_bytes():
    tokenizer = resolve_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_id, tokenizer.bos_id) == (
        "bytes",
        257,
        256,
        None,
    )
    ids, offsets = tokenizer.encode_batch(["Aé", "", "<|endoftext|>"])
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert ids.tolist() == [65, 0xC3, 0xA9, *b"<|endoftext|>"]
    assert offsets.tolist() == [0, 3, 3, 16]
    assert tokenizer.decode([65, 256, 0xC3, 0xA9, 256, 0xC3]) == "A<|endoftext|>é<|endoftext|>\ufffd"
    assert tokenizer.decode(np.array([], np.uint16)) == ""
    assert tokenizer.engine.name == "bytes"


def test_gpt2(gpt2):
    assert (gpt2.name, gpt2.vocab_size, gpt2.end_id, gpt2.bos_id) == ("gpt2", 50257, 50256, None)
    ids, offsets = gpt2.encode_batch(["Hello world", "", "Hello"])
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert ids.tolist() == [15496, 995, 15496]
    assert offsets.tolist() == [0, 2, 2, 3]
    assert gpt2.decode(np.array([15496, 995, 50256], np.uint16)) == "Hello world<|endoftext|>"


def test_gpt2_keeps_its_fingerprint(gpt2):
    """Stores identify their tokenizer by its fingerprint, so it must not change."""
    assert gpt2.fingerprint == "cc71e5c1cdcfc6bc9d95b75e606ace14"
    assert gpt2.vocabulary_hash == "8d45b51d28392544ef17f8a0cdc07aee"
    assert resolve_tokenizer("bytes").fingerprint == "649e8a467eb8b3715105b787d0508da9"


def test_an_empty_batch(gpt2):
    for tokenizer in (gpt2, resolve_tokenizer("bytes")):
        ids, offsets = tokenizer.encode_batch([])
        assert (ids.size, offsets.tolist()) == (0, [0])
        assert ids.dtype == np.uint32


def test_a_spelled_control_token_is_text(gpt2):
    for tokenizer in (gpt2, resolve_tokenizer("bytes")):
        ids = encode_text(tokenizer, "a<|endoftext|>b")
        assert tokenizer.end_id not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_text_that_is_not_unicode_is_refused(gpt2):
    for tokenizer in (gpt2, resolve_tokenizer("bytes")):
        with pytest.raises(TokenizerError, match=r"text 1 of the batch is not Unicode: at character 2 .* U\+D800"):
            tokenizer.encode_batch(["fine", "ab\ud800c"])


@pytest.mark.parametrize("wrong", [-1, 60000])
def test_an_id_outside_the_vocabulary_is_refused(gpt2, wrong):
    for tokenizer in (gpt2, resolve_tokenizer("bytes")):
        with pytest.raises(
            TokenizerError, match=f"id {wrong} is not an id of tokenizer '{tokenizer.name}', whose ids are"
        ):
            tokenizer.decode([1, wrong])


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("gtp2", "did you mean 'gpt2'"),
        ("gpt-2", "did you mean 'gpt2'"),
        ("byte", "did you mean 'bytes'"),
        ("cl100k_base", "did you mean 'tiktoken:cl100k_base'"),
        ("train", "did you mean 'train:8192'"),
        ("", "give bytes, gpt2, train:8192"),
        ("bert-base-uncased", "a Hub id such as org/name"),
        ("a/b/c", "the path of a tokenizer.json"),
        ("tiktoken:cl100k", "did you mean 'cl100k_base'"),
        ("tiktoken:", "the encodings are gpt2, r50k_base"),
    ],
)
def test_an_unknown_spec_gets_a_suggestion(spec, hint):
    with pytest.raises(TokenizerError) as caught:
        resolve_tokenizer(spec)
    assert hint in str(caught.value)


def test_train_is_for_prepare():
    assert parse_train_spec("train:8192") == 8192
    assert parse_train_spec("gpt2") is None
    assert parse_train_spec("train") is None
    with pytest.raises(TokenizerError, match="learned from the input it is for"):
        resolve_tokenizer("train:4096")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("train:8k", "'8k' is not a vocabulary size; write it in digits, such as train:8192"),
        ("train:", "'' is not a vocabulary size"),
        ("train:-5", "'-5' is not a vocabulary size"),
        ("train:1_000", "'1_000' is not a vocabulary size"),
        ("train:٣٠٠", "is not a vocabulary size"),
        ("train:257", "258 is the smallest; give train:258 or more, or bytes"),
        ("train:99999999", "the largest vocabulary size is 1048576"),
    ],
)
def test_a_wrong_size_is_refused_with_the_remedy(spec, sentence):
    with pytest.raises(TokenizerError) as caught:
        parse_train_spec(spec)
    assert sentence in str(caught.value)


def test_the_end_token_can_be_chosen(gpt2):
    assert resolve_tokenizer("gpt2", end_token="<|endoftext|>").fingerprint == gpt2.fingerprint
    with pytest.raises(TokenizerError, match=r"no token '<\|end\|>' .* did you mean '<\|endoftext\|>'"):
        resolve_tokenizer("gpt2", end_token="<|end|>")
    with pytest.raises(TokenizerError, match="bytes has one control token"):
        resolve_tokenizer("bytes", end_token="</s>")


def test_names_mean_tokenizers_and_dots_mean_paths(tmp_path, monkeypatch, tokenizer_json, gpt2):
    write_json(tmp_path / "gpt2" / "tokenizer.json", tokenizer_json)
    monkeypatch.chdir(tmp_path)
    assert resolve_tokenizer("gpt2").fingerprint == gpt2.fingerprint
    assert resolve_tokenizer("./gpt2").vocab_size == max(tokenizer_json["model"]["vocab"].values()) + 2


def test_paths_never_reach_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script = """
import sys
from batchloom import TokenizerError
from batchloom.tokens import resolve_tokenizer
for spec in sys.argv[1:]:
    try:
        resolve_tokenizer(spec)
    except TokenizerError as error:
        assert "there is no file" in str(error), error
        print(spec)
"""
    specs = ["./no/such", f"{tmp_path}/such", "no_such.json", "~/no_such_folder_here", "~nobody_here/x", "../x"]
    completed = run_python(script, *specs, missing=["huggingface_hub"])
    assert completed.stdout.splitlines() == specs, completed.stderr


def test_a_path_the_system_refuses_is_one_sentence():
    with pytest.raises(
        TokenizerError,
        match=r"cannot be read: the path or a name in it is too long; choose a shorter one",
    ):
        resolve_tokenizer("./" + "x" * 300)


def test_resolving_and_decoding_load_no_more_than_they_need():
    script = """
import json, sys
from batchloom.tokens import resolve_tokenizer, restore_tokenizer
heavy = {"tokenizers", "fastokens", "splintr", "huggingface_hub", "tiktoken", "torch"}
state = resolve_tokenizer("gpt2").state()
print(sorted(heavy & set(sys.modules)))
assert restore_tokenizer(json.loads(json.dumps(state))).decode([15496, 995]) == "Hello world"
print(sorted(heavy & set(sys.modules)))
"""
    completed = run_python(script)
    assert completed.stdout.splitlines() == ["[]", "['tokenizers']"], completed.stderr


def test_every_refusal_is_a_batchloom_error():
    for spec in ("nope", "train:x", "./nope", "tiktoken:nope"):
        with pytest.raises(BatchloomError):
            resolve_tokenizer(spec)


@pytest.mark.parametrize("name", ["tokenizer.json", "cl100k_base.tiktoken"])
def test_only_regular_files_of_a_sane_size_are_read(tmp_path, name):
    path = tmp_path / name
    spec = f"tiktoken:{path}" if path.suffix == ".tiktoken" else str(path)
    os.mkfifo(path)
    with pytest.raises(TokenizerError, match="a pipe or a device.*; give the path|a pipe or a device"):
        resolve_tokenizer(spec)
    path.unlink()
    path.touch()
    os.truncate(path, 100 << 30)
    with pytest.raises(TokenizerError, match="has 107,374,182,400 bytes, and at most"):
        resolve_tokenizer(spec)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(TokenizerError, match="a pipe or a device"):
        resolve_tokenizer(spec)
