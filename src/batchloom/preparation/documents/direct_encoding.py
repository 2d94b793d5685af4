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
        reading: how the records of a source become documents.
        refuse: is told of each record that cannot be used, and may raise.
        template: the chat template, as a recipe names it.
        seen: is told of the bytes and the records of each stretch that was read.
    """

    tokenizer: Tokenizer
    reading: Callable[[Source], RecordParser]
    refuse: Callable[[Source, BadRecord], object]
    template: str | None = None
    seen: Callable[[int, int], object] = lambda _bytes, _records: None


def encode_directly(
    sources: Sequence[Source], how: DirectEncoding, rank: int = 0, world_size: int = 1
) -> Iterator[EncodedBatch]:
    """The documents of ``sources`` in order, many at a time, as ``prepare`` would encode them.

    Args:
        sources: the listed input.
        how: tokenizer, reading, template.
        rank: document i is given where i mod ``world_size`` is this; what is bad or empty as it is
            read is none.
        world_size: see there; what is not of this rank is read and not encoded.

    Raises:
        InputError: a source cannot be read or holds preferences, or ``how.refuse`` raises for a record.
        TemplateError: the template cannot be used.
    """
    encoder = _LazyEncoder(how)
    number = 0
    for source in sources:
        reading, consumed = how.reading(source), 0
        _refuse_preferences(source, reading)
        with PartReader(SourcePart(source, 0, source.size), reading.rules) as reader:
            for found in reader:
                how.seen(reader.consumed - consumed, found.seen)
                consumed = reader.consumed
                reading.parse_records(found)
                for bad in found.bad:
                    how.refuse(source, bad)
                normalize_records(found, reading.way, normalized=True)
                first = (rank - number) % world_size
                number += len(found.values)
                mine = slice(first, None, world_size)
                documents, places = found.values[mine], found.records[mine]
                if not documents:
                    continue
                offsets = found.offsets[mine]
                made = encoder.encode(reading, documents)
                for left in made.faults:
                    at = left.number
                    bad = BadRecord(places[at], offsets[at], None, left.reason, left.snippet)
                    how.refuse(source, bad)
                yield made
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

    def __init__(self, how: DirectEncoding) -> None:
        self._how = how
        self._ready: _DirectContext | None = None

    def encode(self, reading: RecordParser, documents: list[Any]) -> EncodedBatch:
        ready = self._ready
        if ready is None:
            texts = [
                text for one in islice(documents, _COMPARED_DOCUMENTS) for text in iter_texts(one)
            ]
            ready = _DirectContext(verify_engine(self._how.tokenizer, texts), DIRECT_DTYPE, None)
        if ready.chat is None and reading.templated:
            exact = verify_control_tokens(ready.tokenizer, ())
            ready = replace(ready, chat=ChatEncoder(exact, self._how.template))
        self._ready = ready
        return encode_documents(ready, reading, documents)


def _refuse_preferences(source: Source, reading: RecordParser) -> None:
    if reading.preferences:
        raise InputError(
            f"{source.name} holds preferences ({reading.detected}), and rows of it would train the answers that are "
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
        tokens = [one.tokens for one in encoded]
        lengths = np.concatenate([np.zeros(0, np.uint32), *(one.lengths for one in encoded)])
        self.lengths, self.end_id = StoreLengths(lengths), end_id
        self.masked = any(one.trained is not None for one in encoded)
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
