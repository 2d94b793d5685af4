"""Built-in byte tokenizer: ids 0-255 are bytes of UTF-8, 256 ends a document."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import fingerprint as fingerprint_of
from batchloom.tokens.tokenizer import (
    END_OF_TEXT,
    ChatTemplates,
    EncodingEngine,
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
        id_arrays += [
            np.frombuffer(chunk, np.uint8).astype(np.uint32),
            np.full(1, BYTE_END_ID, np.uint32),
        ]
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
        """See :class:`~batchloom.tokens.Tokenizer`."""
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[BYTE_END_ID] = len(END_OF_TEXT)
        return lengths

    def encode_batch(
        self, texts: Sequence[str], *, control: bool = False
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """See :class:`~batchloom.tokens.Tokenizer`."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            raise_surrogate_error(texts, error)
            raise
        id_arrays = [_encode_bytes(text, control=control) for text in encoded]
        offsets = np.zeros(len(id_arrays) + 1, np.int64)
        np.cumsum([ids.size for ids in id_arrays], out=offsets[1:])
        return np.concatenate([np.zeros(0, np.uint32), *id_arrays]), offsets

    def encode_placed(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
        """See :class:`~batchloom.tokens.Tokenizer`; bytes of a character share its span."""
        ids = self.encode_batch([text], control=True)[0]
        stops = np.cumsum(self.id_bytes()[ids])
        ends = np.cumsum([len(character.encode()) for character in text])
        first = np.searchsorted(ends, stops - self.id_bytes()[ids], side="right")
        return ids, first, np.searchsorted(ends, stops - 1, side="right") + 1

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """See :class:`~batchloom.tokens.Tokenizer`."""
        array = validate_ids(ids, self)
        chunks = np.split(array, np.flatnonzero(array == BYTE_END_ID))
        texts = (chunk[chunk != BYTE_END_ID].astype(np.uint8).tobytes() for chunk in chunks)
        return END_OF_TEXT.join(text.decode(errors="replace") for text in texts)

    def state(self) -> dict[str, Any]:
        """See :class:`~batchloom.tokens.Tokenizer`."""
        return {"state_version": 1, "kind": "bytes", "fingerprint": self.fingerprint}
