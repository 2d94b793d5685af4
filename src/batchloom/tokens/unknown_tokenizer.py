"""Tokenizer of imported stores without one: a vocabulary of ids without text."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import fingerprint as fingerprint_of
from batchloom.tokens.tokenizer import ChatTemplates, EncodingEngine, validate_ids


@final
class UnknownTokenizer:
    """Tokenizer with ids only: it decodes to numbers and cannot encode.

    Args:
        vocab_size: upper bound of ids, exclusive.
        end_id: id that ends documents, or that pads if none does.

    Raises:
        TokenizerError: the end token is outside the vocabulary.
    """

    name = "none"
    lossy = False
    bos_id: int | None = None
    engine = EncodingEngine("none", "1")
    control: Mapping[str, int] = MappingProxyType({})
    added: Mapping[str, int] = MappingProxyType({})
    chat = ChatTemplates()

    def __init__(self, vocab_size: int, end_id: int) -> None:
        if not 0 <= end_id < vocab_size:
            raise TokenizerError(
                f"the end token {end_id} is not in a vocabulary of {vocab_size} ids: it must be 0 to {vocab_size - 1}"
            )
        self.vocab_size, self.end_id = vocab_size, end_id
        identity = {"kind": "none", "vocab_size": vocab_size}
        self.vocabulary_hash = fingerprint_of(identity)
        self.fingerprint = fingerprint_of({**identity, "end_id": end_id})

    def id_bytes(self) -> None:
        """Return None: the bytes of an id are unknown."""

    def encode_batch(
        self, texts: Sequence[str], *, control: bool = False
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Raise TokenizerError; see :class:`~batchloom.tokens.Tokenizer`."""
        raise TokenizerError(
            f"{len(texts)} texts cannot be encoded{' with control tokens' * control}: the store was imported without a "
            "tokenizer; import it again with --tokenizer"
        )

    def encode_placed(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
        """Raise TokenizerError; see :class:`~batchloom.tokens.Tokenizer`."""
        ids, offsets = self.encode_batch([text])
        return ids, offsets, offsets

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the ids as numbers: ``17 4 256``."""
        return " ".join(map(str, validate_ids(ids, self).tolist()))

    def state(self) -> dict[str, Any]:
        """Return the two numbers that define it."""
        return {
            "state_version": 1,
            "kind": "none",
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "end_id": self.end_id,
        }


def restore_unknown_tokenizer(state: Mapping[str, Any]) -> UnknownTokenizer:
    """Restore from ``state()``; raise TokenizerError for invalid numbers."""
    numbers = [state.get("vocab_size"), state.get("end_id")]
    if any(not isinstance(number, int) or isinstance(number, bool) for number in numbers):
        raise TokenizerError(
            f"the tokenizer's state is damaged: its vocab_size and end_id are {numbers!r:.60}, not two numbers"
        )
    return UnknownTokenizer(int(state["vocab_size"]), int(state["end_id"]))
