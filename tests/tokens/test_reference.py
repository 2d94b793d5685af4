"""Agreement of ids with HF tokenizers, and decoding, for any text."""

import base64
import contextlib
import random
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from batchloom import TokenizerError
from batchloom.tokens import resolve_tokenizer
from batchloom.tokens.local_tokenizers import TokenizerHints, make_json_tokenizer
from tiers import examples

from .conftest import encode_text, encode_with_reference, make_added_token, make_reference

# Any text without surrogates, and text of fragments that are hard for tokenizers.
FRAGMENTS = st.sampled_from(
    [
        *("<|endoftext|>", "'s", "'LL", "'\u017f", "123", "½", "a", "É", "e\u0301"),
        *(" ", "  ", "\n", "\r\n", "\t", "\xa0", "\u3000", "\u180e", "\u200d", "\x00"),
        *("中文", "한", "שלום", "\U0001f469\U0001f3fd\u200d\U0001f680", "\ue000", "\u0378"),
    ]
)
TEXT = st.one_of(st.text(max_size=60), st.lists(FRAGMENTS, max_size=20).map("".join))


@pytest.fixture(scope="module")
def tokenizers_with_references(gpt2, trained):
    return [(tokenizer, make_reference(tokenizer)) for tokenizer in (gpt2, trained)]


@settings(max_examples=examples(300))
@given(text=TEXT)
@example(text="a" * 5000)
@example(text=" " * 5000 + "\n" * 500)
@example(text="".join(map(chr, range(0x300))))
def test_ids_are_the_reference_s(tokenizers_with_references, text):
    for tokenizer, reference in tokenizers_with_references:
        ids = encode_text(tokenizer, text)
        assert ids == encode_with_reference(reference, text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        assert tokenizer.end_id not in ids


@settings(max_examples=examples(60))
@given(texts=st.lists(TEXT, max_size=8))
def test_a_batch_gives_the_ids_of_its_texts(gpt2, trained, texts):
    for tokenizer in (gpt2, trained, resolve_tokenizer("bytes")):
        ids, offsets = tokenizer.encode_batch(texts)
        assert offsets[0] == 0
        assert offsets[-1] == ids.size
        ids_by_text = [ids[a:b].tolist() for a, b in pairwise(offsets)]
        assert ids_by_text == [encode_text(tokenizer, text) for text in texts]


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_every_code_point_round_trips(gpt2, stride):
    points = [chr(p) for p in (*range(0x3100), *range(0x3100, 0x110000, stride)) if not 0xD800 <= p < 0xE000]
    texts = ["".join(points[i : i + 4096]) for i in range(0, len(points), 4096)]
    ids, offsets = gpt2.encode_batch(texts)
    assert [gpt2.decode(ids[a:b]) for a, b in pairwise(offsets)] == texts
    assert ids.max() < gpt2.vocab_size
    assert np.array_equal(gpt2.encode_batch(texts)[0], ids)


BYTE_FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        {"type": "BPEDecoder", "suffix": "b"},
        BYTE_FALLBACK,
    ],
)
def test_any_ids_are_decoded_as_by_the_reference(decoder):
    """Compare byte pieces, an added token and an id without a token."""
    tokens = ["\u2581a", "a", "b", "\u010a", "<0xE2>", "<0x82>", "<0xAC>", "<eos>", "", "\u00e2", "<tool>"]
    vocab = {token: number for number, token in enumerate(tokens) if token}
    definition = {
        "version": "1.0",
        "added_tokens": [make_added_token("<eos>", 7), make_added_token("<tool>", 10, is_special=False)],
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": decoder is BYTE_FALLBACK},
    }
    tokenizer = make_json_tokenizer("pieces", definition, TokenizerHints(), "<eos>")
    reference = make_reference(tokenizer)
    rng = random.Random(1)
    for _ in range(300):
        ids = rng.choices(range(tokenizer.vocab_size), k=rng.randrange(12))
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "[UNK]"},
        {"type": "Unigram", "vocab": [["a", -1.0], ["<eos>", -2.0]], "unk_id": None},
        {"type": "BPE", "vocab": {"a": 0, "<eos>": 1}, "merges": [], "unk_token": "[UNK]"},
    ],
    ids=lambda model: model["type"],
)
def test_text_that_a_vocabulary_cannot_encode_is_reported(model):
    raw = {"model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    tokenizer = make_json_tokenizer("mine", raw, TokenizerHints(), "<eos>")
    assert tokenizer.encode_batch(["a a"])[0].tolist() == [0, 0]
    with pytest.raises(
        TokenizerError,
        match=r"tokenizer 'mine' cannot encode 'b' .* add one \(unk_token, unk_id\) .* or choose another",
    ):
        tokenizer.encode_batch(["a", "a " * 1000 + "b", "a"])


def make_gpt2(**steps):
    return make_json_tokenizer(
        "mine", {**resolve_tokenizer("gpt2").state()["tokenizer"], **steps}, TokenizerHints(), "<|endoftext|>"
    )


def split_at(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, bytes_only]}


def test_a_pattern_that_takes_too_many_steps_names_the_text():
    tokenizer = make_gpt2(pre_tokenizer=split_at(r"(x+x+)+y|[\s\S]"))
    assert tokenizer.encode_batch(["xxxx"])[0].size
    message = (
        r"tokenizer 'mine' cannot encode 'x{40}' .* pattern of its normalizer or pre_tokenizer takes too many steps"
    )
    with pytest.raises(TokenizerError, match=message):
        tokenizer.encode_batch(["a b", "x" * 60])
    with pytest.raises(TokenizerError, match=message):
        tokenizer.encode_placed("x" * 60)


def test_a_text_that_only_the_fast_engine_cannot_split_has_the_same_ids():
    tokenizer = make_gpt2(pre_tokenizer=split_at(r"(?:ab?)+c|[\s\S]"))
    text = "ab" * 100_000 + "c"
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode_exactly([text])[0].tolist()


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 20)] * 8}},
        {"normalizer": replace({"Regex": ""}, "a" * 40)},
        {"normalizer": replace({"String": ""}, "a" * 40)},
        {"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "aa")] * 30}},
        {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(bytes(4) + b"a" * 9999).decode(),
            }
        },
    ],
)
def test_steps_that_make_texts_much_longer_are_refused(steps):
    with pytest.raises(TokenizerError, match="could make a text .* times as long"):
        make_gpt2(**steps)


def chain(*steps):
    return {"type": "Sequence", "normalizers": steps}


SPLIT_LIGATURES = [replace({"String": chr(0xA1 + number)}, "abc" * 4) for number in range(40)]


@pytest.mark.parametrize(
    ("normalizer", "is_refused"),
    [
        (chain(*SPLIT_LIGATURES), False),
        (chain(*SPLIT_LIGATURES, replace({"String": "c"}, "defg")), False),
        (chain(*SPLIT_LIGATURES, replace({"String": "bc"}, "d" * 12)), True),
        (chain(*SPLIT_LIGATURES, replace({"Regex": "[a-c]"}, "defgh")), True),
        (chain(replace({"String": "x"}, "A" * 12), {"type": "Lowercase"}, replace({"String": "a"}, "yyy")), True),
        (chain({"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")), False),
        (chain({"type": "Prepend", "prepend": "x" * 5}, replace({"String": "x"}, "y" * 9)), True),
        ({"type": "Prepend", "prepend": "x" * 40}, True),
    ],
)
def test_only_steps_that_replace_what_others_write_multiply(normalizer, is_refused):
    with pytest.raises(TokenizerError, match="times as long") if is_refused else contextlib.nullcontext():
        make_gpt2(normalizer=normalizer)


def test_a_definition_at_which_an_engine_panics_is_refused():
    steps = {"type": "Precompiled", "precompiled_charsmap": ""}
    with pytest.raises(TokenizerError, match=r"cannot read its tokenizer.json \(.*precompiled_charsmap"):
        make_gpt2(normalizer=steps).encode_batch(["a"])


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": 5},
        {"type": "Precompiled", "precompiled_charsmap": "\xe9"},
        chain(*[replace({"Regex": "a"}, "b" * 9)] * 400),
    ],
)
def test_a_definition_that_cannot_be_bounded_is_refused(normalizer):
    with pytest.raises(TokenizerError):
        make_gpt2(normalizer=normalizer).encode_batch(["a"])
