"""Normalization of records, and encoding of documents by their kind."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchloom.core.conversation import InterleavedText, PreferencePair
from batchloom.core.document import Records
from batchloom.preparation.dedup.line_dedup import RepeatUnit
from batchloom.preparation.documents.chat_encoding import ChatEncoder, ControlEncoder
from batchloom.preparation.documents.conversation_encoder import EncodedBatch, encode_conversations
from batchloom.preparation.documents.fill_in_the_middle import FimCutter
from batchloom.preparation.documents.preference_encoder import (
    encode_labelled_answers,
    encode_preference_pairs,
    encode_text_pairs,
)
from batchloom.preparation.documents.record_parsers import RecordKind, RecordParser, RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.documents.token_encoder import (
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
class EncodeContext(DocumentEncoder):
    """Encode settings and components shared by all units of a job.

    Attributes:
        record_parsers: record parser of each source.
        bounds: finds the boundaries of parts.
        normalize: normalize the text.
        membership: subset rule of the shares, without overrides.
        overlap: encode a batch on a thread while the next one is read.
        cleaner: cleaning steps; None for none.
    """

    record_parsers: RecordParsers
    bounds: RecordBounds
    normalize: bool
    membership: SubsetRule
    overlap: bool = False
    cleaner: TextCleaner | None = None

    @property
    def rules(self) -> ReadRules:
        """Rules for splitting sources and reading text files."""
        return self.record_parsers.rules

    @property
    def repeat_unit(self) -> RepeatUnit | None:
        """Unit of repeated text to remove; None to remove complete documents only."""
        return self.dedup.repeat_unit


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
        documents = enumerate(batch.values)
        batch.select([n for n, document in documents if any(text and not text.isspace() for text in document.texts)])
    if record_kind != "text":
        return
    if normalized:
        batch.values = [text if text.isascii() and "\r" not in text else normalize(text) for text in batch.values]
    if "" in batch.values or any(map(str.isspace, batch.values)):
        batch.select([n for n, text in enumerate(batch.values) if text and not text.isspace()])


def encode_documents(encoder: DocumentEncoder, record_parser: RecordParser, documents: list[Any]) -> EncodedBatch:
    """Tokenize documents of one record parser."""
    tokenizer, dtype, chat = encoder.tokenizer, encoder.dtype, encoder.chat
    kind, rules = record_parser.record_kind, record_parser.chat
    if kind == "tokens":
        encoded_batch = encode_token_rows(documents, tokenizer.vocab_size, dtype)
    elif kind == "interleaved":
        if encoder.media is None:
            raise AssertionError("a job with media needs a media encoder")
        encoded_batch = encode_interleaved(documents, encoder.media, dtype)
    elif rules is None:
        if encoder.fim is None:
            return encode_texts(documents, tokenizer, dtype)
        return encode_fim_texts(documents, tokenizer, dtype, encoder.fim, compared=encoder.dedup.mode == "near")
    elif kind == "text-pairs":
        encoded_batch = encode_text_pairs(documents, tokenizer, rules, dtype)
    elif chat is None:
        raise AssertionError("a job with conversations needs a template")
    elif kind == "pairs":
        encoded_batch = encode_preference_pairs(documents, chat, rules, dtype)
    elif kind == "labels":
        encoded_batch = encode_labelled_answers(documents, chat, rules, dtype)
    else:
        encoded_batch = encode_conversations(documents, chat, rules, dtype)
    faults = [fault._replace(snippet=make_snippet(documents[fault.number])) for fault in encoded_batch.faults]
    return replace(encoded_batch, faults=faults)
