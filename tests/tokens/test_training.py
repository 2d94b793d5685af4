"""Training of BPE tokenizers from texts."""

import json
import os
import subprocess
import sys

import pytest

from batchloom import TokenizerError
from batchloom.tokens import restore_tokenizer, train_tokenizer

from .conftest import TEXTS, encode_text


def test_sizes_and_ids(trained):
    assert (trained.name, trained.end_id, trained.bos_id) == (
        "train:400",
        trained.vocab_size - 1,
        None,
    )
    assert 257 < trained.vocab_size <= 400
    assert trained.decode([trained.end_id]) == "<|endoftext|>"
    assert len(encode_text(trained, TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_size_that_the_text_reaches_is_exact():
    assert train_tokenizer(TEXTS, 300).vocab_size == 300
    assert train_tokenizer(TEXTS, 258).vocab_size == 258


def test_too_little_text_gives_a_smaller_vocabulary():
    tokenizer = train_tokenizer(["ab ab"], 5000)
    assert tokenizer.name == "train:5000"
    assert tokenizer.vocab_size == 258
    assert train_tokenizer([], 5000).vocab_size == 257
    assert tokenizer.decode(encode_text(tokenizer, "żółw\x00")) == "żółw\x00"


def test_the_order_of_texts_and_how_they_are_given_do_not_matter(trained):
    assert train_tokenizer(iter(reversed(TEXTS)), 400).fingerprint == trained.fingerprint
    assert train_tokenizer(TEXTS[:-1], 400).fingerprint != trained.fingerprint


@pytest.mark.parametrize(("threads", "seed"), [pytest.param("1", "1", marks=pytest.mark.slow), ("4", "2")])
def test_another_process_learns_the_same(trained, threads, seed):
    script = (
        "import json, sys; from batchloom.tokens import train_tokenizer;"
        "print(train_tokenizer(json.loads(sys.stdin.read()), 400).fingerprint)"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
    completed = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert completed.stdout.strip() == trained.fingerprint


def test_spelled_control_tokens_are_learned_as_text():
    tokenizer = train_tokenizer(["a<|endoftext|>b "] * 50, 280)
    ids = encode_text(tokenizer, "a<|endoftext|>b")
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_an_error_of_the_texts_is_passed_on():
    def texts():
        yield "one"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train_tokenizer(texts(), 300)
    with pytest.raises(TokenizerError, match="not Unicode"):
        train_tokenizer(["a", "\udcff"], 300)
    with pytest.raises(TokenizerError, match="258 is the smallest"):
        train_tokenizer(["a"], 10)


def test_a_trained_tokenizer_round_trips_through_its_state(trained):
    restored = restore_tokenizer(json.loads(json.dumps(trained.state())))
    assert restored.fingerprint == trained.fingerprint
    assert encode_text(restored, TEXTS[1]) == encode_text(trained, TEXTS[1])
