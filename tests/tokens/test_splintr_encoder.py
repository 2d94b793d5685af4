"""Encoding with splintr: ids of Unigram and WordPiece tokenizers, and where it is not used."""

import functools
import importlib.metadata
import json
import os
import re
import unicodedata
from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from batchloom import TokenizerError
from batchloom.tokens import verify_engine
from tiers import examples

from .conftest import encode_text, make_added_token, resolve_definition

pytestmark = pytest.mark.usefixtures("engine_cache")

METASPACE = pre_tokenizers.Metaspace(prepend_scheme="always")
WORDS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), METASPACE])
RUNS = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
BERT = pre_tokenizers.BertPreTokenizer()
STEPS = {
    "T5": (normalizers.NFKC(), WORDS),
    "T5, one step": (normalizers.Sequence([normalizers.Strip(left=False), RUNS]), METASPACE),
    "SentencePiece": (normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), RUNS]), METASPACE),
    "ALBERT": (normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]), WORDS),
    "no mark": (normalizers.NFD(), pre_tokenizers.Metaspace(prepend_scheme="never")),
    "no normalizer": (None, METASPACE),
    "BERT": (normalizers.BertNormalizer(lowercase=True), BERT),
    "BERT, cased": (normalizers.BertNormalizer(lowercase=False), BERT),
    "BERT, as it is": (normalizers.BertNormalizer(False, False, True, False), BERT),
}
# splintr ignores some of these steps, and reads others differently.
OTHER_STEPS = {
    "mark of the first": (normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first")),
    "no split": (normalizers.NFC(), pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "punctuation": (normalizers.NFKC(), pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), METASPACE])),
    "no pre-tokenizer": (normalizers.NFKC(), None),
    "BERT's normalizer": (normalizers.BertNormalizer(), pre_tokenizers.WhitespaceSplit()),
    "two normalizers": (normalizers.Sequence([normalizers.NFC(), normalizers.BertNormalizer()]), BERT),
}
TEXTS = [str(topics[name]) for name in sorted(topics)[::9]]


def make_definition(steps):
    """Return the tokenizer.json of a small Unigram, or of a WordPiece for BERT's steps."""
    definition = json.loads(train(is_bert="Bert" in str(steps)))
    blank = tokenizers.Tokenizer(models.BPE())
    blank.normalizer, blank.pre_tokenizer = steps
    blank_definition = json.loads(blank.to_str())
    return definition | {name: blank_definition[name] for name in ("normalizer", "pre_tokenizer")}


@functools.cache
def train(*, is_bert):
    """Train a model with T5's or BERT's steps; the tests replace the steps."""
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>") if is_bert else models.Unigram())
    trained.normalizer, trained.pre_tokenizer = STEPS["BERT" if is_bert else "T5"]
    common = {"vocab_size": 600, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    trainer = trainers.WordPieceTrainer(**common) if is_bert else trainers.UnigramTrainer(unk_token="<unk>", **common)
    trained.train_from_iterator([word for text in TEXTS[:4] for word in text.split()], trainer)
    return trained.to_str()


@pytest.fixture(scope="module", params=STEPS)
def tokenizer(request, tmp_path_factory):
    return resolve_definition(tmp_path_factory.mktemp("splintr"), make_definition(STEPS[request.param]))


@pytest.fixture
def t5():
    return make_definition(STEPS["T5"])


def assert_exact(tokenizer, texts):
    ids, offsets = tokenizer.encode_batch(texts)
    exact_ids, exact_offsets = tokenizer.encode_exactly(texts)
    np.testing.assert_array_equal(ids, exact_ids)
    np.testing.assert_array_equal(offsets, exact_offsets)


def test_ids_are_those_of_tokenizers(tokenizer):
    assert tokenizer.engine.name == "splintr-rs"
    assert tokenizer.engine.version == importlib.metadata.version("splintr-rs")
    assert_exact(tokenizer, [*TEXTS, "", *TEXTS, " ", "</s> <unk>"])
    assert_exact(tokenizer, [])


FAST = ("ALBERT", "BERT")


@pytest.mark.parametrize(
    "tokenizer", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STEPS], indirect=True
)
def test_verification_finds_no_difference(tokenizer):
    assert verify_engine(tokenizer, TEXTS) is tokenizer


FRAGMENTS = [
    *" \n\t\r\x0b\x00\x1c\x7f\x85\xa0\u1680\u2003\u205f\u3000\u200b\u00ad\u2581\ufeff\ufffd\uffffaB1.,-'\"()<",
    *("  ", "\r\n", "\u0301", "\u0e33", "\u00b4", "\u203e", "\ufb01", "\u0600", "\u0903", "\u200d", "\U0001f600"),
    *("word", "Word,", "can't", "\xe9", "\u1e9b", "\u0130", "\u4e2d", "\ud55c", "\u0643", "\u05d0", "\u2026", "\u201c"),
    *("</s>", "<unk>", "\uffff0\uffff", "\uffff1\uffff", "<0x41>", "\u0378", "\U0010ffff", "\u0488", "\u061d"),
]


@settings(max_examples=examples(300))
@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS) | st.characters(), max_size=20).map("".join), max_size=3))
def test_any_text_has_the_same_ids(tokenizer, texts):
    assert_exact(tokenizer, [text.encode(errors="ignore").decode() for text in texts])


@functools.cache
def list_characters():
    """Return the assigned characters, and every 64th of the others, which have the same properties."""
    categories = {character: unicodedata.category(character) for character in map(chr, range(0x110000))}
    return [
        character
        for character, category in categories.items()
        if category != "Cs" and (category not in ("Cn", "Co") or ord(character) % 64 == 0)
    ]


@pytest.mark.slow
def test_all_characters(tokenizer):
    """Every character, alone, between letters and between spaces."""
    characters = list_characters()
    for start in range(0, len(characters), 1 << 16):
        assert_exact(tokenizer, [f"a{c}b {c} {c}A{c}" for c in characters[start : start + (1 << 16)]])


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_other_steps(name, tmp_path):
    tokenizer = resolve_definition(tmp_path, make_definition(OTHER_STEPS[name]))
    assert tokenizer.engine.name == "tokenizers"
    assert "does not support it (its steps are not those of T5, XLM-R or BERT)" in tokenizer.engine.note


def test_added_tokens_that_match_in_texts(tmp_path, t5):
    t5["added_tokens"].append(make_added_token("<x>", len(t5["model"]["vocab"]), is_special=False))
    assert "it has added tokens that match in texts" in resolve_definition(tmp_path, t5).engine.note


def test_a_text_without_ids_is_an_error(tmp_path, t5):
    """splintr would leave its characters out."""
    t5["model"]["unk_id"] = None
    tokenizer = resolve_definition(tmp_path, t5)
    assert "it is no Unigram or WordPiece with an unknown token" in tokenizer.engine.note
    with pytest.raises(TokenizerError, match="cannot encode '\u4e2d'"):
        tokenizer.encode_batch(["a \u4e2d"])


@pytest.mark.parametrize(("count", "byte_fallback"), [(256, True), (256, False), (255, True)])
def test_bytes_of_unknown_characters(count, byte_fallback, tmp_path, t5):
    """splintr recognizes byte tokens by their names alone."""
    t5["model"]["vocab"] += [[f"<0x{byte:02X}>", -3.0] for byte in range(count)]
    t5["model"]["byte_fallback"] = byte_fallback
    tokenizer = resolve_definition(tmp_path, t5)
    is_fast = (count, byte_fallback) == (256, True)
    assert (tokenizer.engine.name == "splintr-rs") == is_fast
    assert is_fast or "its unknown or byte tokens are not the usual ones" in tokenizer.engine.note
    assert_exact(tokenizer, ["\u4e2d a\u4e2d <0x41>"])
    assert (len(encode_text(tokenizer, "a\u4e2d")) == 4) == byte_fallback


def test_an_unknown_token_of_another_name(tmp_path, t5):
    t5["model"]["vocab"][0][0] = t5["added_tokens"][0]["content"] = "[UNK]"
    tokenizer = resolve_definition(tmp_path, t5)
    assert tokenizer.engine.name == "splintr-rs"
    assert_exact(tokenizer, ["[UNK]\u4e2d", "<unk>\u4e2d", "\u4e2d\u6587 a"])
    assert encode_text(tokenizer, "a\u4e2d\u6587")[-1] == 0


def test_a_difference_falls_back_visibly(tmp_path, monkeypatch):
    monkeypatch.setattr("batchloom.tokens.splintr_encoder._NORMALIZER_CHARACTERS", {})
    tokenizer = resolve_definition(tmp_path, make_definition(STEPS["ALBERT"]))
    assert tokenizer.engine.name == "splintr-rs"
    verified = verify_engine(tokenizer, ["\u0939\u093f"])
    assert verified.engine.name == "tokenizers"
    assert re.match(r"splintr-rs [\d.]+ and tokenizers [\d.]+ give different ids for ", verified.engine.note)
    assert verified.engine.note.endswith("the slower tokenizers is used")


def test_control_tokens_are_parsed(tmp_path, t5):
    tokenizer = resolve_definition(tmp_path, t5)
    ids = tokenizer.encode_batch(["a</s>"], control=True)[0].tolist()
    assert ids[-1] == tokenizer.end_id
    assert tokenizer.end_id not in encode_text(tokenizer, "a</s>")


def test_a_forked_process_encodes(tmp_path, t5):
    tokenizer = resolve_definition(tmp_path, t5)
    expected = tokenizer.encode_batch(TEXTS)[0]
    child = os.fork()
    if child == 0:
        os._exit(int(not np.array_equal(tokenizer.encode_batch(TEXTS)[0], expected)))
    assert os.waitpid(child, 0)[1] == 0


def test_errors_name_the_text(tokenizer):
    with pytest.raises(TokenizerError, match="text 1 of the batch is not Unicode"):
        tokenizer.encode_batch(["a b", "a \udc80"])
