"""Counts and examples of removed duplicates by pair of sources."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.files import read_regular_file, release_pages
from batchloom.preparation.dedup.duplicate_search import DUPLICATE
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.report.report_pairs import (
    DuplicateExample,
    DuplicatePair,
    DuplicatePairCounter,
    OmittedRows,
    group_sources,
)
from batchloom.preparation.units.unit_files import ROW, ROWS_NAME, stored_lengths, tokens_file_name
from batchloom.preparation.units.unit_report import MAX_SAMPLES
from batchloom.preparation.units.work_folder import TokenizedUnit, open_attempt_file, translate_read_errors
from batchloom.store import write_file
from batchloom.store.format import SUBSETS
from batchloom.tokens import Tokenizer

# Source name of documents that the store already holds.
STORE_LABEL = "(the store)"
_CHUNK_ROWS = 1 << 20
_SNIPPET_TOKENS = 64
# Rows that are examined for examples per chunk.
_EXAMPLE_CANDIDATES = 1000

# Duplicates by pair of sources, and the counts of pairs that are not listed.
PairList = tuple[list[DuplicatePair], OmittedRows]


def load_or_find_pairs(path: Path, attempt: str, find: Callable[[], PairList]) -> PairList:
    """Load the pairs stored at ``path``, or find them and store them there.

    Writing shards deletes the files that examples are read from, so a resumed job cannot find the pairs again.
    The file name must cover everything that decides the result.
    """
    if path.exists():
        with translate_read_errors(path):
            stored_pairs: PairList = msgspec.json.decode(read_regular_file(path), type=PairList)
            return stored_pairs
    pairs = find()
    with open_attempt_file(path, attempt) as attempt_path:
        write_file(attempt_path, msgspec.json.encode(pairs))
    return pairs


@final
class DuplicatePairReader:
    """Reader of the duplicate files.

    ``base_file_count`` key files of stored shards precede those of the units. ``membership`` is the rule that the
    temporary token files are split by.
    """

    def __init__(
        self,
        units: Sequence[TokenizedUnit],
        base_file_count: int,
        inputs: Sequence[str],
        membership: SubsetRule,
        dtype: np.dtype[np.generic],
        tokenizer: Tokenizer,
    ) -> None:
        self._units, self._base_file_count, self._membership = units, base_file_count, membership
        self._dtype, self._tokenizer = dtype, tokenizer
        sources = [part.source for tokenized_unit in units for part in tokenized_unit.unit.parts]
        groups, names = group_sources([source.name for source in sources], [inputs[source.input] for source in sources])
        self._groups = np.array(groups, np.int64)
        self._firsts = np.cumsum([0, *(len(tokenized_unit.unit.parts) for tokenized_unit in units)])
        # The documents of earlier generations form one group, the last.
        self._pair_counter = DuplicatePairCounter([*names, *([STORE_LABEL] if base_file_count else [])])
        self._store_group = len(names)

    def read_pairs(self, files: Iterable[Path]) -> PairList:
        """Read duplicates by pair of sources, and the counts of pairs not listed."""
        for rows in _iter_duplicate_rows(files):
            dropped_groups = self._group(rows["unit"], rows["part"])
            kept_groups = self._group(rows["first_unit"], rows["first_part"])
            self._pair_counter.add(dropped_groups, kept_groups)
            for index in _select_examples(dropped_groups, kept_groups):
                pair = int(dropped_groups[index]), int(kept_groups[index])
                if self._pair_counter.needs_example(*pair) and (example := self._read_example(rows[index])):
                    self._pair_counter.add_example(*pair, example)
        return self._pair_counter.list_pairs()

    def _group(self, units: NDArray[np.uint32], parts: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the source group of each document, int64 [D]."""
        groups = np.full(len(units), self._store_group)
        new = units >= self._base_file_count
        groups[new] = self._groups[self._firsts[units[new] - self._base_file_count] + parts[new]]
        return groups

    def _read_example(self, row: np.void) -> DuplicateExample | None:
        """Read one example; None if the temporary files of either unit are missing."""
        unit, number = self._units[int(row["unit"]) - self._base_file_count], int(row["number"])
        first, kept_record = int(row["first_unit"]) - self._base_file_count, -1
        rows = _map_unit_rows(unit)
        if rows is None:
            return None
        words = self._read_first_words(unit, rows, number)
        if first >= 0:
            first_unit, first_number = self._units[first], int(row["first_number"])
            first_rows = _map_unit_rows(first_unit)
            if first_rows is None:
                return None
            kept_record = int(first_rows["record"][first_number])
            words = words or self._read_first_words(first_unit, first_rows, first_number)
        return DuplicateExample(int(rows["record"][number]), kept_record, words)

    def _read_first_words(self, unit: TokenizedUnit, rows: NDArray[np.void], number: int) -> str:
        if rows["seen"][number]:
            return ""
        code, start = self._membership.codes(rows["hash"][number : number + 1])[0], 0
        for begin in range(0, number, _CHUNK_ROWS):
            preceding_rows = rows[begin : min(begin + _CHUNK_ROWS, number)]
            subset_mask = self._membership.codes(preceding_rows["hash"]) == code
            start += int(stored_lengths(preceding_rows[subset_mask]).sum())
            release_pages(rows)
        count = min(int(rows["length"][number]), _SNIPPET_TOKENS)
        path = unit.folder / tokens_file_name(SUBSETS[code])
        with translate_read_errors(path):
            ids = np.fromfile(path, self._dtype, count, offset=start * self._dtype.itemsize)
        return self._tokenizer.decode(ids)


def _map_unit_rows(unit: TokenizedUnit) -> NDArray[np.void] | None:
    path = unit.folder / ROWS_NAME
    if not path.exists():
        return None
    with translate_read_errors(path):
        return np.memmap(path, ROW, "r").view(np.ndarray)


def _select_examples(dropped_groups: NDArray[np.int64], kept_groups: NDArray[np.int64]) -> list[int]:
    """Return the row positions of the first few rows of each of the largest pairs."""
    pairs = dropped_groups * (int(kept_groups.max(initial=0)) + 1) + kept_groups
    order = np.argsort(pairs, kind="stable")
    _, starts, counts = np.unique(pairs[order], return_index=True, return_counts=True)
    largest = np.argsort(-counts, kind="stable")[: _EXAMPLE_CANDIDATES // MAX_SAMPLES]
    selected_positions = [
        order[starts[pair_index] : starts[pair_index] + min(counts[pair_index], MAX_SAMPLES)] for pair_index in largest
    ]
    return sorted(np.concatenate([np.zeros(0, np.int64), *selected_positions]).astype(np.int64).tolist())


def _iter_duplicate_rows(files: Iterable[Path]) -> Iterator[NDArray[np.void]]:
    for path in files:
        with translate_read_errors(path), path.open("rb") as file:
            while (rows := np.fromfile(file, DUPLICATE, _CHUNK_ROWS)).size:
                yield rows
