"""Number of bytes of text per id of a byte-level BPE."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.tokens.byte_level import make_byte_alphabet
from batchloom.tokens.tokenizer_definition import TokenizerDefinition

# Normalizers that leave most texts unchanged. The sum of the bytes reveals the others.
_LOSSLESS_NORMALIZERS = frozenset(("NFC",))


def compute_id_bytes(definition: TokenizerDefinition) -> NDArray[np.int64] | None:
    """Return bytes per id, int64 [vocab_size]; None if this is no byte-level BPE.

    An id without text has -1. Every character of a byte-level BPE token stands for one byte; an added token stands
    for its spelling. This requires that nothing is prepended to a text or stripped around a control token.
    """
    tokenizer_json = orjson.loads(definition.text)
    model = tokenizer_json["model"]
    is_supported = (
        model.get("type", "BPE") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and all(step.get("type") in _LOSSLESS_NORMALIZERS for step in _iter_steps(tokenizer_json.get("normalizer")))
        and _is_byte_level(list(_iter_steps(tokenizer_json.get("pre_tokenizer"))))
        and not any(
            token[flag] for token in tokenizer_json["added_tokens"] for flag in ("lstrip", "rstrip", "single_word")
        )
    )
    if not is_supported:
        return None
    alphabet = frozenset(make_byte_alphabet())
    lengths = np.full(definition.vocab_size, -1, np.int64)
    for token, number in model["vocab"].items():
        if alphabet.issuperset(token):
            lengths[number] = len(token)
    for token in tokenizer_json["added_tokens"]:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _is_byte_level(steps: list[Mapping[str, Any]]) -> bool:
    kinds = [step.get("type") for step in steps]
    return (
        kinds.count("ByteLevel") == 1
        and set(kinds) <= {"ByteLevel", "Split", "Digits", "Punctuation"}
        and not any(step.get("add_prefix_space") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
    )


def _iter_steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the single steps of a normalizer or pre-tokenizer."""
    if isinstance(step, Mapping):
        if step.get("type") != "Sequence":
            yield step
        for key in ("normalizers", "pretokenizers"):
            for part in step.get(key) or ():
                yield from _iter_steps(part)
