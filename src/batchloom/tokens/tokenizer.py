"""Protocol of a tokenizer, and tokenizers without a file: bytes, and ids only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import fingerprint as fingerprint_of

END_OF_TEXT = "<|endoftext|>"

# Ids of several texts, uint32 [tokens], and the offset of each text, int64 [texts + 1].
EncodedIds = tuple[NDArray[np.uint32], NDArray[np.int64]]
# Ids of a text, uint32 [tokens], and the start and stop of each, int64 [tokens].
EncodedIdsWithOffsets = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class EncodingEngine:
    """Implementation that encodes text.

    Attributes:
        name: ``fastokens``, ``splintr-rs``, ``tokenizers`` or ``bytes``.
        version: version of that package.
        note: why the fast engine is not used (or not for every document), else empty.
        exact_characters: texts with any of these characters are encoded with ``tokenizers`` instead.
    """

    name: str
    version: str
    note: str = ""
    exact_characters: str = ""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Chat settings in a tokenizer's files.

    Attributes:
        templates: Jinja chat templates by name; the usual one is called ``default``.
        tokens: special tokens by their name in templates: ``bos_token``, ``eos_token`` and so on.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Conversion of text to ids and back. All ids are below ``vocab_size``."""

    @property
    def name(self) -> str:
        """Spec of the tokenizer; for a path, its last component."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""

    @property
    def end_id(self) -> int:
        """Id of the end-of-document token."""

    @property
    def bos_id(self) -> int | None:
        """Id of the token that models expect before a text document, or None."""

    @property
    def engine(self) -> EncodingEngine:
        """Engine that encodes text; ids do not depend on it."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines ids, and nothing else: 32 hex digits."""

    @property
    def vocabulary_hash(self) -> str:
        """Hash of the vocabulary alone, every token and its id: 32 hex digits."""

    @property
    def lossy(self) -> bool:
        """True if characters without a token are dropped from the ids."""

    @property
    def control(self) -> Mapping[str, int]:
        """Control tokens and their ids."""

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the other added tokens, which match inside text."""

    @property
    def chat(self) -> "ChatTemplates":
        """Chat settings in the tokenizer's files."""

    def id_bytes(self) -> NDArray[np.int64] | None:
        """Return the bytes of text per id, int64 [vocab_size], -1 for an id without text.

        Returns None if the bytes of a token depend on its neighbours.
        """

    def encode_batch(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        """Encode texts, without adding special tokens.

        A control token that is spelled in a text is encoded as plain text, unless ``control``
        is set for texts from a chat template, which writes control tokens that way.

        Returns:
            Concatenated ids, uint32 [tokens], and the offset of each text,
            int64 [texts + 1]. Both may be read-only.

        Raises:
            TokenizerError: a text that is not Unicode (it holds a lone surrogate).
        """

    def encode_placed(self, text: str) -> EncodedIdsWithOffsets:
        """Encode a text with control tokens and return the character span of each token.

        This is slow; use it only if bytes per id are unknown.

        Returns:
            ids, uint32 [tokens]; starts and stops, int64 [tokens], in characters of the text.
        """

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Decode ids; control tokens stay visible, broken UTF-8 becomes U+FFFD.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """

    def state(self) -> dict[str, Any]:
        """Return the complete tokenizer as plain JSON, for ``restore_tokenizer``."""


def validate_ids(ids: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return ids as int64 [n]; raise TokenizerError for one outside the vocabulary."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    wrong = array[(array < 0) | (array >= tokenizer.vocab_size)]
    if wrong.size:
        raise TokenizerError(
            f"id {wrong[0]} is not an id of tokenizer {tokenizer.name!r}, whose ids are 0 to "
            f"{tokenizer.vocab_size - 1}: decode with the tokenizer that made the ids"
        )
    return array


def raise_surrogate_error(texts: Sequence[str], cause: Exception) -> None:
    """Raise TokenizerError for the first text with a lone surrogate, if any."""
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text {number} of the batch is not Unicode: at character {error.start} it holds "
                f"the lone surrogate U+{ord(text[error.start]):04X}; read the input with "
                "errors='replace' or quarantine the record"
            ) from cause


def concat_ids(id_arrays: Sequence[NDArray[np.uint32]]) -> EncodedIds:
    """Concatenate the ids of texts, and return their offsets."""
    offsets = np.zeros(len(id_arrays) + 1, np.int64)
    np.cumsum([ids.size for ids in id_arrays], out=offsets[1:])
    return np.concatenate([np.zeros(0, np.uint32), *id_arrays]), offsets


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
        self.vocab_size = vocab_size
        self.end_id = end_id
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
