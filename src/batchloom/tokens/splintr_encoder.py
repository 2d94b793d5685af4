"""Encoding of Unigram and WordPiece models with splintr.

fastokens does not support these models. splintr ignores some steps of a tokenizer.json and reads others differently. It
is used for the combinations of steps whose ids equal those of HF tokenizers on all texts, except for texts with certain
characters, which are left to HF tokenizers.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import orjson

from batchloom.tokens.tokenizer import EncodedIds, concat_ids
from batchloom.tokens.tokenizer_definition import iter_steps

_UNIGRAM_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Precompiled", "Replace", "Strip", "StripAccents")
)
_BERT_STEPS = (["BertNormalizer"], ["BertPreTokenizer"])
_BERT_MODEL = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

# Characters that the Unicode tables of splintr have and those of HF tokenizers lack, as ranges of a regular expression.
# Rare scripts beyond U+FFFF are listed as a whole.
_NEW_CHARACTERS = (
    "\u061d\u07fd\u0890-\u089f\u08ca-\u08e2\u09fd\u09fe\u0a76\u0afa-\u0aff\u0b55\u0c04\u0c3c\u0c77\u0c84\u0d00\u0d3b"
    "\u0d3c\u0d81\u0eba\u0ece\u166d\u1734\u180f\u1885\u1886\u1abf-\u1ace\u1b4e\u1b4f\u1b7d-\u1b7f\u1df6-\u1dfb"
    "\u2e43-\u2e5d\u32ff\ua7f1-\ua7f4\ua82c\ua8c5\ua8ff\ua9bd\uab69\U000105c0-\U000105ff\U00010780-\U0001d3ff"
    "\U0001df00-\U0001efff\U0001f16c\U0001fbf0-\U0001fbf9\U0002b820-\U0002b91f"
)
# Characters that a normalizer treats differently: spaces, and spacing and enclosing marks with their scripts.
_NORMALIZER_CHARACTERS = {
    "Nmt": "\u205f\u2581\u3000\ufeff\ufffd",
    "StripAccents": "\u0488\u0489\u0900-\u1cff\u20dd-\u20e4\u302e\u302f\ua670-\ua672\ua800-\uabff",
}


@final
class SplintrEncoder:
    """Encoder of texts that match no added token.

    Args:
        definition: tokenizer.json without added tokens.

    Raises:
        ValueError: splintr does not support the definition, or may give other ids.
        ImportError: splintr is missing.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        normalizers, pre_tokenizers = (list(iter_steps(definition.get(key))) for key in ("normalizer", "pre_tokenizer"))
        types, splitters = ([step["type"] for step in steps] for steps in (normalizers, pre_tokenizers))
        model = definition["model"]
        self._unknown_tokens: tuple[str, ...] = ()
        # HF tokenizers refuses a text that has no ids. splintr drops its characters.
        if model.get("type") == "WordPiece" and model.get("unk_token") in model["vocab"]:
            is_supported = (types, splitters) == _BERT_STEPS and _BERT_MODEL.items() <= model.items()
        elif model.get("type") == "Unigram" and model.get("unk_id") is not None:
            is_supported = _UNIGRAM_NORMALIZERS.issuperset(types) and _marks_every_word(pre_tokenizers)
            model, self._unknown_tokens = _rename_unknown_token(model)
        else:
            raise ValueError("it is no Unigram or WordPiece with an unknown token")
        if not is_supported:
            raise ValueError("its steps are not those of T5, XLM-R or BERT")
        from splintr import from_json_bytes

        self._tokenizer = from_json_bytes(orjson.dumps({**definition, "model": model}))
        characters = "".join(_NORMALIZER_CHARACTERS.get(step, "") for step in types)
        self._differing_character = re.compile(f"[{_NEW_CHARACTERS}{characters}]")

    def encode_batch(self, texts: Sequence[str]) -> EncodedIds:
        # A call for several texts starts threads. In a process that is forked afterwards, the next such call hangs.
        return concat_ids([np.frombuffer(self._tokenizer.encode_flat(text), "<u4") for text in texts])

    def differs(self, text: str) -> bool:
        """Return whether HF tokenizers may give a text other ids."""
        # HF tokenizers merges an unknown token that is spelled in a text with unknown characters next to it.
        if any(token in text for token in self._unknown_tokens):
            return True
        return not text.isascii() and self._differing_character.search(text) is not None


def _marks_every_word(pre_tokenizers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether words are split at white space, and treated alike."""
    types = [step["type"] for step in pre_tokenizers]
    if types not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return False
    step = pre_tokenizers[-1]
    return step.get("replacement") == "\u2581" and step.get("split", True) and step.get("prepend_scheme") != "first"


def _rename_unknown_token(model: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a Unigram for splintr, and the spellings of its unknown token."""
    # splintr recognizes these tokens by their names.
    vocabulary = list(model["vocab"])
    number = model["unk_id"]
    name, score = vocabulary[number]
    vocabulary[number] = ["<unk>", score]
    names = Counter(token for token, _ in vocabulary)
    byte_count = sum(map(names.__contains__, _BYTE_TOKENS))
    if names["<unk>"] > 1 or (byte_count and not (byte_count == len(_BYTE_TOKENS) and model.get("byte_fallback"))):
        raise ValueError("its unknown or byte tokens are not the usual ones")
    return {**model, "vocab": vocabulary}, (name, "<unk>")
