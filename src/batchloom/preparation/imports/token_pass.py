"""One pass over existing token ids that checks every id and hashes every document."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.preparation.imports.token_files import TokenFile
from batchloom.preparation.units.unit_files import concatenate_ranges

_MAX_BATCH_DOCUMENTS = 1 << 16
_MAX_BATCH_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Consecutive documents of a file.

    Attributes:
        first: number of the first document in the file.
        lengths: number of tokens of each document, int64 [n].
        starts: index of the first token of each document in the file, int64 [n].
        tokens: ids of all documents, concatenated, in the file's dtype.
    """

    first: int
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[Any]


@dataclass(slots=True)
class EdgeTokens:
    """First and last ids of documents; several values mean that documents differ."""

    firsts: set[int] = field(default_factory=set)
    lasts: set[int] = field(default_factory=set)

    def add(self, batch: TokenBatch) -> None:
        """Add a batch of documents; empty ones have no edges."""
        filled = batch.lengths > 0
        ends = np.cumsum(batch.lengths)[filled]
        if not ends.size:
            return
        firsts = batch.tokens[ends - batch.lengths[filled]]
        lasts = batch.tokens[ends - 1]
        # The minimum and maximum suffice to tell whether the ids differ.
        self.firsts |= {int(firsts.min()), int(firsts.max())}
        self.lasts |= {int(lasts.min()), int(lasts.max())}


def iter_token_batches(file: TokenFile) -> Iterator[TokenBatch]:
    """Yield the documents of a file in order, in batches of bounded size.

    A batch exceeds the bound only if it is a single longer document.
    """
    token_offset = first = 0
    while first < len(file.lengths):
        lengths = file.lengths[first : first + _MAX_BATCH_DOCUMENTS].astype(np.int64)
        cumulative_tokens = np.cumsum(lengths)
        count = max(1, int(np.searchsorted(cumulative_tokens, _MAX_BATCH_TOKENS, side="right")))
        lengths = lengths[:count]
        total = int(cumulative_tokens[min(count, len(cumulative_tokens)) - 1])
        if file.starts is None:
            starts = token_offset + cumulative_tokens[:count] - lengths
            tokens = file.tokens[token_offset : token_offset + total]
        else:
            starts = file.starts[first : first + count]
            tokens = concatenate_ranges(file.tokens, starts, starts + lengths)
        yield TokenBatch(first, lengths, starts, tokens)
        token_offset, first = token_offset + total, first + len(lengths)


def hash_ids(batch: TokenBatch) -> NDArray[np.uint64]:
    """Return the XXH3-128 of each document's ids, (low, high) halves, uint64 [n, 2].

    The ids are hashed as little-endian u32, so the hash does not depend on the file's dtype.
    """
    if len(batch.lengths) == 1:
        digest = xxhash.xxh3_128()
        for start in range(0, batch.tokens.size, _MAX_BATCH_TOKENS):
            digest.update(batch.tokens[start : start + _MAX_BATCH_TOKENS].astype("<u4").data)
        digests = digest.digest()
    else:
        data = batch.tokens.astype("<u4").view(np.uint8).data
        stops = np.cumsum(batch.lengths * 4).tolist()
        compute_digest = xxhash.xxh3_128_digest
        digests = b"".join([compute_digest(data[a:b]) for a, b in zip([0, *stops[:-1]], stops, strict=True)])
    # A digest is big-endian, its high half first.
    return np.frombuffer(digests, ">u8").reshape(-1, 2)[:, ::-1].astype(np.uint64)


@final
class VocabularyCheck:
    """Check that ids belong to a vocabulary.

    Args:
        vocab_size: every id must be below it.
        whose: owner of the vocabulary, for the message.
    """

    def __init__(self, vocab_size: int, whose: str) -> None:
        self._vocab_size, self._whose = vocab_size, whose

    def check_dtype(self, file: TokenFile) -> None:
        """Raise InputError if the dtype cannot hold the vocabulary, so ids were truncated."""
        most = int(np.iinfo(file.tokens.dtype).max)
        if self._vocab_size - 1 > most:
            raise InputError(
                f"{file.token_input.path} holds {file.tokens.dtype.name} ids, which end at {most:,}; {self._whose} "
                f"has {self._vocab_size:,}: the ids were made by another tokenizer, or truncated when they were "
                "written. Name the tokenizer that made them with --tokenizer or --vocab-size."
            )

    def check(self, file: TokenFile, batch: TokenBatch) -> None:
        """Raise InputError if an id of these documents is outside the vocabulary."""
        ids = batch.tokens
        if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
            return
        token_index = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
        document_index = int(np.searchsorted(np.cumsum(batch.lengths), token_index, side="right"))
        raise InputError(
            f"{file.token_input.path}, document {batch.first + document_index}: holds id {int(ids[token_index])}; "
            f"{self._whose} has ids 0 to {self._vocab_size - 1:,}. Name the tokenizer that made them with "
            "--tokenizer, or the size of its vocabulary with --vocab-size; a wrong --dtype also gives wrong ids."
        )
