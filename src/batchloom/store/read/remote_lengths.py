"""Document lengths of a remote store; large ones are fetched by blocks."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.remote import BLOCK_BYTES
from batchloom.store.format.store_lengths import StoreLengths
from batchloom.store.read.remote_blocks import RemoteBlocks

_LENGTHS_PER_BLOCK = BLOCK_BYTES // 4
# Up to this many lengths are held in memory: 16 MiB of lengths, and 32 MiB of document offsets.
MAX_LOCAL_LENGTHS = 1 << 22

Ids = NDArray[np.int64]


@final
class LocalLengths:
    """Lengths and token offsets of all documents, held in memory.

    Attributes:
        lengths: lengths of all documents.
    """

    def __init__(self, blocks: RemoteBlocks) -> None:
        contents = blocks.read_files(blocks.files.lengths)
        arrays = [data.view("<u4") for data in contents]
        self.lengths = StoreLengths(*arrays)
        ends = np.cumsum(np.concatenate(arrays), dtype=np.int64)
        self._begins = np.concatenate([np.zeros(1, np.int64), ends])

    def spans(self, documents: Ids) -> tuple[Ids, NDArray[np.uint32]]:
        """Return token offsets in the subset, int64, and lengths, uint32."""
        return self._begins[documents], self.lengths.take(documents)


@final
class RemoteLengths:
    """Lengths and token offsets of documents, fetched a few blocks at a time.

    Args:
        blocks: blocks of the subset's files.
        layers: number of documents that each generation added.
        tokens: number of tokens that each generation added.

    Attributes:
        layers: number of documents that each generation added; a plan never packs documents of two layers together.
        size: number of documents.
    """

    def __init__(self, blocks: RemoteBlocks, layers: list[int], tokens: list[int]) -> None:
        self._blocks, self.layers, self.size = blocks, tuple(layers), sum(layers)
        self._starts = np.cumsum([0, *layers[:-1]])
        self._tokens = np.cumsum([0, *tokens[:-1]])
        files = blocks.files.files
        length_files = [files[number] for number in blocks.files.lengths]
        self._bases = np.array([file.base for file in length_files], np.int64)
        self._sizes = np.array([file.size for file in length_files], np.int64)
        self._entries = np.array([files[file.checksum_file].base for file in length_files], np.int64)

    @property
    def lengths(self) -> "RemoteLengths":
        """This object, for the planner."""
        return self

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Return the lengths of ``documents`` in tokens, uint32 of the same length."""
        table, rows, columns, _ = self._read_rows(documents)
        lengths: NDArray[np.uint32] = table[rows, columns]
        return lengths

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the lengths of documents ``start`` to ``stop - 1``, uint32."""
        return self.take(np.arange(start, stop))

    def spans(self, documents: Ids) -> tuple[Ids, NDArray[np.uint32]]:
        """Return token offsets in the subset, int64, and lengths, uint32."""
        if not documents.size:
            return np.empty(0, np.int64), np.empty(0, np.uint32)
        table, rows, columns, preceding_tokens = self._read_rows(documents)
        block_tokens = np.zeros(len(documents), np.int64)
        inner_rows = np.flatnonzero(columns)
        if inner_rows.size:
            # One reduceat call sums the lengths before each document in its block.
            starts = rows[inner_rows] * _LENGTHS_PER_BLOCK
            bounds = np.stack([starts, starts + columns[inner_rows]], axis=1).ravel()
            block_tokens[inner_rows] = np.add.reduceat(table.ravel(), bounds, dtype=np.int64)[::2]
        return preceding_tokens[rows] + block_tokens, table[rows, columns]

    def _read_rows(self, documents: Ids) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64], Ids]:
        """Read the blocks that hold these lengths.

        Returns the blocks [K, 1024], row and column of each document, and the tokens before each block.
        """
        layers = self._starts.searchsorted(documents, side="right") - 1
        layer_documents = documents - self._starts[layers]
        keys = (layers << 44) | (layer_documents // _LENGTHS_PER_BLOCK)
        block_keys, rows = np.unique(keys, return_inverse=True)
        block_layers, numbers = block_keys >> 44, block_keys & (1 << 44) - 1
        sizes = np.minimum(self._sizes[block_layers] - BLOCK_BYTES * numbers, BLOCK_BYTES)
        views = self._blocks.read(BLOCK_BYTES * (self._bases[block_layers] + numbers), sizes, np.dtype("<u4"))
        table = np.zeros((len(block_keys), _LENGTHS_PER_BLOCK), np.uint32)
        for row, view in zip(table, views, strict=True):
            row[: view.size] = view
        entries = self._blocks.read(
            BLOCK_BYTES * self._entries[block_layers] + 16 * numbers,
            np.full(len(block_layers), 16),
            np.dtype("<u8"),
        )
        preceding_tokens = np.array([int(entry[1]) for entry in entries], np.int64) + self._tokens[block_layers]
        return table, rows.ravel(), layer_documents % _LENGTHS_PER_BLOCK, preceding_tokens
