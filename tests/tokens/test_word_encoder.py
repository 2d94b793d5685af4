"""Encoding word by word: ids of Unigram and WordPiece tokenizers, and where it is not used."""

import json
from dataclasses import replace
from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from batchloom import TokenizerError
from batchloom.tokens import resolve_tokenizer, verify_engine
from tiers import examples

from .conftest import make_added_token, write_json

METASPACE = pre_tokenizers.Metaspace(prepend_scheme="always")
RUNS = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
STEPS = {
    "T5": (normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), RUNS]), METASPACE),
    "T5, first": (normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first")),
    "XLM-R": (normalizers.NFKC(), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), METASPACE])),
    "BERT": (normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()),
    "BERT, cased": (normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()),
}
# Steps with which the ids of a word depend on its neighbours.
OTHER_STEPS = {
    "no mark": (normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="never")),
    "mark of the first": (
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]),
    ),
    "no split": (normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "spaces replaced": (normalizers.Replace("x", " "), METASPACE),
    "punctuation alone": (normalizers.NFKC(), pre_tokenizers.Punctuation()),
    "no pre-tokenizer": (normalizers.NFKC(), None),
}
TEXTS = [str(topics[name]) for name in sorted(topics)[::9]]


def make_tokenizer(folder, steps, added=()):
    normalizer, pre_tokenizer = steps
    is_bert = isinstance(normalizer, normalizers.BertNormalizer)
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>") if is_bert else models.Unigram())
    trained.normalizer = normalizer
    if pre_tokenizer is not None:
        trained.pre_tokenizer = pre_tokenizer
    common = {"vocab_size": 600, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    trainer = trainers.WordPieceTrainer(**common) if is_bert else trainers.UnigramTrainer(unk_token="<unk>", **common)
    trained.train_from_iterator([line for text in TEXTS for line in text.split()], trainer)
    definition = json.loads(trained.to_str())
    definition["added_tokens"] += added
    return resolve_tokenizer(str(write_json(folder / "tokenizer.json", definition)))


@pytest.fixture(scope="module", params=STEPS)
def tokenizer(request, tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("words"), STEPS[request.param])


def assert_exact(tokenizer, texts):
    ids, offsets = tokenizer.encode_batch(texts)
    exact_ids, exact_offsets = tokenizer.encode_exactly(texts)
    np.testing.assert_array_equal(ids, exact_ids)
    np.testing.assert_array_equal(offsets, exact_offsets)


def test_ids_are_those_of_complete_texts(tokenizer):
    assert tokenizer.engine.by_word
    assert verify_engine(tokenizer, TEXTS) is tokenizer
    assert_exact(tokenizer, [*TEXTS, "", *TEXTS, " ", "</s> <unk>"])


FRAGMENTS = [
    *" \n\t\r\x0b\x00\x1c\x7f\x85\xa0\u2003\u3000\u200b\u00ad\u2581aB1.,-'\"()<",
    *("\u0301", "\u0e33", "\u00b4", "\u203e", "\ufb01", "\u0600", "\u0d4e", "\u200d", "\U0001f600", "\ufffd", "\u1e9b"),
    *(
        "word",
        "Word,",
        "can't",
        "\xe9",
        "\u4e2d",
        "\ud55c",
        "\u0643",
        "\u05d0",
        "\u2026",
        "\u201c",
        "</s>",
        "  ",
        "\r\n",
    ),
]


@settings(max_examples=examples(300))
@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join), max_size=3))
def test_any_text_has_the_same_ids(tokenizer, texts):
    assert_exact(tokenizer, texts)


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_words_that_depend_on_their_neighbours(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path, OTHER_STEPS[name])
    assert tokenizer.engine.name == "tokenizers"
    assert not tokenizer.engine.by_word


def test_added_tokens_that_match_in_texts(tmp_path):
    tokenizer = make_tokenizer(tmp_path, STEPS["T5"], [make_added_token("<x>", 600, is_special=False)])
    assert not tokenizer.engine.by_word


def test_a_difference_falls_back_visibly(tmp_path):
    tokenizer = make_tokenizer(tmp_path, OTHER_STEPS["no mark"])
    by_word = tokenizer.with_engine(replace(tokenizer.engine, by_word=True))
    verified = verify_engine(by_word, TEXTS)
    assert not verified.engine.by_word
    assert "gives different ids for texts than for words: '" in verified.engine.note
    assert "the slower tokenizers is used" in verified.engine.note


def test_texts_of_new_words_and_of_known_ones(tokenizer):
    """After some millions of characters, texts of new words are encoded as a whole."""
    known = "a common word, and another one. " * 200
    for number in range(80):
        assert_exact(tokenizer, [f"{known} n{number} {known}" * 6])
    assert_exact(tokenizer, [" ".join(f"n{number}x{number}" for number in range(3000)), known])


def test_errors_name_the_text(tokenizer):
    with pytest.raises(TokenizerError, match="text 1 of the batch is not Unicode"):
        tokenizer.encode_batch(["a b", "a \udc80"])
