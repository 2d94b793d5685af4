"""Shards of one subset, filled with documents up to a number of tokens."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.settings.recipe import SHARD_DOCUMENTS
from batchloom.preparation.units.unit_rows import concatenate_ranges, select_flag_ranges
from batchloom.preparation.units.unit_sidecars import UnitSidecars
from batchloom.store import CHOSEN, ShardEntry
from batchloom.store.format import (
    SUBSETS,
    TOKEN_DTYPES,
    PairIndex,
    ProvenanceTable,
    compute_pair_numbers,
    format_shard_name,
)
from batchloom.store.write import ShardWriter, make_folder


@final
class ShardCutter:
    """Incremental cutter of one unit and subset into shards."""

    def __init__(self, most_tokens: int, most_documents: int = SHARD_DOCUMENTS) -> None:
        self._most_tokens = most_tokens
        self._most_documents = most_documents
        self._tokens = self._documents = 0
        self.shards = 0

    def cut(self, rows: NDArray[np.void]) -> list[tuple[int, int, bool]]:
        """Return ranges (start, stop, begins a shard) of rows that split no pair."""
        cumulative_tokens = np.cumsum(rows["length"], dtype=np.int64)
        # A shard may end after every document but the first of a pair.
        ends = np.flatnonzero(rows["side"] != CHOSEN) + 1
        reach = cumulative_tokens[ends - 1]
        shard_ranges = []
        end_index = 0
        start = 0
        while end_index < len(ends):
            before = int(reach[end_index - 1]) if end_index else 0
            room = before + self._most_tokens - self._tokens
            last = start + self._most_documents - self._documents
            next_end_index = int(np.searchsorted(reach, room, side="right"))
            next_end_index = min(next_end_index, int(np.searchsorted(ends, last, side="right")))
            if next_end_index <= end_index and self._documents:
                self._tokens = self._documents = 0
                continue
            next_end_index = max(next_end_index, end_index + 1)
            stop = int(ends[next_end_index - 1])
            fresh = self._documents == 0
            self.shards += fresh
            self._documents += stop - start
            self._tokens += int(reach[next_end_index - 1]) - before
            shard_ranges.append((start, stop, fresh))
            end_index = next_end_index
            start = stop
        return shard_ranges


_NO_SIDECARS = UnitSidecars()


@final
class SubsetWriter:
    """Writer of consecutive shards of one subset.

    ``sidecars`` are those of all documents of the unit.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        tokens_per_shard: int,
        first_shard: int = 0,
        first_part: int = 0,
        sidecars: UnitSidecars = _NO_SIDECARS,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._next = first_shard
        self._first_part = first_part
        self._cutter = ShardCutter(tokens_per_shard)
        self._shard: ShardWriter | None = None
        self._rows: list[NDArray[np.void]] = []
        self._sidecars = sidecars
        self._positions = list[NDArray[np.int64]]()
        self._entries: list[ShardEntry] = []

    def add(
        self,
        rows: NDArray[np.void],
        tokens: NDArray[np.generic],
        starts: NDArray[np.int64],
        row_indices: NDArray[np.int64],
        flags: LossFlags,
        first: int = 0,
    ) -> None:
        """Append the documents ``row_indices`` of ``rows``.

        ``starts`` is the offset of each row's first token in ``tokens``, whose loss flags are ``flags``. ``first`` is
        the index of the first row among the documents of the signatures.
        """
        for begin, end, starts_shard in self._cutter.cut(rows[row_indices]):
            if starts_shard:
                self._close()
                self._open()
            shard_indices = row_indices[begin:end]
            if self._shard is None:
                raise AssertionError("the first range of a cutter must start a shard")
            shard_rows = rows[shard_indices]
            bounds = starts[shard_indices], starts[shard_indices] + shard_rows["length"]
            self._shard.append(concatenate_ranges(tokens, *bounds), select_flag_ranges(flags, *bounds))
            self._rows.append(shard_rows)
            self._positions.append(first + shard_indices)

    def finish(self) -> list[ShardEntry]:
        """Close the last shard and return the entries of all shards."""
        self._close()
        return self._entries

    def abandon(self) -> None:
        if self._shard is not None:
            with contextlib.suppress(OSError):
                self._shard.abandon()

    def _open(self) -> None:
        make_folder(self._folder)
        self._shard = ShardWriter(self._folder / format_shard_name(self._next), self._dtype)
        self._next += 1

    def _close(self) -> None:
        if self._shard is not None:
            rows = np.concatenate(self._rows)
            self._rows = []
            provenance = make_provenance(rows, self._first_part)
            sides = make_sides(rows, self._first_part)
            lengths = rows["length"].astype(np.uint32)
            positions = np.concatenate(self._positions)
            self._positions = []
            entry = self._shard.finish(lengths, provenance, sides, *self._sidecars.take(positions, rows))
            self._entries.append(entry)
            self._shard = None


def make_provenance(rows: NDArray[np.void], first_part: int) -> ProvenanceTable:
    parts = (rows["part"] + np.uint32(first_part)).astype(np.uint32)
    return ProvenanceTable(rows["hash"], rows["record"], rows["offset"], parts)


def make_sides(rows: NDArray[np.void], first_part: int) -> PairIndex | None:
    """Return the pair index of the documents; None without an objective."""
    if not rows["side"].any():
        return None
    provenance = make_provenance(rows, first_part)
    return PairIndex(compute_pair_numbers(provenance.parts, provenance.records), rows["side"])


@contextlib.contextmanager
def open_subset_writers(store: Path, dtype: str, tokens_per_shard: int) -> Iterator[dict[str, SubsetWriter]]:
    """Open a writer of each subset; shards that are not finished are given up."""
    writers = {name: SubsetWriter(store / name, TOKEN_DTYPES[dtype], tokens_per_shard) for name in SUBSETS}
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.abandon()
