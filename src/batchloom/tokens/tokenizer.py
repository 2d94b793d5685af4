"""What a tokenizer is to the rest of batchloom: text to ids and back, and a fingerprint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class EncodingEngine:
    """What turns text into ids.

    Attributes:
        name: ``fastokens``, ``tokenizers`` or ``bytes``.
        version: version of that package.
        note: why the fast engine is not used (or not for every document), else empty.
    """

    name: str
    version: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """What a tokenizer's files say of conversations.

    Attributes:
        templates: Jinja chat templates by name; the usual one is called ``default``.
        tokens: what templates call ``bos_token``, ``eos_token`` and so on.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Text to ids and back. Every id, the end token's too, is below ``vocab_size``."""

    @property
    def name(self) -> str:
        """The spec it came from; the last part of the path where that was a path."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_id(self) -> int:
        """The end-of-document token."""

    @property
    def bos_id(self) -> int | None:
        """The token that models of this tokenizer expect before a text document, if any."""

    @property
    def engine(self) -> EncodingEngine:
        """What turns text into ids here; ids do not depend on it."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits of all that decides ids, and of nothing else."""

    @property
    def vocabulary_hash(self) -> str:
        """32 hex digits of the vocabulary alone: every token and its id."""

    @property
    def lossy(self) -> bool:
        """Whether characters it has no token for leave no trace in the ids."""

    @property
    def control(self) -> Mapping[str, int]:
        """Control tokens and their ids."""

    @property
    def added(self) -> Mapping[str, int]:
        """Other added tokens, which match inside text, and their ids."""

    @property
    def chat(self) -> "ChatTemplates":
        """What the tokenizer's files say of conversations."""

    def id_bytes(self) -> NDArray[np.int64] | None:
        """How many bytes of text each id stands for [vocab_size], -1 for an id of no text.

        None where tokens do not stand for their own bytes, so that this cannot be said.
        """

    def encode_batch(
        self, texts: Sequence[str], *, control: bool = False
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of many texts, without special tokens added.

        Text that merely spells a control token is encoded as the text it is, unless ``control``
        says that the texts come from a template, which writes control tokens that way.

        Returns:
            All ids [tokens] uint32, back to back, and where each text starts in them
            [texts + 1] int64. Both may be read-only.

        Raises:
            TokenizerError: a text that is not Unicode (it holds a lone surrogate).
        """

    def encode_placed(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
        """Ids of a text with control tokens, and where each token begins and ends in it.

        It is slow: for tokenizers and texts where bytes cannot be counted.

        Returns:
            ids [tokens] uint32, starts and stops [tokens] int64 in characters of the text.
        """

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of ``ids``; control tokens stay visible, broken UTF-8 becomes U+FFFD.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """

    def state(self) -> dict[str, Any]:
        """The whole tokenizer as plain JSON; ``tokenizer_from_state`` gives it back."""


def validate_ids(ids: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """``ids`` as int64 [n], every one of the tokenizer's vocabulary.

    Raises:
        TokenizerError: an id outside the vocabulary.
    """
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    wrong = array[(array < 0) | (array >= tokenizer.vocab_size)]
    if wrong.size:
        raise TokenizerError(
            f"id {wrong[0]} is not of tokenizer {tokenizer.name!r}, whose ids go from 0 to "
            f"{tokenizer.vocab_size - 1}: decode with the tokenizer the ids were made by"
        )
    return array


def raise_surrogate_error(texts: Sequence[str], cause: Exception) -> None:
    """Raise the sentence for the first of ``texts`` that UTF-8 cannot spell, if there is one.

    Raises:
        TokenizerError: names the text, the place and the surrogate.
    """
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text {number} of the batch is not Unicode: at character {error.start} it holds "
                f"the lone surrogate U+{ord(text[error.start]):04X}; read the input with "
                "errors='replace' or quarantine the record"
            ) from cause
