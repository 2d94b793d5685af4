"""Encoding of inputs without a store, in input order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.preparation.documents.chat_encoding import ChatEncoder
from batchloom.preparation.documents.document_encoder import encode_documents, normalize_records
from batchloom.preparation.documents.record_parsers import RecordParser, iter_texts
from batchloom.preparation.documents.token_encoder import EncodedBatch
from batchloom.sources import PartReader, SourcePart
from batchloom.sources.files import Source
from batchloom.store import StoreLengths
from batchloom.tokens import Tokenizer, verify_control_tokens, verify_engine

DIRECT_DTYPE = np.dtype(np.uint32)
_COMPARED_DOCUMENTS = 256

DocumentNumbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DirectEncoding:
    """Settings of encoding without a store.

    Attributes:
        tokenizer: the tokenizer.
        get_parser: returns the record parser of a source.
        on_bad_record: called with each record that cannot be used; may raise.
        template: chat template, named as in a recipe.
        on_read: called with the bytes and records of each batch read.
    """

    tokenizer: Tokenizer
    get_parser: Callable[[Source], RecordParser]
    on_bad_record: Callable[[Source, BadRecord], object]
    template: str | None = None
    on_read: Callable[[int, int], object] = lambda _bytes, _records: None


def encode_directly(
    sources: Sequence[Source], encoding: DirectEncoding, rank: int = 0, world_size: int = 1
) -> Iterator[EncodedBatch]:
    """Encode the documents of ``sources`` in order, in batches, as ``prepare`` would.

    Args:
        sources: the listed input.
        encoding: tokenizer, parsers and template.
        rank: document i is encoded if i mod ``world_size`` equals this; records that are bad or empty when
            read do not count.
        world_size: number of ranks; documents of other ranks are read but not encoded.

    Raises:
        InputError: a source cannot be read or holds preferences, or ``on_bad_record`` raises.
        TemplateError: the template cannot be used.
    """
    encoder = _LazyEncoder(encoding)
    number = 0
    for source in sources:
        record_parser, consumed = encoding.get_parser(source), 0
        _refuse_preferences(source, record_parser)
        with PartReader(SourcePart(source, 0, source.size), record_parser.rules) as reader:
            for batch in reader:
                encoding.on_read(reader.consumed - consumed, batch.records_read)
                consumed = reader.consumed
                record_parser.parse_records(batch)
                for bad in batch.bad:
                    encoding.on_bad_record(source, bad)
                normalize_records(batch, record_parser.record_kind, normalized=True)
                first = (rank - number) % world_size
                number += len(batch.values)
                rank_slice = slice(first, None, world_size)
                documents, record_numbers = batch.values[rank_slice], batch.records[rank_slice]
                if not documents:
                    continue
                offsets = batch.offsets[rank_slice]
                encoded_batch = encoder.encode(record_parser, documents)
                for fault in encoded_batch.faults:
                    index = fault.number
                    bad = BadRecord(record_numbers[index], offsets[index], None, fault.reason, fault.snippet)
                    encoding.on_bad_record(source, bad)
                yield encoded_batch
            reader.finish()


@dataclass(frozen=True, slots=True)
class _DirectContext:
    """Encoding components; see :class:`EncodingComponents`."""

    tokenizer: Tokenizer
    dtype: np.dtype[np.generic]
    chat: ChatEncoder | None
    fim: None = None
    media: None = None
    compared: bool = False


@final
class _LazyEncoder:
    """Encoder that verifies tokenizer and template when the first documents arrive."""

    def __init__(self, encoding: DirectEncoding) -> None:
        self._encoding = encoding
        self._ready: _DirectContext | None = None

    def encode(self, record_parser: RecordParser, documents: list[Any]) -> EncodedBatch:
        ready = self._ready
        if ready is None:
            texts = [text for document in islice(documents, _COMPARED_DOCUMENTS) for text in iter_texts(document)]
            ready = _DirectContext(verify_engine(self._encoding.tokenizer, texts), DIRECT_DTYPE, None)
        if ready.chat is None and record_parser.templated:
            exact = verify_control_tokens(ready.tokenizer, ())
            ready = replace(ready, chat=ChatEncoder(exact, self._encoding.template))
        self._ready = ready
        return encode_documents(ready, record_parser, documents)


def _refuse_preferences(source: Source, record_parser: RecordParser) -> None:
    if record_parser.preferences:
        raise InputError(
            f"{source.name} holds preferences ({record_parser.detected}), and training its rows would train the "
            "rejected answers, too. Choose what is trained: a formatter of SFTDataset that returns the prompt and "
            "the chosen answer, or batchloom prepare with --map prompt=prompt,completion=chosen."
        )


@final
class EncodedDocuments:
    """Encoded documents in memory, with the read interface of a store.

    Attributes:
        lengths: lengths of the documents in tokens.
        end_id: id that fills padding.
        masked: some tokens are not trained.
    """

    def __init__(self, encoded: Sequence[EncodedBatch], end_id: int) -> None:
        tokens = [batch.tokens for batch in encoded]
        lengths = np.concatenate([np.zeros(0, np.uint32), *(batch.lengths for batch in encoded)])
        self.lengths, self.end_id = StoreLengths(lengths), end_id
        self.masked = any(batch.trained is not None for batch in encoded)
        self._tokens = np.concatenate([np.zeros(0, DIRECT_DTYPE), *tokens])
        self._trained = np.concatenate([np.zeros(0, bool), *map(_trained_mask, encoded)])
        self._starts = np.cumsum(lengths, dtype=np.int64) - lengths

    def read(
        self, documents: DocumentNumbers, starts: DocumentNumbers, lengths: DocumentNumbers
    ) -> list[NDArray[np.generic]]:
        """Return the ids of document spans as views; arguments as in ``Store.read``."""
        begins = self._starts[documents] + starts
        return [self._tokens[a : a + n] for a, n in zip(begins, lengths, strict=True)]

    def mask(
        self, documents: DocumentNumbers, starts: DocumentNumbers, lengths: DocumentNumbers
    ) -> list[NDArray[np.bool_]]:
        """Return the trained flags of document spans as views."""
        begins = self._starts[documents] + starts
        return [self._trained[a : a + n] for a, n in zip(begins, lengths, strict=True)]


def _trained_mask(encoded: EncodedBatch) -> NDArray[np.bool_]:
    return np.ones(encoded.tokens.size, bool) if encoded.trained is None else encoded.trained
