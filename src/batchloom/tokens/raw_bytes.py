"""The tokenizer that is always there: ids 0-255 are the bytes of UTF-8, 256 ends a document."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core import fingerprint as fingerprints
from batchloom.tokens.seam import END_OF_TEXT, Engine, checked_ids, refuse_surrogates

END_ID = 256


@final
class ByteTokenizer:
    """A token is a byte of UTF-8."""

    name = "bytes"
    vocab_size = END_ID + 1
    end_id = END_ID
    bos_id: int | None = None
    engine = Engine("bytes", "1")
    fingerprint = fingerprints.fingerprint({"kind": "bytes", "end_id": END_ID})
    lossy = False
    vocabulary_hash = fingerprints.fingerprint({"bytes": list(range(256)), END_OF_TEXT: END_ID})

    def encode_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The bytes of each text; see :class:`~batchloom.tokens.seam.Tokenizer`."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            refuse_surrogates(texts, error)
            raise
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), offsets

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text; see :class:`~batchloom.tokens.seam.Tokenizer`."""
        array = checked_ids(ids, self)
        pieces = np.split(array, np.flatnonzero(array == END_ID))
        texts = (piece[piece != END_ID].astype(np.uint8).tobytes() for piece in pieces)
        return END_OF_TEXT.join(text.decode(errors="replace") for text in texts)

    def state(self) -> dict[str, Any]:
        """Its name is all there is to keep."""
        return {"state_version": 1, "kind": "bytes", "fingerprint": self.fingerprint}
