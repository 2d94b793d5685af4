"""Documents as every reader of input sees them: tidied, then tokenized as their reading says."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Protocol

import numpy as np

from batchloom.core.conversation import InterleavedText, PreferencePair
from batchloom.core.document import Records
from batchloom.preparation.dedup import RepeatUnit
from batchloom.preparation.documents.chat_encoding import ChatEncoder, MediaTextEncoder
from batchloom.preparation.documents.conversation_encoder import EncodeFault
from batchloom.preparation.documents.fill_in_the_middle import FimCutter
from batchloom.preparation.documents.interleaved_encoder import encode_interleaved
from batchloom.preparation.documents.preference_encoder import (
    encode_labelled_answers,
    encode_preference_pairs,
    encode_text_pairs,
)
from batchloom.preparation.documents.record_parsers import RecordKind, RecordParser, RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.documents.token_encoder import (
    EncodedBatch,
    encode_chats,
    encode_fim_texts,
    encode_texts,
    encode_token_rows,
    make_snippet,
)
from batchloom.preparation.settings import DedupRecipe
from batchloom.sources import ReadRules, RecordBounds
from batchloom.text import TextCleaner, normalize
from batchloom.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodeContext:
    """What every unit of a job needs to know.

    Attributes:
        rules: how sources are cut and text files read.
        readings: how the records of each source become documents.
        bounds: finds where parts meet.
        normalize: whether text is normalised.
        tokenizer: turns text into ids.
        dtype: of a token on disk.
        membership: the shares of the subsets, without overrides.
        chat: tokenizer and template; None where no source has conversations.
        overlap: whether one batch is encoded on a thread of its own while the next is read.
        dedup: which duplicates will be looked for.
        cleaner: the steps of cleaning; None where there are none.
        fim: which texts have their middle last; None where none has.
        media: the tokenizer for texts with media; None where media are not read.
    """

    rules: ReadRules
    readings: RecordParsers
    bounds: RecordBounds
    normalize: bool
    tokenizer: Tokenizer
    dtype: np.dtype[np.generic]
    membership: SubsetRule
    chat: ChatEncoder | None = None
    overlap: bool = False
    cleaner: TextCleaner | None = None
    dedup: DedupRecipe = field(default_factory=lambda: DedupRecipe(mode="none"))
    fim: FimCutter | None = None
    media: MediaTextEncoder | None = None

    @property
    def pieces(self) -> RepeatUnit | None:
        """What is left out where it stood before; None where only whole documents are."""
        return self.dedup.pieces

    @property
    def compared(self) -> bool:
        """Whether documents are compared by their tokens."""
        return self.dedup.mode == "near"


def normalize_records(found: Records, way: RecordKind, *, normalized: bool) -> None:
    """Normalise the texts of a stretch, and leave out those that say nothing."""
    if way == "text-pairs" and normalized:
        found.values = [
            PreferencePair(normalize(p.chosen), normalize(p.rejected)) for p in found.values
        ]
    if way == "interleaved":
        if normalized:
            found.values = [
                InterleavedText([normalize(text) for text in one.texts], one.media)
                for one in found.values
            ]
        _filter_records(
            found, [any(text and not text.isspace() for text in d.texts) for d in found.values]
        )
    if way != "text":
        return
    if normalized:
        found.values = [
            text if text.isascii() and "\r" not in text else normalize(text)
            for text in found.values
        ]
    if "" in found.values or any(map(str.isspace, found.values)):
        _filter_records(found, [bool(text) and not text.isspace() for text in found.values])


def _filter_records(found: Records, kept: Sequence[bool]) -> None:
    if not all(kept):
        found.values = list(compress(found.values, kept))
        found.records = list(compress(found.records, kept))
        found.offsets = list(compress(found.offsets, kept))


class EncodingComponents(Protocol):
    """What makes tokens of documents: a tokenizer, with a template where there are conversations."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns text into ids."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of a token."""

    @property
    def chat(self) -> ChatEncoder | None:
        """Tokenizer and template; None where no source has conversations."""

    @property
    def fim(self) -> FimCutter | None:
        """Which texts have their middle last; None where none has."""

    @property
    def media(self) -> MediaTextEncoder | None:
        """The tokenizer for texts with media; None where media are not read."""

    @property
    def compared(self) -> bool:
        """Whether documents are compared by their tokens."""


def encode_documents(
    task: EncodingComponents, reading: RecordParser, documents: list[Any]
) -> EncodedBatch:
    """Tokenize documents of one reading."""
    if reading.way == "tokens":
        made = encode_token_rows(documents, task.tokenizer.vocab_size, task.dtype)
    elif reading.way == "interleaved":
        if task.media is None:
            raise AssertionError("a job with media has a tokenizer for them")
        made = encode_interleaved(documents, task.media, task.dtype)
    elif reading.chat is None:
        if task.fim is None:
            return encode_texts(documents, task.tokenizer, task.dtype)
        return encode_fim_texts(
            documents, task.tokenizer, task.dtype, task.fim, compared=task.compared
        )
    elif reading.way == "text-pairs":
        made = encode_text_pairs(documents, task.tokenizer, reading.chat, task.dtype)
    elif task.chat is None:
        raise AssertionError("a job with conversations has a template")
    elif reading.way == "pairs":
        made = encode_preference_pairs(documents, task.chat, reading.chat, task.dtype)
    elif reading.way == "labels":
        made = encode_labelled_answers(documents, task.chat, reading.chat, task.dtype)
    else:
        made = encode_chats(documents, task.chat, reading.chat, task.dtype)
    faults = [left._replace(snippet=make_snippet(documents[left.number])) for left in made.faults]
    return replace(made, faults=faults)


def fault_rule(left: EncodeFault) -> str:
    """The rule by which a document was left out: the reason up to its figures."""
    return left.reason.partition(":")[0]
