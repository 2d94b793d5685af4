"""Duplicates by pair of sources, with examples, for the report."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.files import read_regular_file, release_pages
from batchloom.core.fingerprint import fingerprint
from batchloom.preparation.dedup.duplicate_search import DUPLICATE
from batchloom.preparation.documents.encode_documents import EncodeContext
from batchloom.preparation.phases.base_generations import BaseGenerations
from batchloom.preparation.phases.find_duplicates import DuplicateFiles
from batchloom.preparation.report.report import MAX_ROWS, DuplicateExample, DuplicatePair, OmittedRows
from batchloom.preparation.units.unit_report import MAX_SAMPLES, format_snippet
from batchloom.preparation.units.unit_rows import ROW, stored_lengths, tokens_file_name
from batchloom.preparation.units.work_folder import (
    ROWS_NAME,
    TokenizedUnit,
    WorkFolder,
    open_attempt_file,
    translate_read_errors,
)
from batchloom.store import write_file
from batchloom.store.format import SUBSETS

# A table of pairs of more source groups than this would be unreadable.
_MAX_GROUPS = 200
# Source name of documents that the store already holds.
STORE_LABEL = "(the store)"
_CHUNK_ROWS = 1 << 20
_SNIPPET_TOKENS = 64
# Rows that are examined for examples per chunk.
_EXAMPLE_CANDIDATES = 1000

# Duplicates by pair of sources, and the counts of pairs that are not listed.
PairList = tuple[list[DuplicatePair], OmittedRows]


def find_duplicate_pairs(
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    duplicate_files: DuplicateFiles,
    base: BaseGenerations,
    inputs: Sequence[str],
    context: EncodeContext,
) -> PairList:
    """Return duplicates by pair of sources, with examples.

    The pairs are stored under a name that covers everything that decides them: writing shards deletes the files
    that examples are read from, so a resumed job cannot find them again.
    """
    reader = DuplicatePairReader(units, len(base.files), inputs, context)
    files = (*duplicate_files.exact, *duplicate_files.near)
    if not files:
        return reader.read_pairs(files)
    name = fingerprint([[unit.folder.name for unit in units], inputs, base.generation])
    path = work.duplicates / "pairs" / name
    if path.exists():
        with translate_read_errors(path):
            stored_pairs: PairList = msgspec.json.decode(read_regular_file(path), type=PairList)
            return stored_pairs
    pairs = reader.read_pairs(files)
    with open_attempt_file(path, work.attempt) as attempt_path:
        write_file(attempt_path, msgspec.json.encode(pairs))
    return pairs


def group_sources(names: Sequence[str], inputs: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the group number of each source, and the names of the groups.

    Up to 200 sources form one group each; more are grouped by folder, or else by input.
    """
    for group_names in (list(names), [name.rpartition("/")[0] or name for name in names], list(inputs)):
        groups = {name: number for number, name in enumerate(dict.fromkeys(group_names))}
        if len(groups) <= _MAX_GROUPS:
            return [groups[name] for name in group_names], list(groups)
    return [0] * len(names), ["all inputs"]


@final
class DuplicatePairCounter:
    """Counter of dropped duplicates by their group and the kept copy's group."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self._counts = np.zeros((len(groups), len(groups)), np.int64)
        self._examples: dict[tuple[int, int], list[DuplicateExample]] = {}

    def add(self, dropped_groups: NDArray[np.integer], kept_groups: NDArray[np.integer]) -> None:
        """Count duplicates by their group and the group of the kept copy [documents]."""
        size = len(self._groups)
        pairs = dropped_groups.astype(np.int64) * size + kept_groups
        self._counts += np.bincount(pairs, minlength=size * size).reshape(size, size)

    def needs_example(self, dropped_group: int, kept_group: int) -> bool:
        return len(self._examples.get((dropped_group, kept_group), ())) < MAX_SAMPLES

    def add_example(self, dropped_group: int, kept_group: int, example: DuplicateExample) -> None:
        """Add an example if there is room; called in input order, so the first ones stay."""
        if self.needs_example(dropped_group, kept_group):
            printable_example = msgspec.structs.replace(example, words=format_snippet(example.words))
            self._examples.setdefault((dropped_group, kept_group), []).append(printable_example)

    def list_pairs(self) -> tuple[list[DuplicatePair], OmittedRows]:
        """Return the pairs with most documents, largest first, and totals of the others."""
        flat = self._counts.ravel()
        pair_indices = np.flatnonzero(flat)
        sorted_indices = pair_indices[np.argsort(-flat[pair_indices], kind="stable")]
        size = len(self._groups)
        listed = [
            DuplicatePair(
                dropped_from=self._groups[pair_index // size],
                kept_in=self._groups[pair_index % size],
                count=int(flat[pair_index]),
                examples=tuple(self._examples.get((pair_index // size, pair_index % size), ())),
            )
            for pair_index in sorted_indices[:MAX_ROWS].tolist()
        ]
        omitted_indices = sorted_indices[MAX_ROWS:]
        return listed, OmittedRows(len(omitted_indices), int(flat[omitted_indices].sum()))


@final
class DuplicatePairReader:
    """Reader of the duplicate files.

    ``base_file_count`` key files of stored shards precede those of the units.
    """

    def __init__(
        self, units: Sequence[TokenizedUnit], base_file_count: int, inputs: Sequence[str], context: EncodeContext
    ) -> None:
        self._units = units
        self._base_file_count = base_file_count
        self._context = context
        source_names = list[str]()
        source_inputs = list[str]()
        for source in (part.source for tokenized_unit in units for part in tokenized_unit.unit.parts):
            source_names.append(source.name)
            source_inputs.append(inputs[source.input])
        groups, names = group_sources(source_names, source_inputs)
        self._groups = np.array(groups, np.int64)
        self._firsts = np.cumsum([0, *(len(tokenized_unit.unit.parts) for tokenized_unit in units)])
        # The documents of earlier generations form one group, the last.
        self._pair_counter = DuplicatePairCounter([*names, *([STORE_LABEL] if base_file_count else [])])
        self._store_group = len(names)

    def read_pairs(self, files: Iterable[Path]) -> PairList:
        """Read duplicates by pair of sources, and the counts of pairs not listed."""
        for rows in iter_duplicate_rows(files):
            dropped_groups = self._group(rows["unit"], rows["part"])
            kept_groups = self._group(rows["first_unit"], rows["first_part"])
            self._pair_counter.add(dropped_groups, kept_groups)
            for index in _select_examples(dropped_groups, kept_groups):
                pair = int(dropped_groups[index]), int(kept_groups[index])
                if self._pair_counter.needs_example(*pair) and (example := self._read_example(rows[index])):
                    self._pair_counter.add_example(*pair, example)
        return self._pair_counter.list_pairs()

    def _group(self, units: NDArray[np.uint32], parts: NDArray[np.uint32]) -> NDArray[np.int64]:
        groups = np.full(len(units), self._store_group)
        new = units >= self._base_file_count
        groups[new] = self._groups[self._firsts[units[new] - self._base_file_count] + parts[new]]
        return groups

    def _read_example(self, row: np.void) -> DuplicateExample | None:
        """Read one example; None if the temporary files of either unit are missing."""
        unit = self._units[int(row["unit"]) - self._base_file_count]
        number = int(row["number"])
        first = int(row["first_unit"]) - self._base_file_count
        kept_record = -1
        kept_file = ""
        rows = _map_unit_rows(unit)
        if rows is None:
            return None
        words = self._read_first_words(unit, rows, number)
        if first >= 0:
            first_unit = self._units[first]
            first_number = int(row["first_number"])
            first_rows = _map_unit_rows(first_unit)
            if first_rows is None:
                return None
            kept_record = int(first_rows["record"][first_number])
            kept_file = first_unit.unit.parts[int(row["first_part"])].source.name
            words = words or self._read_first_words(first_unit, first_rows, first_number)
        dropped_file = unit.unit.parts[int(row["part"])].source.name
        return DuplicateExample(int(rows["record"][number]), kept_record, words, dropped_file, kept_file)

    def _read_first_words(self, unit: TokenizedUnit, rows: NDArray[np.void], number: int) -> str:
        if rows["seen"][number]:
            return ""
        code = self._context.membership.codes(rows[number : number + 1])[0]
        start = 0
        for begin in range(0, number, _CHUNK_ROWS):
            preceding_rows = rows[begin : min(begin + _CHUNK_ROWS, number)]
            subset_mask = self._context.membership.codes(preceding_rows) == code
            start += int(stored_lengths(preceding_rows[subset_mask]).sum())
            release_pages(rows)
        count = min(int(rows["length"][number]), _SNIPPET_TOKENS)
        path = unit.folder / tokens_file_name(SUBSETS[code])
        encoder = self._context.encoder
        with translate_read_errors(path):
            ids = np.fromfile(path, encoder.dtype, count, offset=start * encoder.dtype.itemsize)
        return encoder.tokenizer.decode(ids)


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


def iter_duplicate_rows(files: Iterable[Path]) -> Iterator[NDArray[np.void]]:
    """Yield the DUPLICATE records of files in bounded chunks."""
    for path in files:
        with translate_read_errors(path), path.open("rb") as file:
            while (rows := np.fromfile(file, DUPLICATE, _CHUNK_ROWS)).size:
                yield rows
