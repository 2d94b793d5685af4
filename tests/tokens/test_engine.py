"""The fast engine is trusted only where it agrees with HF tokenizers, and falling back is said."""

import importlib.metadata
import time
from itertools import accumulate

import pytest

from batchloom import TokenizerError
from batchloom.tokens import resolve_tokenizer, restore_tokenizer, verify_engine
from batchloom.tokens.control_tokens import TokenizerHints
from batchloom.tokens.engine_conformance import RARE_CHARACTERS, make_conformance_texts
from batchloom.tokens.local_tokenizers import make_json_tokenizer
from batchloom.tokens.tiktoken_ranks import TIKTOKEN_ENCODINGS, convert_ranks_to_json

from .conftest import TEXTS, encoded, expected, reference, special, write_json

FAST = importlib.metadata.version("fastokens")
EXACT = importlib.metadata.version("tokenizers")


def split_on(small, pattern):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    bytes_only = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    small["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_only]}
    return make_json_tokenizer("mine", small, TokenizerHints(), None)


def test_where_they_agree_nothing_changes(gpt2, trained):
    for tokenizer in (gpt2, trained):
        assert verify_engine(tokenizer, TEXTS) is tokenizer
        assert (tokenizer.engine.name, tokenizer.engine.version, tokenizer.engine.note) == (
            "fastokens",
            FAST,
            "",
        )
    tokenizer = resolve_tokenizer("bytes")
    assert verify_engine(tokenizer, TEXTS) is tokenizer


def test_a_difference_falls_back_visibly(small):
    """HF's regex engine reads {1,3}+ as a repeated group, fastokens' as a possessive count."""
    tokenizer = split_on(small, r"\p{N}{1,3}+|\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    text = "1010101010 2020202020"
    assert tokenizer.engine.name == "fastokens"
    assert encoded(tokenizer, text) != expected(reference(tokenizer), text)
    sound = verify_engine(tokenizer, [])
    assert (sound.engine.name, sound.engine.version) == ("tokenizers", EXACT)
    assert f"fastokens {FAST} and tokenizers {EXACT} give different ids for '" in sound.engine.note
    assert "the slower tokenizers is used" in sound.engine.note
    assert encoded(sound, text) == expected(reference(tokenizer), text)
    assert sound.fingerprint == tokenizer.fingerprint
    assert verify_engine(sound, TEXTS) is sound


def test_the_user_s_sample_counts_too(small):
    """``$`` ends a line for HF's regex engine and the text for fastokens'; only one word shows it."""
    tokenizer = split_on(small, r"qqq$\nthe|[\s\S]")
    assert verify_engine(tokenizer, ["nothing here"]) is tokenizer
    sound = verify_engine(tokenizer, ["nothing here", "a qqq\nthe dog"])
    assert sound.engine.name == "tokenizers"
    assert "qqq\\nthe do" in sound.engine.note


def test_rare_characters_cost_only_their_own_texts(few):
    """fastokens does not know that U+017F is an s in o200k's (?i:'s)."""
    text = "t'\u017f'TV"
    ours = TIKTOKEN_ENCODINGS["o200k_base"]
    raw = convert_ranks_to_json(few | {b"'TV": len(few)}, ours.pattern, ours.control)
    tokenizer = make_json_tokenizer("mine", raw, TokenizerHints(), None)
    exact = expected(reference(tokenizer), text)
    assert encoded(tokenizer, text) != exact
    sound = verify_engine(tokenizer, [])
    assert sound.engine.name == "fastokens"
    assert sound.engine.note.startswith("texts that hold U+017F are encoded with tokenizers: fastokens")
    hello = encoded(tokenizer, "Hello world")
    ids, offsets = sound.encode_batch(["Hello world", text, "", text, "'TV"])
    assert ids.tolist() == [*hello, *exact, *exact, len(few)]
    lengths = [0, len(hello), len(exact), 0, len(exact), 1]
    assert offsets.tolist() == list(accumulate(lengths))


def test_white_space_that_only_one_engine_knows(small):
    tokenizer = split_on(small, r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+\z|\s")
    sound = verify_engine(tokenizer, [])
    assert sound.engine.name == "fastokens"
    for text in make_conformance_texts():
        assert encoded(sound, text) == expected(reference(tokenizer), text)


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "gap"])
def test_models_the_fast_engine_does_not_take(kind, small):
    if kind == "Unigram":
        words = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -1.5], ["</s>", 0.0]]
        small["model"] = {"type": "Unigram", "unk_id": 0, "vocab": words, "byte_fallback": False}
        small["added_tokens"] = [special("</s>", 4)]
        small["pre_tokenizer"] = None
    elif kind == "WordLevel":
        small["model"] = {
            "type": "WordLevel",
            "vocab": {"a": 0, "b": 1, "<unk>": 2, "</s>": 3},
            "unk_token": "<unk>",
        }
        small["added_tokens"] = [special("</s>", 3)]
        small["pre_tokenizer"] = {"type": "Whitespace"}
    else:
        small["model"]["vocab"]["<|endoftext|>"] = 1000
        small["added_tokens"] = [special("<|endoftext|>", 1000)]
    tokenizer = make_json_tokenizer("mine", small, TokenizerHints(), None)
    assert tokenizer.engine.name == "tokenizers"
    assert tokenizer.engine.note.startswith(f"fastokens {FAST} does not support it (")
    assert verify_engine(tokenizer, ["ab"]) is tokenizer
    texts = ["ab a b", "", "a" * 300_000, "b"]
    ids, offsets = tokenizer.encode_batch(texts)
    hf = reference(tokenizer)
    assert ids.tolist() == [number for text in texts for number in expected(hf, text)]
    assert offsets.tolist()[:2] == [0, len(expected(hf, texts[0]))]
    assert tokenizer.end_id not in encoded(tokenizer, f"ab {tokenizer.decode([tokenizer.end_id])} b")
    with pytest.raises(TokenizerError, match="text 1 of the batch is not Unicode"):
        tokenizer.encode_batch(["a", "\udc80"])


def test_a_model_no_engine_takes_is_one_sentence(small):
    small["model"]["merges"].append(["nowhere", "to be found"])
    tokenizer = make_json_tokenizer("mine", small, TokenizerHints(), None)
    with pytest.raises(TokenizerError, match=f"mine: tokenizers {EXACT} cannot read its tokenizer.json"):
        tokenizer.encode_batch(["a"])


def test_the_engine_is_no_part_of_the_state(small):
    sound = verify_engine(split_on(small, r"\p{N}{1,3}+|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), [])
    again = restore_tokenizer(sound.state())
    assert again.engine.name == "fastokens"
    assert verify_engine(again, []).engine == sound.engine


def test_the_conformance_set_is_fixed_and_hard(gpt2):
    texts = make_conformance_texts(["<|endoftext|>"])
    assert texts == make_conformance_texts(["<|endoftext|>"])
    everything = "".join(texts)
    for wanted in (
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
        assert wanted in everything
    started = time.process_time()
    verify_engine(gpt2, texts)
    assert time.process_time() - started < 60


def test_a_sample_of_any_size_is_bounded(gpt2):
    started = time.process_time()
    verify_engine(gpt2, ["word " * 2_000_000, *["more words "] * 200_000])
    assert time.process_time() - started < 60


def test_many_added_tokens(tmp_path, small):
    first = small["added_tokens"][0]["id"]
    small["added_tokens"] += [special(f"<t{i}>", first + 1 + i, is_special=i % 2 == 0) for i in range(500)]
    write_json(tmp_path / "tokenizer.json", small)
    tokenizer = verify_engine(resolve_tokenizer(str(tmp_path)), ["a<t3>b<t4>c"])
    assert tokenizer.engine.note == ""
    assert first + 4 in encoded(tokenizer, "a<t3>b<t4>c")
    assert first + 5 not in encoded(tokenizer, "a<t3>b<t4>c")
