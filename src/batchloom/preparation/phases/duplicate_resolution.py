"""Phase B: remaining documents of each unit after deduplication, and their shards."""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import release_pages
from batchloom.preparation.dedup.duplicate_search import read_unit_duplicates
from batchloom.preparation.documents.subsets import (
    MoveCandidates,
    SmallestHashes,
    SubsetRule,
    balance_subsets,
    misses_share,
)
from batchloom.preparation.phases.base_generations import BaseGenerations
from batchloom.preparation.phases.find_duplicates import DuplicateFiles
from batchloom.preparation.settings.recipe import SHARD_DOCUMENTS
from batchloom.preparation.units.unit_files import ROW, mark_first_of_records
from batchloom.preparation.units.work_folder import (
    DEDUP_COUNTS_NAME,
    DROPPED_NAME,
    ROWS_NAME,
    Decision,
    PartDedupCounts,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    attempt_folder,
    move_into_place,
    read_dedup_counts,
    translate_read_errors,
)
from batchloom.preparation.workers.protocols import Executor, run_tasks
from batchloom.store import CHOSEN, wrap_write_errors, write_file
from batchloom.store.format import SUBSETS, Banding
from batchloom.store.write import make_folder, sync_folder


@final
class ShardCutter:
    """Incremental cutter of one unit and subset into shards."""

    def __init__(self, most_tokens: int, most_documents: int = SHARD_DOCUMENTS) -> None:
        self._most_tokens, self._most_documents = most_tokens, most_documents
        self._tokens = self._documents = 0
        self.shards = 0

    def cut(self, rows: NDArray[np.void]) -> list[tuple[int, int, bool]]:
        """Return ranges (start, stop, begins a shard) of rows that split no pair."""
        cumulative_tokens = np.cumsum(rows["length"], dtype=np.int64)
        # A shard may end after every document but the first of a pair.
        ends = np.flatnonzero(rows["side"] != CHOSEN) + 1
        reach = cumulative_tokens[ends - 1]
        shard_ranges, end_index, start = [], 0, 0
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
            end_index, start = next_end_index, stop
        return shard_ranges


_CHUNK_ROWS = 1 << 16
# Dropped documents: number of the first document of their record in the unit, and the index of the reason.
DROPPED_ROW = np.dtype([("number", "<u4"), ("reason", "u1")])
DROP_REASONS = ("exact duplicate", "near duplicate")
# Returns the drops with numbers in [start, stop), in ascending order.
_DropRangeReader = Callable[[int, int], NDArray[np.void]]


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Settings that decide the subset and shard of each document."""

    # Subset rule of the shares, by which the temporary token files are split.
    membership: SubsetRule
    # The same with the overrides of earlier generations.
    base_membership: SubsetRule
    tokens_per_shard: int
    dtype: np.dtype[np.generic]
    # MinHash parameters of the signatures to store; None to store none.
    banding: Banding | None

    def add_overrides(self, overrides: tuple[tuple[int, str], ...]) -> SubsetRule:
        """Return the subset rule with all earlier overrides and the given ones."""
        return replace(self.base_membership, overrides=(*self.base_membership.overrides, *overrides))


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
        number, folder = unit.unit.number, work.resolution_folder(unit.unit.number)
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
    read_drops = _open_search_drops(duplicate_files, number)
    path, row_start = folder / DROPPED_NAME, 0
    with wrap_write_errors(path), path.open("wb") as file:
        for rows, reason_codes, drops in _iter_rows_with_drops(unit_folder, read_drops):
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
        self._folder, self._settings = folder, settings
        self._parts = [[0, 0] for _ in range(parts)]
        self._dropped: list[Counter[str]] = [Counter() for _ in range(parts)]
        self._cutters = {name: ShardCutter(settings.tokens_per_shard) for name in SUBSETS}
        self._smallest, self._moved, self._seen_count = SmallestHashes(), False, 0
        self._subsets = np.zeros(len(SUBSETS), np.int64)
        self._long, self._longest = 0, (0, 0, 0, 0)

    def add(self, rows: NDArray[np.void], reason_codes: NDArray[np.uint8] | None) -> None:
        """Count the next documents; codes as :func:`iter_rows_with_reasons` yields them."""
        settings, parts = self._settings, len(self._parts)
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
        self._subsets += _tokens_by_subset(remaining_rows, final_codes)
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


def _tokens_by_subset(rows: NDArray[np.void], codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the tokens of each subset, int64 in the order of ``SUBSETS``."""
    lengths = rows["length"].astype(np.int64)
    return np.array([lengths[codes == code].sum() for code in range(len(SUBSETS))], np.int64)


def _open_search_drops(duplicate_files: DuplicateFiles, unit_number: int) -> _DropRangeReader | None:
    """Return a reader of the drops that the search found; None without a search."""
    if not duplicate_files.exact and not duplicate_files.near:
        return None

    def read_drops(start: int, stop: int) -> NDArray[np.void]:
        drop_arrays = []
        for reason, files in enumerate((duplicate_files.exact, duplicate_files.near)):
            numbers = read_unit_duplicates(files, unit_number, start, stop)["number"]
            drops = np.zeros(len(numbers), DROPPED_ROW)
            drops["number"], drops["reason"] = numbers, reason
            drop_arrays.append(drops)
        return np.sort(np.concatenate(drop_arrays), order="number")

    return read_drops


def _open_recorded_drops(path: Path) -> _DropRangeReader | None:
    """Return a reader of the drop list that was written; None for an empty list."""
    with translate_read_errors(path):
        if not path.stat().st_size:
            return None
        drops = np.memmap(path, DROPPED_ROW, "r").view(np.ndarray)

    def read_drops(start: int, stop: int) -> NDArray[np.void]:
        # searchsorted on the strided column would copy all of it.
        begin = bisect_left(drops, start, key=_drop_number)
        drops_in_range = drops[begin : bisect_left(drops, stop, begin, key=_drop_number)].copy()
        release_pages(drops)
        return drops_in_range

    return read_drops


def _drop_number(drop: np.void) -> int:
    return int(drop["number"])


def decide(
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    dedup_counts: Sequence[UnitDedupCounts],
    settings: ShardSettings,
    base: BaseGenerations,
    *,
    balance: bool,
) -> Decision:
    """Decide subset overrides and shard numbers, once for all units.

    With ``balance``, single documents move when a subset misses its share of the tokens.
    """
    if (decision := work.decision()) is not None:
        return decision
    folders = [(unit.folder, work.resolution_folder(unit.unit.number)) for unit in units]
    # Documents of earlier generations keep their subset, and so do equal ones.
    find_present_hashes = partial(base.find_present_hashes, work.out)
    tokens = {name: base.tokens.get(name, 0) for name in SUBSETS}
    for unit in dedup_counts:
        for name, count in unit.subsets.items():
            tokens[name] += count
    total, shares = sum(tokens.values()), settings.membership.shares
    if balance and any(misses_share(shares[name], tokens[name], total) for name in shares):
        overrides = _balance_shares(folders, settings, tokens, find_present_hashes)
    else:
        overrides = _fill_empty(dedup_counts, settings, base, find_present_hashes)
    membership = settings.add_overrides(overrides)
    shards, moved = [], []
    counts = {name: base.shards.get(name, 0) for name in SUBSETS}
    tokens = dict(base.tokens)
    for number, (unit, (folder, resolution_folder)) in enumerate(zip(dedup_counts, folders, strict=True)):
        shard_counts, subset_tokens = unit.shards, unit.subsets
        if unit.moved or overrides:
            is_moved = unit.moved
            cutters = {name: ShardCutter(settings.tokens_per_shard) for name in SUBSETS}
            added = np.zeros(len(SUBSETS), np.int64)
            for rows in iter_remaining_rows(folder, resolution_folder):
                codes = membership.codes(rows)
                is_moved |= bool((codes != settings.base_membership.codes(rows)).any())
                added += _tokens_by_subset(rows, codes)
                for code, name in enumerate(SUBSETS):
                    cutters[name].cut(rows[codes == code])
            if is_moved:
                moved.append(number)
                shard_counts = {name: cutter.shards for name, cutter in cutters.items()}
                subset_tokens = dict(zip(SUBSETS, added.tolist(), strict=True))
        shards.append({name: (counts[name], shard_counts[name]) for name in SUBSETS})
        for name in SUBSETS:
            counts[name] += shard_counts[name]
            tokens[name] = tokens.get(name, 0) + subset_tokens[name]
    override_names = {f"{value:032x}": name for value, name in overrides}
    decision = Decision(override_names, shards, moved, tokens)
    work.decide(decision)
    return decision


def _fill_empty(
    dedup_counts: Sequence[UnitDedupCounts],
    settings: ShardSettings,
    base: BaseGenerations,
    find_present_hashes: Callable[[Collection[int]], Collection[int]],
) -> tuple[tuple[int, str], ...]:
    """Choose the hashes that move so that no required subset is empty."""
    smallest = SmallestHashes()
    for unit in dedup_counts:
        smallest.merge(unit.smallest)
    missing_subsets = [name for name in settings.membership.list_required() if name not in base.nonempty_subsets]
    return smallest.overrides(missing_subsets, find_present_hashes(smallest.hashes()) if missing_subsets else ())


def _balance_shares(
    folders: Sequence[tuple[Path, Path]],
    settings: ShardSettings,
    tokens: Mapping[str, int],
    find_present_hashes: Callable[[Collection[int]], Collection[int]],
) -> tuple[tuple[int, str], ...]:
    """Choose the hashes that move so that subsets have their shares of the tokens."""
    candidates = {name: MoveCandidates(heaviest=name != SUBSETS[0]) for name in SUBSETS}
    for folder, resolution_folder in folders:
        for rows in iter_remaining_rows(folder, resolution_folder):
            codes = settings.base_membership.codes(rows)
            for code, name in enumerate(SUBSETS):
                subset_rows = rows[(codes == code) & (rows["subset"] == 0)]
                candidates[name].add(subset_rows["hash"], subset_rows["length"])
    groups = {name: subset_candidates.groups() for name, subset_candidates in candidates.items()}
    # Equal documents of earlier generations cannot change their subset.
    fixed_hashes = {value for value, _ in settings.base_membership.overrides}
    fixed_hashes |= set(find_present_hashes({group.hash for members in groups.values() for group in members}))
    movable_groups = {
        name: [group for group in members if group.hash not in fixed_hashes] for name, members in groups.items()
    }
    return tuple(balance_subsets(settings.membership.shares, tokens, movable_groups).items())


def iter_unit_rows(folder: Path) -> Iterator[NDArray[np.void]]:
    """Yield the rows of a unit in bounded chunks; a preference pair is never split."""
    path = folder / ROWS_NAME
    with translate_read_errors(path), path.open("rb") as file:
        while (rows := np.fromfile(file, ROW, _CHUNK_ROWS)).size:
            if rows["side"][-1] == CHOSEN:
                rows = np.concatenate([rows, np.fromfile(file, ROW, 1)])
            yield rows


def iter_remaining_rows(folder: Path, resolution_folder: Path) -> Iterator[NDArray[np.void]]:
    """Yield the remaining rows of a unit in bounded chunks."""
    for rows, reason_codes in iter_rows_with_reasons(folder, resolution_folder):
        yield rows if reason_codes is None else rows[reason_codes == 0]


def iter_rows_with_reasons(
    folder: Path, resolution_folder: Path
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None]]:
    """Yield the rows of a unit in chunks, each with the drop reason of every row.

    A code is 0 for a kept row, else 1 plus the index in ``DROP_REASONS``. None means that all rows are kept.
    """
    for rows, reason_codes, _ in _iter_rows_with_drops(folder, _open_recorded_drops(resolution_folder / DROPPED_NAME)):
        yield rows, reason_codes


def _iter_rows_with_drops(
    folder: Path, read_drops: _DropRangeReader | None
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None, NDArray[np.void]]]:
    """Yield the same with the drops of each chunk, at most one per document."""
    row_start, before, group = 0, (-1, -1), -1
    for rows in iter_unit_rows(folder):
        reason_codes, drops = None, np.zeros(0, DROPPED_ROW)
        if read_drops is not None:
            is_first = mark_first_of_records(rows, before)
            firsts = np.where(is_first, np.arange(row_start, row_start + len(rows)), -1)
            firsts[0] = max(int(firsts[0]), group)
            firsts = np.maximum.accumulate(firsts)
            drops = read_drops(int(firsts[0]), row_start + len(rows))
            before, group = (int(rows["part"][-1]), int(rows["record"][-1])), int(firsts[-1])
        if len(drops):
            drop_indices = np.searchsorted(drops["number"], firsts)
            drop_indices = np.minimum(drop_indices, len(drops) - 1)
            is_dropped = drops["number"][drop_indices] == firsts
            if is_dropped.any():
                reason_codes = np.where(is_dropped, drops["reason"][drop_indices] + 1, 0).astype(np.uint8)
        yield rows, reason_codes, drops
        row_start += len(rows)
