"""Engines: fastokens if it agrees with HF tokenizers, otherwise a fallback."""

import importlib.metadata
import json
from itertools import accumulate

import pytest

from batchloom import TokenizerError
from batchloom.core.fingerprint import fingerprint
from batchloom.tokens import resolve_tokenizer, restore_tokenizer, verify_control_tokens, verify_engine
from batchloom.tokens.engine_conformance import (
    FIXED_TEXTS_VERSION,
    RARE_CHARACTERS,
    make_conformance_texts,
    make_fixed_texts,
)
from batchloom.tokens.local_tokenizers import TokenizerHints, make_json_tokenizer
from batchloom.tokens.tokenizer_lookup import TIKTOKEN_ENCODINGS, convert_ranks_to_json

from .conftest import TEXTS, encode_text, encode_with_reference, make_added_token, make_reference, write_json

pytestmark = pytest.mark.usefixtures("engine_cache")
FASTOKENS_VERSION = importlib.metadata.version("fastokens")
TOKENIZERS_VERSION = importlib.metadata.version("tokenizers")


def make_split_tokenizer(tokenizer_json, pattern):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer_json["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return make_json_tokenizer("mine", tokenizer_json, TokenizerHints(), None)


def test_agreeing_engines_change_nothing(gpt2, trained):
    for tokenizer in (gpt2, trained):
        assert verify_engine(tokenizer, TEXTS) is tokenizer
        assert (tokenizer.engine.name, tokenizer.engine.version, tokenizer.engine.note) == (
            "fastokens",
            FASTOKENS_VERSION,
            "",
        )
    tokenizer = resolve_tokenizer("bytes")
    assert verify_engine(tokenizer, TEXTS) is tokenizer


def test_a_difference_falls_back_visibly(tokenizer_json):
    """HF reads ``{1,3}+`` as a repeated group, fastokens as a possessive count."""
    tokenizer = make_split_tokenizer(tokenizer_json, r"\p{N}{1,3}+|\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    text = "1010101010 2020202020"
    assert tokenizer.engine.name == "fastokens"
    assert encode_text(tokenizer, text) != encode_with_reference(make_reference(tokenizer), text)
    verified = verify_engine(tokenizer, [])
    assert (verified.engine.name, verified.engine.version) == ("tokenizers", TOKENIZERS_VERSION)
    assert (
        f"fastokens {FASTOKENS_VERSION} and tokenizers {TOKENIZERS_VERSION} give different ids for '"
        in verified.engine.note
    )
    assert "the slower tokenizers is used" in verified.engine.note
    assert encode_text(verified, text) == encode_with_reference(make_reference(tokenizer), text)
    assert verified.fingerprint == tokenizer.fingerprint
    assert verify_engine(verified, TEXTS) is verified


DIFFERING_PATTERN, DIFFERING_TEXT = r"qqq$\nthe|[\s\S]", "a qqq\nthe dog"


def test_the_sample_of_the_user_is_checked(tokenizer_json):
    """``$`` ends a line in HF's engine and the text in fastokens'; one word shows it."""
    tokenizer = make_split_tokenizer(tokenizer_json, DIFFERING_PATTERN)
    assert verify_engine(tokenizer, ["nothing here"]) is tokenizer
    verified = verify_engine(tokenizer, ["nothing here", DIFFERING_TEXT])
    assert verified.engine.name == "tokenizers"
    assert "qqq\\nthe do" in verified.engine.note


def test_rare_characters_slow_only_their_own_texts(first_ranks):
    """fastokens does not match U+017F as an s in o200k's ``(?i:'s)``."""
    text = "t'\u017f'TV"
    encoding = TIKTOKEN_ENCODINGS["o200k_base"]
    control = {"<|endoftext|>": len(first_ranks) + 1}
    raw = convert_ranks_to_json(first_ranks | {b"'TV": len(first_ranks)}, encoding.pattern, control)
    tokenizer = make_json_tokenizer("mine", raw, TokenizerHints(), None)
    exact_ids = encode_with_reference(make_reference(tokenizer), text)
    assert encode_text(tokenizer, text) != exact_ids
    verified = verify_engine(tokenizer, [])
    assert verified.engine.name == "fastokens"
    assert verified.engine.note.startswith("texts that hold U+017F are encoded with tokenizers: fastokens")
    hello_ids = encode_text(tokenizer, "Hello world")
    ids, offsets = verified.encode_batch(["Hello world", text, "", text, "'TV"])
    assert ids.tolist() == [*hello_ids, *exact_ids, *exact_ids, len(first_ranks)]
    lengths = [0, len(hello_ids), len(exact_ids), 0, len(exact_ids), 1]
    assert offsets.tolist() == list(accumulate(lengths))


def test_white_space_that_only_one_engine_knows(tokenizer_json):
    tokenizer = make_split_tokenizer(tokenizer_json, r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+\z|\s")
    verified = verify_engine(tokenizer, [])
    assert verified.engine.name == "fastokens"
    reference = make_reference(tokenizer)
    for text in make_conformance_texts():
        assert encode_text(verified, text) == encode_with_reference(reference, text)


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "gap"])
def test_models_that_fastokens_does_not_support(kind, tokenizer_json):
    if kind == "Unigram":
        vocabulary = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -1.5], ["</s>", 0.0]]
        tokenizer_json["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
        tokenizer_json["added_tokens"] = [make_added_token("</s>", 4)]
        tokenizer_json["pre_tokenizer"] = None
    elif kind == "WordLevel":
        tokenizer_json["model"] = {
            "type": "WordLevel",
            "vocab": {"a": 0, "b": 1, "<unk>": 2, "</s>": 3},
            "unk_token": "<unk>",
        }
        tokenizer_json["added_tokens"] = [make_added_token("</s>", 3)]
        tokenizer_json["pre_tokenizer"] = {"type": "Whitespace"}
    else:
        tokenizer_json["model"]["vocab"]["<|endoftext|>"] = 1000
        tokenizer_json["added_tokens"] = [make_added_token("<|endoftext|>", 1000)]
    tokenizer = make_json_tokenizer("mine", tokenizer_json, TokenizerHints(), None)
    assert tokenizer.engine.name == "tokenizers"
    assert tokenizer.engine.note.startswith(f"fastokens {FASTOKENS_VERSION} does not support it (")
    assert verify_engine(tokenizer, ["ab"]) is tokenizer
    texts = ["ab a b", "", "a" * 300_000, "b"]
    ids, offsets = tokenizer.encode_batch(texts)
    reference = make_reference(tokenizer)
    assert ids.tolist() == [number for text in texts for number in encode_with_reference(reference, text)]
    assert offsets.tolist()[:2] == [0, len(encode_with_reference(reference, texts[0]))]
    assert tokenizer.end_id not in encode_text(tokenizer, f"ab {tokenizer.decode([tokenizer.end_id])} b")
    with pytest.raises(TokenizerError, match="text 1 of the batch is not Unicode"):
        tokenizer.encode_batch(["a", "\udc80"])


def test_a_model_that_no_engine_supports_is_one_sentence(tokenizer_json):
    tokenizer_json["model"]["merges"].append(["nowhere", "to be found"])
    tokenizer = make_json_tokenizer("mine", tokenizer_json, TokenizerHints(), None)
    with pytest.raises(TokenizerError, match=f"mine: tokenizers {TOKENIZERS_VERSION} cannot read its tokenizer.json"):
        tokenizer.encode_batch(["a"])


def test_the_engine_is_no_part_of_the_state(tokenizer_json):
    verified = verify_engine(make_split_tokenizer(tokenizer_json, r"\p{N}{1,3}+|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), [])
    restored = restore_tokenizer(verified.state())
    assert restored.engine.name == "fastokens"
    assert verify_engine(restored, []).engine == verified.engine


def test_the_conformance_set_is_fixed_and_hard():
    texts = make_conformance_texts(["<|endoftext|>"])
    assert texts == make_conformance_texts(["<|endoftext|>"])
    joined_texts = "".join(texts)
    for fragment in (
        "\x00",
        "\r\n",
        "\u200d",
        "\u0301",
        "\ue000",
        "\u0378",
        "\U0010ffff",
        "<|endoftext|>",
        *RARE_CHARACTERS,
    ):
        assert fragment in joined_texts
    # Half a second's work for HF tokenizers.
    assert len(joined_texts) < 300_000


def test_the_result_on_fixed_texts_is_saved(engine_cache, trained, tokenizer_json):
    """A saved result is read instead of comparing; a damaged one is replaced."""
    assert verify_engine(trained, []) is trained
    (path,) = engine_cache.iterdir()
    expected = path.read_bytes()
    path.write_text(json.dumps({"example": "'saved'", "common": True}))
    assert "different ids for 'saved'" in verify_engine(trained, []).engine.note
    path.write_bytes(expected[:-1])
    assert verify_engine(trained, []) is trained
    assert path.read_bytes() == expected
    assert verify_control_tokens(trained) is trained
    # Another tokenizer, whose engines differ, has results of its own.
    differing = make_split_tokenizer(tokenizer_json, r"\p{N}{1,3}+|\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    engine = verify_engine(differing, []).engine
    assert verify_engine(differing, []).engine == engine
    assert engine.name == "tokenizers"
    assert len(list(engine_cache.iterdir())) == 3


def test_a_saved_result_holds_for_its_versions_only(engine_cache, trained, monkeypatch):
    verify_engine(trained, [])
    (path,) = engine_cache.iterdir()
    path.write_text(json.dumps({"example": "'saved'", "common": True}))
    monkeypatch.setattr("batchloom.tokens.engine_conformance.get_package_version", lambda package: "0.1")
    assert verify_engine(trained, []) is trained
    assert len(list(engine_cache.iterdir())) == 2


def test_the_engines_are_compared_without_a_writable_cache(tmp_path, trained):
    (tmp_path / "cache").write_text("a file is in the way")
    assert verify_engine(trained, TEXTS) is trained


def test_fixed_texts_change_only_with_their_version(gpt2):
    digest = fingerprint([make_fixed_texts(gpt2, control=control) for control in (False, True)])
    assert (FIXED_TEXTS_VERSION, digest) == (1, "b93384f0bb7169ba11897c37feb90c54")


@pytest.mark.parametrize(
    "large_sample",
    [
        pytest.param(["word " * 20_000 + DIFFERING_TEXT], id="a text"),
        pytest.param(["word " * 13_000] * 17 + [DIFFERING_TEXT], id="all", marks=pytest.mark.slow),
        pytest.param([""] * (1 << 16) + [DIFFERING_TEXT], id="texts", marks=pytest.mark.slow),
    ],
)
def test_the_compared_part_of_a_sample_is_bounded(tokenizer_json, large_sample):
    tokenizer = make_split_tokenizer(tokenizer_json, DIFFERING_PATTERN)
    assert verify_engine(tokenizer, large_sample) is tokenizer


def test_many_added_tokens(tmp_path, tokenizer_json):
    first_id = tokenizer_json["added_tokens"][0]["id"]
    tokenizer_json["added_tokens"] += [
        make_added_token(f"<t{i}>", first_id + 1 + i, is_special=i % 2 == 0) for i in range(500)
    ]
    write_json(tmp_path / "tokenizer.json", tokenizer_json)
    tokenizer = verify_engine(resolve_tokenizer(str(tmp_path)), ["a<t3>b<t4>c"])
    assert tokenizer.engine.note == ""
    assert first_id + 4 in encode_text(tokenizer, "a<t3>b<t4>c")
    assert first_id + 5 not in encode_text(tokenizer, "a<t3>b<t4>c")
