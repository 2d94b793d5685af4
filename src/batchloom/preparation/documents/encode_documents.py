"""Normalization of records, and encoding of documents by their kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchloom.core.document import InterleavedText, PreferencePair, Records
from batchloom.preparation.documents.document_facts import make_snippet
from batchloom.preparation.documents.encode_answers import (
    encode_labelled_answers,
    encode_preference_pairs,
    encode_prompts,
    encode_text_pairs,
)
from batchloom.preparation.documents.encode_chat import ChatEncoder, encode_conversations
from batchloom.preparation.documents.encode_text import (
    encode_fim_texts,
    encode_interleaved,
    encode_segments,
    encode_texts,
    encode_token_rows,
    weigh_documents,
)
from batchloom.preparation.documents.encoded_batch import EncodedBatch
from batchloom.preparation.documents.fill_in_the_middle import FimCutter
from batchloom.preparation.documents.masked_tokens import ControlEncoder
from batchloom.preparation.documents.record_parsers import RecordKind, RecordParser, RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.settings.recipe import ChatRecipe, DedupRecipe
from batchloom.sources import RecordBounds
from batchloom.text import TextCleaner, normalize
from batchloom.tokens import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEncoder:
    """Tokenizer, template and settings that turn documents into tokens.

    Attributes:
        tokenizer: the tokenizer.
        dtype: token dtype on disk.
        chat: tokenizer and template; None if no source has conversations.
        dedup: deduplication settings.
        fim: fill-in-the-middle settings; None for none.
        media: tokenizer for texts with media; None if media are not read.
    """

    tokenizer: Tokenizer
    dtype: np.dtype[np.generic]
    chat: ChatEncoder | None = None
    dedup: DedupRecipe = field(default_factory=lambda: DedupRecipe(mode="none"))
    fim: FimCutter | None = None
    media: ControlEncoder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEncoder(ABC):
    """Settings and components that turn the records of a unit into documents.

    Attributes:
        record_parsers: record parser of each source.
        normalize: normalize the text.
        membership: subset rule of the shares, without overrides.
        cleaner: cleaning steps; None for none.
    """

    record_parsers: RecordParsers
    normalize: bool
    membership: SubsetRule
    cleaner: TextCleaner | None = None

    @property
    def chat(self) -> ChatEncoder | None:
        """Tokenizer and template; None if no source has conversations."""
        return None

    @property
    def dedup(self) -> DedupRecipe:
        """Deduplication settings."""
        return DedupRecipe(mode="none")

    @abstractmethod
    def encode(self, record_parser: RecordParser, documents: list[Any], weights: Sequence[float]) -> EncodedBatch:
        """Tokenize documents of one record parser, as :func:`encode_documents` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext(UnitEncoder):
    """Encode settings and components shared by all units of a job.

    Attributes:
        encoder: tokenizes the documents.
        bounds: finds the boundaries of parts.
        overlap: encode a batch on a thread while the next one is read.
    """

    encoder: DocumentEncoder
    bounds: RecordBounds
    overlap: bool = False

    @property
    def chat(self) -> ChatEncoder | None:
        return self.encoder.chat

    @property
    def dedup(self) -> DedupRecipe:
        return self.encoder.dedup

    def encode(self, record_parser: RecordParser, documents: list[Any], weights: Sequence[float]) -> EncodedBatch:
        return encode_documents(self.encoder, record_parser, documents, weights)


def normalize_records(batch: Records, record_kind: RecordKind, *, normalized: bool) -> None:
    """Normalize the texts of a batch in place, and remove blank ones."""
    if record_kind == "text-pairs" and normalized:
        batch.values = [PreferencePair(normalize(p.chosen), normalize(p.rejected)) for p in batch.values]
    if record_kind == "interleaved":
        if normalized:
            batch.values = [
                replace(document, texts=[normalize(text) for text in document.texts]) for document in batch.values
            ]
        documents = enumerate(batch.values)
        batch.select([n for n, document in documents if any(text and not text.isspace() for text in document.texts)])
    if record_kind != "text":
        return
    if normalized:
        batch.values = [text if text.isascii() and "\r" not in text else normalize(text) for text in batch.values]
    if "" in batch.values or any(map(str.isspace, batch.values)):
        batch.select([n for n, text in enumerate(batch.values) if text and not text.isspace()])


def _encode_texts(encoder: DocumentEncoder, texts: list[str], _chat: ChatRecipe) -> EncodedBatch:
    if encoder.fim is None:
        return encode_texts(texts, encoder.tokenizer, encoder.dtype)
    compared = encoder.dedup.mode == "near"
    return encode_fim_texts(texts, encoder.tokenizer, encoder.dtype, encoder.fim, compared=compared)


def _encode_interleaved(encoder: DocumentEncoder, documents: list[InterleavedText], _chat: ChatRecipe) -> EncodedBatch:
    if encoder.media is None:
        raise AssertionError("a job with media needs a media encoder")
    return encode_interleaved(documents, encoder.media, encoder.dtype)


def _with_template(
    encode: Callable[[Any, ChatEncoder, ChatRecipe, np.dtype[np.generic]], EncodedBatch],
) -> Callable[[DocumentEncoder, Any, ChatRecipe], EncodedBatch]:
    """Return the encoder of documents that a template renders."""

    def encode_rendered(encoder: DocumentEncoder, documents: Any, chat: ChatRecipe) -> EncodedBatch:
        if encoder.chat is None:
            raise AssertionError("a job with conversations needs a template")
        return encode(documents, encoder.chat, chat, encoder.dtype)

    return encode_rendered


_ENCODERS: dict[RecordKind, Callable[[DocumentEncoder, Any, ChatRecipe], EncodedBatch]] = {
    "text": _encode_texts,
    "interleaved": _encode_interleaved,
    "segments": lambda encoder, texts, chat: encode_segments(texts, encoder.tokenizer, chat, encoder.dtype),
    "tokens": lambda encoder, rows, _: encode_token_rows(rows, encoder.tokenizer.vocab_size, encoder.dtype),
    "conversation": _with_template(encode_conversations),
    "pairs": _with_template(encode_preference_pairs),
    "text-pairs": lambda encoder, pairs, chat: encode_text_pairs(pairs, encoder.tokenizer, chat, encoder.dtype),
    "labels": _with_template(encode_labelled_answers),
    "prompts": _with_template(encode_prompts),
}


def encode_documents(
    encoder: DocumentEncoder, record_parser: RecordParser, documents: list[Any], weights: Sequence[float] = ()
) -> EncodedBatch:
    """Tokenize documents of one record parser.

    ``weights`` are the loss weights of texts; empty if all are 1.
    """
    encoded_batch = _ENCODERS[record_parser.record_kind](encoder, documents, record_parser.chat)
    if weights:
        encoded_batch = weigh_documents(encoded_batch, weights)
    faults = [fault._replace(snippet=make_snippet(documents[fault.number])) for fault in encoded_batch.faults]
    return replace(encoded_batch, faults=faults)
