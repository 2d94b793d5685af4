"""Documents as ids without a store: read, rendered, tokenized and masked in the order of the input."""

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
    """How documents become ids.

    Attributes:
        tokenizer: turns text into ids.
        get_parser: how the records of a source become documents.
        on_bad_record: is told of each record that cannot be used, and may raise.
        template: the chat template, as a recipe names it.
        on_read: is told of the bytes and the records of each stretch that was read.
    """

    tokenizer: Tokenizer
    get_parser: Callable[[Source], RecordParser]
    on_bad_record: Callable[[Source, BadRecord], object]
    template: str | None = None
    on_read: Callable[[int, int], object] = lambda _bytes, _records: None


def encode_directly(
    sources: Sequence[Source], encoding: DirectEncoding, rank: int = 0, world_size: int = 1
) -> Iterator[EncodedBatch]:
    """The documents of ``sources`` in order, many at a time, as ``prepare`` would encode them.

    Args:
        sources: the listed input.
        encoding: tokenizer, reading, template.
        rank: document i is given where i mod ``world_size`` is this; what is bad or empty as it is
            read is none.
        world_size: see there; what is not of this rank is read and not encoded.

    Raises:
        InputError: a source cannot be read or holds preferences, or ``how.refuse`` raises for a record.
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
    """What makes tokens; see ``Encoding``."""

    tokenizer: Tokenizer
    dtype: np.dtype[np.generic]
    chat: ChatEncoder | None
    fim: None = None
    media: None = None
    compared: bool = False


@final
class _LazyEncoder:
    """Tokenizer and template, compared and made ready when the first documents are there."""

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
            f"{source.name} holds preferences ({record_parser.detected}), and rows of it would train the answers "
            "that are "
            "not wanted, too. Say what is to be trained: a formatter of SFTDataset that returns the prompt and the "
            "wanted answer, or batchloom prepare with --map prompt=prompt,completion=chosen."
        )


@final
class EncodedDocuments:
    """Encoded documents in memory, which pools and assembly take as they take a store.

    Attributes:
        lengths: lengths of the documents in tokens.
        end_id: the id that fills padding.
        masked: whether some tokens are not trained.
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
        """The ids of spans of documents, as views; arguments as of ``Store.read``."""
        begins = self._starts[documents] + starts
        return [self._tokens[a : a + n] for a, n in zip(begins, lengths, strict=True)]

    def mask(
        self, documents: DocumentNumbers, starts: DocumentNumbers, lengths: DocumentNumbers
    ) -> list[NDArray[np.bool_]]:
        """For the tokens of spans whether each is trained, as views."""
        begins = self._starts[documents] + starts
        return [self._trained[a : a + n] for a, n in zip(begins, lengths, strict=True)]


def _trained_mask(encoded: EncodedBatch) -> NDArray[np.bool_]:
    return np.ones(encoded.tokens.size, bool) if encoded.trained is None else encoded.trained
