"""The lengths of a store that lies elsewhere: of a large one only the blocks that are asked for."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.remote import BLOCK_BYTES
from batchloom.store.format import StoreLengths
from batchloom.store.read.remote_blocks import RemoteBlocks

_LENGTHS_PER_BLOCK = BLOCK_BYTES // 4
# Up to so many, lengths are had as a whole: 16 MiB of them, and 32 MiB of where each document begins.
MAX_LOCAL_LENGTHS = 1 << 22

Ids = NDArray[np.int64]


@final
class LocalLengths:
    """Where documents begin, of a store whose lengths are all here.

    Attributes:
        lengths: of all documents.
    """

    def __init__(self, blocks: RemoteBlocks) -> None:
        found = blocks.whole(blocks.files.lengths)
        arrays = [data.view("<u4") for data in found]
        self.lengths = StoreLengths(*arrays)
        ends = np.cumsum(np.concatenate(arrays), dtype=np.int64)
        self._begins = np.concatenate([np.zeros(1, np.int64), ends])

    def spans(self, documents: Ids) -> tuple[Ids, NDArray[np.uint32]]:
        """Tokens of the subset before each document, int64, and its own, uint32."""
        return self._begins[documents], self.lengths.take(documents)


@final
class RemoteLengths:
    """The lengths of the documents of a subset, and where these begin, a few blocks at a time.

    Args:
        blocks: the blocks of the subset's files.
        layers: how many documents each generation added.
        tokens: how many tokens each generation added.

    Attributes:
        layers: how many documents each generation added; a plan packs no two of them together.
        size: documents of all.
    """

    def __init__(self, blocks: RemoteBlocks, layers: list[int], tokens: list[int]) -> None:
        self._blocks, self.layers, self.size = blocks, tuple(layers), sum(layers)
        self._starts = np.cumsum([0, *layers[:-1]])
        self._tokens = np.cumsum([0, *tokens[:-1]])
        files = blocks.files.files
        own = [files[number] for number in blocks.files.lengths]
        self._bases = np.array([one.base for one in own], np.int64)
        self._sizes = np.array([one.size for one in own], np.int64)
        self._entries = np.array([files[one.beside].base for one in own], np.int64)

    @property
    def lengths(self) -> "RemoteLengths":
        """Itself: what a plan takes lengths from."""
        return self

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Lengths of these documents in tokens, uint32 of the same length."""
        table, rows, columns, _ = self._rows(documents)
        found: NDArray[np.uint32] = table[rows, columns]
        return found

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Lengths of documents ``start`` to ``stop - 1``."""
        return self.take(np.arange(start, stop))

    def spans(self, documents: Ids) -> tuple[Ids, NDArray[np.uint32]]:
        """Tokens of the subset before each document, int64, and its own, uint32."""
        if not documents.size:
            return np.empty(0, np.int64), np.empty(0, np.uint32)
        table, rows, columns, before = self._rows(documents)
        inside = np.zeros(len(documents), np.int64)
        later = np.flatnonzero(columns)
        if later.size:
            # Sums of the part of a block before each document, all in one call.
            starts = rows[later] * _LENGTHS_PER_BLOCK
            bounds = np.stack([starts, starts + columns[later]], axis=1).ravel()
            inside[later] = np.add.reduceat(table.ravel(), bounds, dtype=np.int64)[::2]
        return before[rows] + inside, table[rows, columns]

    def _rows(
        self, documents: Ids
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64], Ids]:
        """The blocks that hold these lengths [K, 1024]; row and column of each; tokens before each row."""
        layers = self._starts.searchsorted(documents, side="right") - 1
        local = documents - self._starts[layers]
        keys = (layers << 44) | (local // _LENGTHS_PER_BLOCK)
        wanted, rows = np.unique(keys, return_inverse=True)
        of, numbers = wanted >> 44, wanted & (1 << 44) - 1
        sizes = np.minimum(self._sizes[of] - BLOCK_BYTES * numbers, BLOCK_BYTES)
        views = self._blocks.read(BLOCK_BYTES * (self._bases[of] + numbers), sizes, np.dtype("<u4"))
        table = np.zeros((len(wanted), _LENGTHS_PER_BLOCK), np.uint32)
        for row, view in zip(table, views, strict=True):
            row[: view.size] = view
        entries = self._blocks.read(
            BLOCK_BYTES * self._entries[of] + 16 * numbers, np.full(len(of), 16), np.dtype("<u8")
        )
        before = np.array([int(one[1]) for one in entries], np.int64) + self._tokens[of]
        return table, rows.ravel(), local % _LENGTHS_PER_BLOCK, before
