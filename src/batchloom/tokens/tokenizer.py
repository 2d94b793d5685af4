"""Protocol of a tokenizer: text to ids and back, and a fingerprint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError

END_OF_TEXT = "<|endoftext|>"

# Ids of several texts, uint32 [tokens], and the offset of each text, int64 [texts + 1].
EncodedIds = tuple[NDArray[np.uint32], NDArray[np.int64]]
# Ids of a text, uint32 [tokens], and the start and stop of each, int64 [tokens].
EncodedIdsWithOffsets = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class EncodingEngine:
    """Implementation that encodes text.

    Attributes:
        name: ``fastokens``, ``tokenizers`` or ``bytes``.
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
