"""Normalization of records, and encoding of documents by their kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Protocol

import numpy as np

from batchloom.core.conversation import InterleavedText, PreferencePair
from batchloom.core.document import Records
from batchloom.preparation.dedup.line_dedup import RepeatUnit
from batchloom.preparation.documents.chat_encoding import ChatEncoder, MediaTextEncoder
from batchloom.preparation.documents.conversation_encoder import EncodeFault
from batchloom.preparation.documents.fill_in_the_middle import FimCutter
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
    encode_interleaved,
    encode_texts,
    encode_token_rows,
    make_snippet,
)
from batchloom.preparation.settings.dedup_recipe import DedupRecipe
from batchloom.sources import ReadRules, RecordBounds
from batchloom.text import TextCleaner, normalize
from batchloom.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodeContext:
    """Encode settings and components shared by all units of a job.

    Attributes:
        rules: how sources are split and text files read.
        record_parsers: record parser of each source.
        bounds: finds the boundaries of parts.
        normalize: normalize the text.
        tokenizer: the tokenizer.
        dtype: token dtype on disk.
        membership: subset rule of the shares, without overrides.
        chat: tokenizer and template; None if no source has conversations.
        overlap: encode a batch on a thread while the next one is read.
        cleaner: cleaning steps; None for none.
        dedup: deduplication settings.
        fim: fill-in-the-middle settings; None for none.
        media: tokenizer for texts with media; None if media are not read.
    """

    rules: ReadRules
    record_parsers: RecordParsers
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
    def repeat_unit(self) -> RepeatUnit | None:
        """Unit of repeated text to remove; None to remove complete documents only."""
        return self.dedup.repeat_unit

    @property
    def compared(self) -> bool:
        """True if documents are compared by their tokens."""
        return self.dedup.mode == "near"


def normalize_records(batch: Records, record_kind: RecordKind, *, normalized: bool) -> None:
    """Normalize the texts of a batch in place, and remove blank ones."""
    if record_kind == "text-pairs" and normalized:
        batch.values = [PreferencePair(normalize(p.chosen), normalize(p.rejected)) for p in batch.values]
    if record_kind == "interleaved":
        if normalized:
            batch.values = [
                InterleavedText([normalize(text) for text in document.texts], document.media)
                for document in batch.values
            ]
        _filter_records(batch, [any(text and not text.isspace() for text in d.texts) for d in batch.values])
    if record_kind != "text":
        return
    if normalized:
        batch.values = [text if text.isascii() and "\r" not in text else normalize(text) for text in batch.values]
    if "" in batch.values or any(map(str.isspace, batch.values)):
        _filter_records(batch, [bool(text) and not text.isspace() for text in batch.values])


def _filter_records(batch: Records, keep_mask: Sequence[bool]) -> None:
    if not all(keep_mask):
        batch.values = list(compress(batch.values, keep_mask))
        batch.records = list(compress(batch.records, keep_mask))
        batch.offsets = list(compress(batch.offsets, keep_mask))


class EncodingComponents(Protocol):
    """Tokenizer, and a template if there are conversations."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Token dtype."""

    @property
    def chat(self) -> ChatEncoder | None:
        """Tokenizer and template; None if no source has conversations."""

    @property
    def fim(self) -> FimCutter | None:
        """Fill-in-the-middle settings; None for none."""

    @property
    def media(self) -> MediaTextEncoder | None:
        """Tokenizer for texts with media; None if media are not read."""

    @property
    def compared(self) -> bool:
        """True if documents are compared by their tokens."""


def encode_documents(task: EncodingComponents, record_parser: RecordParser, documents: list[Any]) -> EncodedBatch:
    """Tokenize documents of one record parser."""
    if record_parser.record_kind == "tokens":
        encoded_batch = encode_token_rows(documents, task.tokenizer.vocab_size, task.dtype)
    elif record_parser.record_kind == "interleaved":
        if task.media is None:
            raise AssertionError("a job with media needs a media encoder")
        encoded_batch = encode_interleaved(documents, task.media, task.dtype)
    elif record_parser.chat is None:
        if task.fim is None:
            return encode_texts(documents, task.tokenizer, task.dtype)
        return encode_fim_texts(documents, task.tokenizer, task.dtype, task.fim, compared=task.compared)
    elif record_parser.record_kind == "text-pairs":
        encoded_batch = encode_text_pairs(documents, task.tokenizer, record_parser.chat, task.dtype)
    elif task.chat is None:
        raise AssertionError("a job with conversations needs a template")
    elif record_parser.record_kind == "pairs":
        encoded_batch = encode_preference_pairs(documents, task.chat, record_parser.chat, task.dtype)
    elif record_parser.record_kind == "labels":
        encoded_batch = encode_labelled_answers(documents, task.chat, record_parser.chat, task.dtype)
    else:
        encoded_batch = encode_chats(documents, task.chat, record_parser.chat, task.dtype)
    faults = [fault._replace(snippet=make_snippet(documents[fault.number])) for fault in encoded_batch.faults]
    return replace(encoded_batch, faults=faults)


def fault_rule(fault: EncodeFault) -> str:
    """Return the rule that dropped a document: its reason without the numbers."""
    return fault.reason.partition(":")[0]
