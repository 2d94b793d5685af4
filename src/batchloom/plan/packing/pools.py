"""Pools: groups of documents that are packed together, and their rows in an epoch."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, derive_round_keys, mix_in_place, shuffle_range
from batchloom.plan.packing.plan_spec import PlanSpec
from batchloom.plan.packing.rows import Rows, align_lengths, fit_lengths, pack_rows, reorder_rows
from batchloom.plan.packing.strategies import ORDER_FREE_STRATEGIES, count_sequences

MAX_MATERIALISED = 65_536
ROUNDS = 6
_U32 = np.uint64(32)


@final
class Permutation:
    """Keyed permutation of range(size), computed for any index in O(1).

    Above ``MAX_MATERIALISED`` items it is a Feistel network over a mixed radix a x b just above n (Black and Rogaway:
    Ciphers with Arbitrary Finite Domains, CT-RSA 2002: generalised Feistel and cycle walking). A round adds a keyed,
    fully mixed hash of one half to the other half, modulo that half's radix. Because a x b exceeds n by less than a,
    about one index in sqrt(n) is walked a second time. At or below it, an argsort of keyed hashes is simpler and
    unbiased.

    Args:
        size: number of items, 0 to 2**62.
        key: 128 bits as two 64-bit halves.
    """

    __slots__ = ("_keys", "_left_radix", "_right_radix", "_table", "size")

    def __init__(self, size: int, key: HashKey) -> None:
        self.size = size
        self._table = shuffle_range(size, key) if size <= MAX_MATERIALISED else None
        root = math.isqrt(max(size - 1, 0)) + 1
        self._left_radix = root
        self._right_radix = -(-size // root)
        self._keys = [np.uint64(k) for k in derive_round_keys(key, ROUNDS)]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the items at ``positions`` (each in [0, size)), int64 of the same length."""
        if self._table is not None:
            return self._table[positions]
        return self._walk_into_range(self._walk, positions)

    def find_positions(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of ``items``, int64 [N]; inverse of :meth:`at`."""
        if self._table is not None:
            positions = np.empty(self.size, np.int64)
            positions[self._table] = np.arange(self.size)
            return positions[items]
        return self._walk_into_range(self._walk_back, items)

    def _walk_into_range(
        self, walk: Callable[[NDArray[np.uint64]], NDArray[np.uint64]], values: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Walk values again until they are below ``size``."""
        out = walk(values.astype(np.uint64))
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            rewalked = walk(out[outside])
            out[outside] = rewalked
            outside = outside[rewalked >= self.size]
        return out.view(np.int64)

    def _walk_back(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, np.uint64(self._right_radix))
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                left = _subtract_hash(left, right, key, self._left_radix)
            else:
                right = _subtract_hash(right, left, key, self._right_radix)
        left *= np.uint64(self._right_radix)
        left += right
        return left

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, np.uint64(self._right_radix))
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = _add_hash(left, right, key, self._left_radix)
            else:
                right = _add_hash(right, left, key, self._right_radix)
        left *= np.uint64(self._right_radix)
        left += right
        return left


def _hash(other_half: NDArray[np.uint64], key: np.uint64, radix: int) -> NDArray[np.uint64]:
    """Return a hash in [0, radix), reduced by multiply and shift (radix < 2**32)."""
    value = mix_in_place(other_half ^ key)
    value >>= _U32
    value *= np.uint64(radix)
    value >>= _U32
    return value


def _subtract_hash(
    half: NDArray[np.uint64], other_half: NDArray[np.uint64], key: np.uint64, radix: int
) -> NDArray[np.uint64]:
    """Return ``(half - hash(other_half)) mod radix``."""
    value = half + np.uint64(radix) - _hash(other_half, key, radix)
    value -= np.where(value >= np.uint64(radix), np.uint64(radix), np.uint64(0))
    return value


def _add_hash(
    half: NDArray[np.uint64], other_half: NDArray[np.uint64], key: np.uint64, radix: int
) -> NDArray[np.uint64]:
    """Return ``(half + hash(other_half)) mod radix``."""
    value = _hash(other_half, key, radix)
    value += half
    value -= np.where(value >= np.uint64(radix), np.uint64(radix), np.uint64(0))
    return value


_CHUNK_DOCUMENTS = 1 << 20


class DocumentLengths(Protocol):
    """Lengths of a source's documents, in tokens.

    Lengths may also have ``layers``, the documents that each store generation added, and ``document_count``, the
    number of documents that are served if the others have length 0.
    """

    @property
    def size(self) -> int:
        """Number of documents."""

    def take(self, documents: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the lengths of these documents, uint32 of the same length."""


@dataclass(frozen=True, slots=True)
class ExcludedDocuments:
    """Documents and tokens that a plan excludes from every epoch.

    ``tokens`` includes those cut off truncated documents.
    """

    documents: int
    tokens: int


@final
class _GenerationPools:
    """Pools of the documents that one generation added.

    Attributes:
        first: number of the first document.
        documents: number of documents.
        first_pool: number of the first pool.
        count: number of pools.
        block: neighbouring documents that are permuted as one.
        blocks: permutation of the blocks; None without shuffling.
    """

    __slots__ = ("block", "blocks", "count", "documents", "first", "first_pool")

    def __init__(self, first: int, documents: int, first_pool: int, spec: PlanSpec) -> None:
        self.first = first
        self.documents = documents
        self.first_pool = first_pool
        self.block = spec.block_for(documents) if spec.shuffle else 1
        self.count = -(-documents // spec.pool_size)
        self.blocks: Permutation | None = None


@final
class Pools:
    """Pools of one source under one spec; membership depends on the seed alone.

    A pool holds documents of one generation of the store. Appended documents form pools of their own and leave
    existing pools unchanged.

    Args:
        lengths: lengths of the source's documents.
        spec: settings of the plan.
        source: name of the source, part of every key.

    Attributes:
        documents: number of documents of the source.
        served_documents: number of documents that are served; the others have length 0.
        layers: number of documents that each generation added.
        count: number of pools.
        blocks: number of neighbouring documents permuted as one, per layer.
    """

    __slots__ = (
        "_layers",
        "_lengths",
        "_source",
        "_spec",
        "blocks",
        "count",
        "documents",
        "layers",
        "served_documents",
    )

    def __init__(self, lengths: DocumentLengths, spec: PlanSpec, source: str) -> None:
        self._lengths = lengths
        self._spec = spec
        self._source = source
        self.documents = lengths.size
        self.served_documents: int = getattr(lengths, "document_count", lengths.size)
        self.layers: tuple[int, ...] = getattr(lengths, "layers", (lengths.size,))
        self._layers: list[_GenerationPools] = []
        first = self.count = 0
        for number, documents in enumerate(self.layers):
            layer = _GenerationPools(first, documents, self.count, spec)
            if spec.shuffle:
                size = -(-documents // layer.block)
                layer.blocks = Permutation(size, self._key("blocks", layer=number))
            self._layers.append(layer)
            first = first + documents
            self.count = self.count + layer.count
        self.blocks = tuple(layer.block for layer in self._layers)

    def _key(self, purpose: str, epoch: int = -1, pool: int = -1, layer: int = 0) -> HashKey:
        """Derive a key; keys of layer 0 do not name it."""
        layer_parts = (layer,) if layer else ()
        return derive_key(self._spec.seed, self._source, purpose, epoch, pool, *layer_parts)

    def _pool_key(self, purpose: str, pool: int, epoch: int = -1) -> HashKey:
        number = self._find_layer(pool)
        return self._key(purpose, epoch, pool - self._layers[number].first_pool, number)

    def _find_layer(self, pool: int) -> int:
        return bisect_right(self._layers, pool, key=lambda layer: layer.first_pool) - 1

    def members(self, pool: int, max_documents: int | None = None) -> NDArray[np.int64]:
        """Return the documents of a pool in packing order, int64 [N].

        With ``max_documents`` only about as many, of the first blocks.
        """
        layer, members = self._draw_members(pool, max_documents)
        if layer.block == 1:
            return members
        return members[shuffle_range(len(members), self._pool_key("members", pool))]

    def _draw_members(self, pool: int, max_documents: int | None = None) -> tuple[_GenerationPools, NDArray[np.int64]]:
        """Return the layer and documents of a pool, before its blocks are mixed."""
        layer = self._layers[self._find_layer(pool)]
        size = self._spec.pool_size
        pool_index = pool - layer.first_pool
        draw_count = min(size, max_documents or size)
        if layer.blocks is None:
            stop = min(pool_index * size + draw_count, layer.documents)
            return layer, np.arange(layer.first + pool_index * size, layer.first + stop)
        blocks = size // layer.block
        stop = min(pool_index * blocks + -(-draw_count // layer.block), layer.blocks.size)
        block_numbers = layer.blocks.at(np.arange(pool_index * blocks, stop))
        if layer.block == 1:
            return layer, block_numbers + layer.first
        members = (block_numbers[:, None] * layer.block + np.arange(layer.block)).ravel()
        return layer, members[members < layer.documents] + layer.first

    def find_pool(self, document: int) -> int:
        """Return the pool that contains a document."""
        number = bisect_right(self._layers, document, key=lambda layer: layer.first) - 1
        layer = self._layers[number]
        block = (document - layer.first) // layer.block
        if layer.blocks is not None:
            block = int(layer.blocks.find_positions(np.array([block]))[0])
        return layer.first_pool + block * layer.block // self._spec.pool_size

    def fit_members(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths that remain of documents under ``overlong``, int64 [N]."""
        return fit_lengths(self._lengths.take(members), self._spec)

    def refuse_overlong(self) -> None:
        """Raise PlanError for the first document longer than ``seq_len``, if there is one."""
        for start, lengths in self._iter_length_chunks():
            if lengths.max(initial=0) > self._spec.seq_len:
                first_overlong = int((lengths > self._spec.seq_len).argmax())
                raise PlanError(
                    f"Document {start + first_overlong} of source {self._source!r} has {lengths[first_overlong]} "
                    f"tokens, more than seq_len {self._spec.seq_len}, and overlong='error' is set. Raise seq_len, or "
                    "choose overlong='split', 'drop' or 'truncate'."
                )

    def left_out(self) -> ExcludedDocuments:
        """Count the documents and tokens that ``overlong`` excludes from every epoch."""
        documents = tokens = 0
        seq_len = self._spec.seq_len
        overlong = self._spec.overlong
        if overlong in ("drop", "truncate"):
            for _, lengths in self._iter_length_chunks():
                overlong_lengths = lengths[lengths > seq_len].astype(np.int64)
                documents += overlong_lengths.size if overlong == "drop" else 0
                tokens += int(overlong_lengths.sum()) - (0 if overlong == "drop" else seq_len * overlong_lengths.size)
        return ExcludedDocuments(documents, tokens)

    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return max(int(lengths.max(initial=0)) for _, lengths in self._iter_length_chunks())

    def _iter_length_chunks(self) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield all lengths in store order in chunks, each with its first document."""
        for start in range(0, self.documents, _CHUNK_DOCUMENTS):
            yield (start, self._lengths.take(np.arange(start, min(start + _CHUNK_DOCUMENTS, self.documents))))

    def count_sequences(self, pool: int) -> int:
        """Return the number of sequences of a pool, the same in every epoch."""
        # The count depends on the document order only for strategies that pack documents in the given order.
        members = self._draw_members(pool)[1] if self._spec.packing in ORDER_FREE_STRATEGIES else self.members(pool)
        return self.count_packed(self.fit_members(members))

    def count_packed(self, fitted_lengths: NDArray[np.int64]) -> int:
        """Return the number of sequences that documents of these fitted lengths pack into."""
        aligned_lengths = align_lengths(fitted_lengths, self._spec.align)
        return count_sequences(aligned_lengths, self._spec.seq_len, self._spec.packing)

    def layers_identity(self) -> dict[str, list[list[int]]]:
        """Return documents and block of each layer for the identity, if there are several."""
        layers = zip(self.layers, self.blocks, strict=True)
        return {"layers": [list(layer) for layer in layers]} if len(self.layers) > 1 else {}

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the pools in the order of an epoch, int64 [count]."""
        if not self._spec.shuffle:
            return np.arange(self.count)
        return shuffle_range(self.count, self._key("pools", epoch))

    def rows(self, pool: int, epoch: int) -> Rows:
        """Return all rows of a pool in the order of an epoch."""
        members = self.members(pool)
        keys = (self._pool_key("spans", pool), self._pool_key("sequences", pool, epoch))
        return pack_rows(members, np.zeros_like(members), self.fit_members(members), self._spec, keys)

    def rebuild_rows(self, rows: Rows, pool: int, previous_epoch: int, epoch: int) -> Rows:
        """Return the rows of a pool for an epoch from those of another epoch.

        Both epochs pack the same sequences, so only their order changes.

        Args:
            rows: rows of the pool in the order of ``previous_epoch``.
            pool: number of the pool.
            previous_epoch: epoch of ``rows``.
            epoch: epoch of the result.
        """
        if not self._spec.shuffle:
            return rows
        inverse_order = np.empty(len(rows), np.int64)
        inverse_order[shuffle_range(len(rows), self._pool_key("sequences", pool, previous_epoch))] = np.arange(
            len(rows)
        )
        return reorder_rows(rows, inverse_order[shuffle_range(len(rows), self._pool_key("sequences", pool, epoch))])
