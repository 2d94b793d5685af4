"""Documents of a tokenized unit, in batches with their tokens."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.phases.remaining_rows import iter_rows_with_reasons
from batchloom.preparation.phases.subset_decision import ShardSettings
from batchloom.preparation.units.unit_rows import stored_lengths, tokens_file_name, trained_file_name
from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.store import CHOSEN, WORK_NAME
from batchloom.store.format import SUBSETS

_CHUNK_TOKENS = 1 << 20


@final
class UnitTokenReader:
    """Reader of a subset's tokens and flags from front to back; a context manager."""

    def __init__(self, folder: Path, subset: str, dtype: np.dtype[np.generic]) -> None:
        self._path = folder / tokens_file_name(subset)
        self._dtype = dtype
        self._hash = xxhash.xxh3_128()
        self._flags_path = folder / trained_file_name(subset)
        with contextlib.ExitStack() as stack:
            with translate_read_errors(self._path):
                self._tokens = stack.enter_context(self._path.open("rb"))
            with translate_read_errors(self._flags_path):
                has_flags = self._flags_path.exists()
                self._flags = stack.enter_context(self._flags_path.open("rb")) if has_flags else None
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, count: int) -> tuple[NDArray[np.generic], LossFlags]:
        """Return the next tokens and their flags."""
        with translate_read_errors(self._path):
            tokens = np.fromfile(self._tokens, self._dtype, count)
        with translate_read_errors(self._flags_path):
            codes = None if self._flags is None else np.fromfile(self._flags, np.uint8, count)
        if len(tokens) < count or (codes is not None and len(codes) < count):
            raise self._make_changed_error()
        self._hash.update(tokens.data)
        return tokens, LossFlags(count, codes)

    def check(self, checksum: str) -> None:
        """Raise if other tokens were read than written; no later check could tell."""
        if self._hash.hexdigest() != checksum:
            raise self._make_changed_error()

    def _make_changed_error(self) -> StoreConflictError:
        work = next(folder for folder in self._path.parents if folder.name == WORK_NAME)
        return StoreConflictError(
            f"{self._path} holds other bytes than were written; delete {work} to start over, and check the disk."
        )


class ShardBatch(NamedTuple):
    """Documents of a unit, with the tokens and flags of each subset.

    ``first`` is the number of the first document, ``codes`` are the subsets by the shares, ``starts`` is the
    offset of each document in the tokens of its subset.
    """

    rows: NDArray[np.void]
    remaining_mask: NDArray[np.bool_]
    codes: NDArray[np.uint8]
    starts: NDArray[np.int64]
    tokens: list[tuple[NDArray[np.generic], LossFlags]]
    first: int


def split_by_subset(
    codes: NDArray[np.uint8], row_indices: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (subset code, row indices) for runs of one subset; usually a single run."""
    boundaries = np.flatnonzero(np.diff(codes[row_indices])) + 1
    for subset_indices in np.split(row_indices, boundaries):
        if subset_indices.size:
            yield int(codes[subset_indices[0]]), subset_indices


def iter_shard_batches(
    folder: Path, resolution_folder: Path, settings: ShardSettings, checksums: Mapping[str, str]
) -> Iterator[ShardBatch]:
    """Yield the documents of a unit, and at the end check the tokens read.

    ``checksums`` are those of the token file of each subset.
    """
    first = 0
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(UnitTokenReader(folder, name, settings.dtype)) for name in SUBSETS]
        for rows, reason_codes in iter_rows_with_reasons(folder, resolution_folder):
            remaining_mask = np.ones(len(rows), bool) if reason_codes is None else reason_codes == 0
            codes = settings.membership.codes(rows)
            lengths = stored_lengths(rows)
            for begin, end in _iter_row_ranges(rows):
                row_slice = slice(begin, end)
                starts = np.zeros(end - begin, np.int64)
                tokens = []
                for code, reader in enumerate(readers):
                    selection = codes[row_slice] == code
                    stops = np.cumsum(lengths[row_slice][selection])
                    starts[selection] = stops - lengths[row_slice][selection]
                    tokens.append(reader.read(int(stops[-1]) if stops.size else 0))
                yield ShardBatch(
                    rows[row_slice], remaining_mask[row_slice], codes[row_slice], starts, tokens, first + begin
                )
            first += len(rows)
        for name, reader in zip(SUBSETS, readers, strict=True):
            reader.check(checksums[name])


def _iter_row_ranges(rows: NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """Yield row ranges of about a million tokens or one longer document.

    A preference pair is never split.
    """
    cumulative_lengths = np.cumsum(rows["length"], dtype=np.int64)
    start = 0
    while start < len(rows):
        tokens_before = int(cumulative_lengths[start - 1]) if start else 0
        stop = max(int(np.searchsorted(cumulative_lengths, tokens_before + _CHUNK_TOKENS, side="right")), start + 1)
        stop += int(rows["side"][stop - 1] == CHOSEN)
        yield start, stop
        start = stop
