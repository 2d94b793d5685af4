"""Encoding of inputs without a store, and the documents in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.document_facts import iter_texts
from batchloom.preparation.documents.encode_chat import ChatEncoder
from batchloom.preparation.documents.encode_documents import DocumentEncoder, encode_documents, normalize_records
from batchloom.preparation.documents.encoded_batch import EncodedBatch
from batchloom.preparation.documents.record_parsers import RecordParser
from batchloom.sources import PartReader, SourcePart
from batchloom.sources.files import Source
from batchloom.store import StoreLengths
from batchloom.store.format import OBJECTIVES
from batchloom.tokens import Tokenizer, verify_control_tokens, verify_engine

DIRECT_DTYPE = np.dtype(np.uint32)
_COMPARED_DOCUMENTS = 256
DocumentNumbers = NDArray[np.int64]


@final
class DirectEncoder:
    """Encoder of inputs without a store, in input order, like ``prepare``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        get_parser: Callable[[Source], RecordParser],
        on_bad_record: Callable[[Source, BadRecord], object],
        template: str | None = None,
        on_read: Callable[[int, int], object] = lambda _bytes, _records: None,
    ) -> None:
        """Prepare to encode.

        Args:
            tokenizer: the tokenizer.
            get_parser: returns the record parser of a source.
            on_bad_record: called with each record that cannot be used; may raise.
            template: chat template, named as in a recipe.
            on_read: called with the bytes and records of each batch read.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._get_parser = get_parser
        self._on_bad_record = on_bad_record
        self._on_read = on_read
        # Tokenizer and template are verified when the first documents arrive.
        self._encoder: DocumentEncoder | None = None

    def encode(self, sources: Sequence[Source], rank: int = 0, world_size: int = 1) -> Iterator[EncodedBatch]:
        """Encode the documents of ``sources`` in order, in batches.

        Args:
            sources: the listed input.
            rank: document i is encoded if i mod ``world_size`` equals this; records that are bad or empty when
                read do not count.
            world_size: number of ranks; documents of other ranks are read but not encoded.

        Raises:
            InputError: a source cannot be read or has another objective, or ``on_bad_record`` raises.
            TemplateError: the template cannot be used.
        """
        number = 0
        for source in sources:
            record_parser = self._get_parser(source)
            consumed = 0
            if record_parser.objective:
                raise InputError(
                    f"{source.name} holds {OBJECTIVES[record_parser.objective].contents} ({record_parser.detected}), "
                    "and training its rows would train them as texts. Choose what is trained: a formatter of "
                    "SFTDataset that returns the prompt and the chosen answer, or batchloom prepare with --map "
                    "prompt=prompt,completion=chosen."
                )
            with PartReader(SourcePart(source, 0, source.size), record_parser.rules) as reader:
                for batch in reader:
                    self._on_read(reader.consumed - consumed, batch.records_read)
                    consumed = reader.consumed
                    record_parser.parse_records(batch)
                    for bad in batch.bad:
                        self._on_bad_record(source, bad)
                    normalize_records(batch, record_parser.record_kind, normalized=True)
                    rank_slice = slice((rank - number) % world_size, None, world_size)
                    number += len(batch.values)
                    documents = batch.values[rank_slice]
                    weights = batch.weights[rank_slice]
                    if not documents:
                        continue
                    positions = list(zip(batch.records[rank_slice], batch.offsets[rank_slice], strict=True))
                    encoder = self._get_encoder(record_parser, documents)
                    encoded_batch = encode_documents(encoder, record_parser, documents, weights)
                    for fault in encoded_batch.faults:
                        bad = BadRecord(*positions[fault.number], None, fault.reason, fault.snippet)
                        self._on_bad_record(source, bad)
                    yield encoded_batch
                reader.finish()

    def _get_encoder(self, record_parser: RecordParser, documents: list[Any]) -> DocumentEncoder:
        encoder = self._encoder
        if encoder is None:
            texts = [text for document in islice(documents, _COMPARED_DOCUMENTS) for text in iter_texts(document)]
            encoder = DocumentEncoder(tokenizer=verify_engine(self._tokenizer, texts), dtype=DIRECT_DTYPE)
        if encoder.chat is None and record_parser.templated:
            exact = verify_control_tokens(encoder.tokenizer)
            encoder = replace(encoder, chat=ChatEncoder(exact, self._template))
        self._encoder = encoder
        return encoder


@final
class EncodedDocuments:
    """Encoded documents in memory, with the read interface of a store.

    Attributes:
        lengths: lengths of the documents in tokens.
        end_id: id that fills padding.
        masked: some tokens are not trained.
        weighted: some tokens have other loss weights than 0 and 1.
    """

    def __init__(self, encoded: Sequence[EncodedBatch], end_id: int) -> None:
        lengths = np.concatenate([np.zeros(0, np.uint32), *(batch.lengths for batch in encoded)])
        self.lengths = StoreLengths(lengths)
        self.end_id = end_id
        self._tokens = np.concatenate([np.zeros(0, DIRECT_DTYPE), *(batch.ids for batch in encoded)])
        self._flags = LossFlags.join(batch.flags for batch in encoded)
        self.masked = not self._flags.is_plain
        self.weighted = self._flags.has_weights
        self._starts = np.cumsum(lengths, dtype=np.int64) - lengths

    def locate(self, documents: DocumentNumbers) -> None:
        """Return None: the documents are in memory, and not in mapped shards."""

    def read(
        self, documents: DocumentNumbers, starts: DocumentNumbers, lengths: DocumentNumbers
    ) -> list[NDArray[np.generic]]:
        """Return the ids of document spans as views; arguments as in ``Store.read``."""
        begins = self._starts[documents] + starts
        return [self._tokens[a : a + n] for a, n in zip(begins, lengths, strict=True)]

    def flags(self, documents: DocumentNumbers, starts: DocumentNumbers, lengths: DocumentNumbers) -> list[LossFlags]:
        """Return the loss flags of document spans as views."""
        begins = self._starts[documents] + starts
        return [self._flags[a : a + n] for a, n in zip(begins, lengths, strict=True)]
