"""BPE tokenizers with a Metaspace step that does not split, as transformers saves those of Llama and Mistral."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from batchloom.tokens import verify_control_tokens, verify_engine
from tiers import examples

from .conftest import TEXTS, make_added_token, resolve_definition

pytestmark = pytest.mark.usefixtures("engine_cache")

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
STEPS = {
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "never": (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "another mark": (None, pre_tokenizers.Metaspace(replacement="]", split=False)),
    "after a normalizer": (normalizers.NFC(), pre_tokenizers.Metaspace(split=False)),
}
FRAGMENTS = [*" \n\t]^\u2581aB1.,'\xe9\u4e2d\u0301\U0001f600", "  ", "word", "</s>", "<0x41>"]


def train(steps):
    normalizer, metaspace = steps
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        trained.normalizer = normalizer
    trained.pre_tokenizer = metaspace
    trained.decoder = decoders.ByteFallback()
    # fastokens matches a control token in a text if the vocabulary lacks its characters.
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>", *BYTES],
        initial_alphabet=[*map(chr, range(32, 127))],
        show_progress=False,
    )
    trained.train_from_iterator([line for text in TEXTS for line in text.splitlines()], trainer)
    definition = json.loads(trained.to_str())
    # The byte tokens are words of the model that texts do not match.
    definition["added_tokens"] = definition["added_tokens"][:2]
    return definition


@pytest.fixture(scope="module", params=STEPS)
def tokenizer(request, tmp_path_factory):
    return resolve_definition(tmp_path_factory.mktemp("metaspace"), train(STEPS[request.param]))


def assert_exact(tokenizer, texts, *, control=False):
    for fast, exact in zip(
        tokenizer.encode_batch(texts, control=control), tokenizer.encode_exactly(texts, control=control), strict=True
    ):
        np.testing.assert_array_equal(fast, exact)


def test_fastokens_gives_the_ids_of_tokenizers(tokenizer):
    assert tokenizer.engine.name == "fastokens"
    assert verify_engine(tokenizer, TEXTS) is tokenizer
    assert_exact(tokenizer, TEXTS)


@settings(max_examples=examples(300))
@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS) | st.characters(), max_size=20).map("".join), max_size=3))
def test_any_text_has_the_same_ids(tokenizer, texts):
    assert_exact(tokenizer, [text.encode(errors="ignore").decode() for text in texts])


def test_parts_between_control_tokens(tokenizer):
    """With ``first`` only the first part is marked, which fastokens cannot do."""
    verified = verify_control_tokens(tokenizer)
    is_first = '"first"' in json.dumps(tokenizer.state()["tokenizer"]["pre_tokenizer"])
    assert verified.engine.name == ("tokenizers" if is_first else "fastokens")
    assert_exact(verified, ["<s>a</s>b</s> c", "a<s>", "</s>", "</s></s> \u2581x"], control=True)


def test_a_mark_of_the_first_part_with_tokens_that_match_in_texts(tmp_path):
    definition = train(STEPS["first"])
    definition["added_tokens"].append(make_added_token("<x>", len(definition["model"]["vocab"]), is_special=False))
    tokenizer = resolve_definition(tmp_path, definition)
    assert "fastokens" in tokenizer.engine.note
    assert_exact(tokenizer, ["a<x>b"])


def test_an_older_spelling_of_the_steps(tmp_path):
    definition = train(STEPS["always"])
    definition["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "add_prefix_space": True,
        "split": False,
    }
    tokenizer = resolve_definition(tmp_path, definition)
    assert tokenizer.engine.name == "fastokens"
    assert_exact(tokenizer, ["a b", " a b", ""])
