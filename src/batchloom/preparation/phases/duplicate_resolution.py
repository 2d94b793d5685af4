"""Phase B: remaining documents of each unit after deduplication, and their shards."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.preparation.documents.subsets import SmallestHashes
from batchloom.preparation.phases.find_duplicates import DuplicateFiles
from batchloom.preparation.phases.remaining_rows import DROP_REASONS, iter_rows_with_drops, open_search_drops
from batchloom.preparation.phases.subset_decision import ShardSettings, count_subset_tokens
from batchloom.preparation.units.subset_writer import ShardCutter
from batchloom.preparation.units.work_folder import (
    DEDUP_COUNTS_NAME,
    DROPPED_NAME,
    PartDedupCounts,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    attempt_folder,
    move_into_place,
    read_dedup_counts,
)
from batchloom.preparation.workers.protocols import Executor, run_tasks
from batchloom.store import CHOSEN, wrap_write_errors, write_file
from batchloom.store.format import SUBSETS
from batchloom.store.write import make_folder, sync_folder


def resolve_duplicates(
    executor: Executor,
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    duplicate_files: DuplicateFiles,
    settings: ShardSettings,
    first_number: int,
) -> list[UnitDedupCounts]:
    """Return the counts of remaining documents of every unit.

    ``first_number`` is the number of the first unit among all searched files, those of earlier generations first.
    """
    dedup_counts: dict[int, UnitDedupCounts] = {}
    tasks: dict[int, Callable[[str], UnitDedupCounts]] = {}
    for unit in units:
        number = unit.unit.number
        folder = work.resolution_folder(unit.unit.number)
        if (counts := read_dedup_counts(folder)) is not None:
            dedup_counts[number] = counts
            continue
        tasks[number] = partial(
            resolve_unit_duplicates,
            unit.folder,
            folder,
            len(unit.unit.parts),
            number + first_number,
            duplicate_files,
            settings,
        )
    dedup_counts |= run_tasks(executor, tasks, work.attempt)
    return [dedup_counts[number] for number in sorted(dedup_counts)]


def resolve_unit_duplicates(
    unit_folder: Path,
    resolution_folder: Path,
    parts: int,
    number: int,
    duplicate_files: DuplicateFiles,
    settings: ShardSettings,
    attempt: str,
) -> UnitDedupCounts:
    """Count the remaining documents of a unit and its shards, and store the drop list.

    ``number`` is that of the unit among all searched files.
    """
    folder = attempt_folder(resolution_folder, attempt)
    make_folder(folder)
    counter = _RemainingCounter(unit_folder, parts, settings)
    read_drops = open_search_drops(duplicate_files, number)
    path = folder / DROPPED_NAME
    row_start = 0
    with wrap_write_errors(path), path.open("wb") as file:
        for rows, reason_codes, drops in iter_rows_with_drops(unit_folder, read_drops):
            counter.add(rows, reason_codes)
            # Drops of a record that began in the previous chunk are already written.
            file.write(drops[drops["number"] >= row_start].tobytes())
            row_start += len(rows)
        file.flush()
        os.fsync(file.fileno())
    dedup_counts = counter.make_dedup_counts()
    write_file(folder / DEDUP_COUNTS_NAME, msgspec.json.encode(dedup_counts))
    sync_folder(folder)
    move_into_place(folder, resolution_folder)
    return dedup_counts


@final
class _RemainingCounter:
    def __init__(self, folder: Path, parts: int, settings: ShardSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._parts = [[0, 0] for _ in range(parts)]
        self._dropped: list[Counter[str]] = [Counter() for _ in range(parts)]
        self._cutters = {name: ShardCutter(settings.tokens_per_shard) for name in SUBSETS}
        self._smallest = SmallestHashes()
        self._moved = False
        self._seen_count = 0
        self._subsets = np.zeros(len(SUBSETS), np.int64)
        self._long = 0
        self._longest = (0, 0, 0, 0)

    def add(self, rows: NDArray[np.void], reason_codes: NDArray[np.uint8] | None) -> None:
        """Count the next documents; codes as :func:`iter_rows_with_reasons` yields them."""
        settings = self._settings
        parts = len(self._parts)
        remaining_rows = rows if reason_codes is None else rows[reason_codes == 0]
        self._seen_count += int(np.count_nonzero(rows["seen"]))
        if remaining_rows["seen"].any():
            raise StoreConflictError(
                f"{self._folder} does not match the duplicates that were found: files of the work folder were "
                "changed; delete it to start over."
            )
        codes = final_codes = settings.membership.codes(remaining_rows)
        if settings.base_membership.overrides:
            final_codes = settings.base_membership.codes(remaining_rows)
            self._moved |= bool((final_codes != codes).any())
        self._subsets += count_subset_tokens(remaining_rows, final_codes)
        self._track_longest(remaining_rows)
        is_movable = remaining_rows["subset"] == 0
        self._smallest.add(remaining_rows["hash"][is_movable], codes[is_movable])
        for code, name in enumerate(SUBSETS):
            self._cutters[name].cut(remaining_rows[codes == code])
        documents = np.bincount(remaining_rows["part"], minlength=parts)
        tokens = np.bincount(remaining_rows["part"], remaining_rows["length"], minlength=parts)
        for number in np.flatnonzero(documents).tolist():
            self._parts[number][0] += int(documents[number])
            self._parts[number][1] += int(tokens[number])
        for code, reason in enumerate(DROP_REASONS, 1) if reason_codes is not None else ():
            dropped_counts = np.bincount(rows["part"][reason_codes == code], minlength=parts)
            for number in np.flatnonzero(dropped_counts).tolist():
                self._dropped[number][reason] += int(dropped_counts[number])

    def _track_longest(self, remaining_rows: NDArray[np.void]) -> None:
        """Count documents and preference pairs with more tokens than a shard may have."""
        ends = np.flatnonzero(remaining_rows["side"] != CHOSEN)
        if not len(ends):
            return
        cumulative_lengths = np.cumsum(remaining_rows["length"], dtype=np.int64)[ends]
        lengths = np.diff(cumulative_lengths, prepend=0)
        self._long += int(np.count_nonzero(lengths > self._settings.tokens_per_shard))
        longest_index = int(lengths.argmax())
        if lengths[longest_index] > max(self._settings.tokens_per_shard, self._longest[0]):
            row = remaining_rows[ends[longest_index]]
            position = int(row["part"]), int(row["record"]), int(row["offset"])
            self._longest = int(lengths[longest_index]), *position

    def make_dedup_counts(self) -> UnitDedupCounts:
        pairs = zip(self._parts, self._dropped, strict=True)
        return UnitDedupCounts(
            parts=[PartDedupCounts(counts[0], counts[1], dict(dropped_counts)) for counts, dropped_counts in pairs],
            documents=sum(counts[0] for counts in self._parts),
            tokens=sum(counts[1] for counts in self._parts),
            dropped=sum(dropped_counts.total() for dropped_counts in self._dropped),
            smallest=self._smallest.to_hex(),
            shards={name: self._cutters[name].shards for name in SUBSETS},
            moved=self._moved,
            seen=self._seen_count,
            subsets=dict(zip(SUBSETS, self._subsets.tolist(), strict=True)),
            long=self._long,
            longest=self._longest,
        )
