"""Tokenizers without a file: bytes, and ids of stores without a tokenizer."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import fingerprint as fingerprint_of
from batchloom.tokens.tokenizer import (
    END_OF_TEXT,
    ChatTemplates,
    EncodedIds,
    EncodedIdsWithOffsets,
    EncodingEngine,
    concat_ids,
    raise_surrogate_error,
    validate_ids,
)

BYTE_END_ID = 256


def _encode_bytes(text: bytes, *, control: bool) -> NDArray[np.uint32]:
    ids = np.frombuffer(text, np.uint8).astype(np.uint32)
    end = END_OF_TEXT.encode()
    if not control or end not in text:
        return ids
    id_arrays: list[NDArray[np.uint32]] = []
    for chunk in text.split(end):
        id_arrays += [np.frombuffer(chunk, np.uint8).astype(np.uint32), np.full(1, BYTE_END_ID, np.uint32)]
    return np.concatenate(id_arrays[:-1])


@final
class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8."""

    name = "bytes"
    vocab_size = BYTE_END_ID + 1
    end_id = BYTE_END_ID
    bos_id: int | None = None
    engine = EncodingEngine("bytes", "1")
    control: Mapping[str, int] = MappingProxyType({END_OF_TEXT: BYTE_END_ID})
    added: Mapping[str, int] = MappingProxyType({})
    chat = ChatTemplates(tokens=MappingProxyType({"eos_token": END_OF_TEXT}))
    fingerprint = fingerprint_of({"kind": "bytes", "end_id": BYTE_END_ID})
    lossy = False
    vocabulary_hash = fingerprint_of({"bytes": list(range(256)), END_OF_TEXT: BYTE_END_ID})

    def id_bytes(self) -> NDArray[np.int64]:
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[BYTE_END_ID] = len(END_OF_TEXT)
        return lengths

    def encode_batch(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            raise_surrogate_error(texts, error)
            raise
        return concat_ids([_encode_bytes(text, control=control) for text in encoded])

    def encode_placed(self, text: str) -> EncodedIdsWithOffsets:
        """Encode a text; the bytes of a character share its span."""
        ids = self.encode_batch([text], control=True)[0]
        stops = np.cumsum(self.id_bytes()[ids])
        ends = np.cumsum([len(character.encode()) for character in text])
        first = np.searchsorted(ends, stops - self.id_bytes()[ids], side="right")
        return ids, first, np.searchsorted(ends, stops - 1, side="right") + 1

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        array = validate_ids(ids, self)
        chunks = np.split(array, np.flatnonzero(array == BYTE_END_ID))
        texts = (chunk[chunk != BYTE_END_ID].astype(np.uint8).tobytes() for chunk in chunks)
        return END_OF_TEXT.join(text.decode(errors="replace") for text in texts)

    def state(self) -> dict[str, Any]:
        return {"state_version": 1, "kind": "bytes", "fingerprint": self.fingerprint}


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

    def encode_batch(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        raise TokenizerError(
            f"{len(texts)} texts cannot be encoded{' with control tokens' * control}: the store was imported without a "
            "tokenizer; import it again with --tokenizer"
        )

    def encode_placed(self, text: str) -> EncodedIdsWithOffsets:
        ids, offsets = self.encode_batch([text])
        return ids, offsets, offsets

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the ids as numbers: ``17 4 256``."""
        return " ".join(map(str, validate_ids(ids, self).tolist()))

    def state(self) -> dict[str, Any]:
        return {
            "state_version": 1,
            "kind": "none",
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "end_id": self.end_id,
        }
