"""Phases B and C over all units: tasks, and results that already exist."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np

from batchloom.core.errors import WorkerError
from batchloom.preparation.dedup.sorted_keys import KEY, SIGNATURE_KEY, count_keys, count_partitions
from batchloom.preparation.phases.append import BaseGenerations
from batchloom.preparation.phases.duplicate_resolution import (
    ResolveDuplicatesTask,
    ShardingSettings,
    make_decision,
    parse_overrides,
)
from batchloom.preparation.phases.duplicate_tasks import (
    EXACT,
    NEAR,
    FindDuplicatesTask,
    LinkComponentsTask,
    SortSignaturesTask,
    SortStoredSignaturesTask,
)
from batchloom.preparation.phases.unit_shards import ShardSettings, WriteShardsTask
from batchloom.preparation.settings.dedup_recipe import DedupRecipe
from batchloom.preparation.units.crash_isolation import CrashTracker
from batchloom.preparation.units.unit_files import KEYS_NAME
from batchloom.preparation.units.work_folder import (
    DUPLICATES_SUFFIX,
    KEYS_SUFFIX,
    Decision,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    read_dedup_counts,
    read_unit_shards,
)
from batchloom.preparation.workers.protocols import Executor, TaskMessage, iter_task_events
from batchloom.store import ShardEntry, write_file

# No single document can crash these tasks, so deaths come from the machine.
_MAX_TASK_DEATHS = 3

UnitShardEntries = dict[str, list[ShardEntry]]


class OnUnitWritten(Protocol):
    """Callback for units whose shards are written."""

    def __call__(self, number: int, *, already_written: bool) -> None:
        """Handle one unit; ``already_written``: an earlier run wrote its shards."""
        ...


@dataclass(frozen=True, slots=True)
class DuplicateFiles:
    """Files that list dropped documents: exact duplicates and near duplicates."""

    exact: tuple[Path, ...] = ()
    near: tuple[Path, ...] = ()


@final
class LaterPhases:
    """Phases after tokenization.

    ``attempt`` is a suffix that keeps the files of this run apart from those of other runs.
    """

    def __init__(
        self,
        work: WorkFolder,
        units: Sequence[TokenizedUnit],
        sharding: ShardingSettings,
        base_generations: BaseGenerations,
        dedup: DedupRecipe,
        dtype: np.dtype[np.generic],
        attempt: str,
    ) -> None:
        self._work, self._units, self._sharding = work, units, sharding
        self._base_generations, self._dedup, self._dtype, self._attempt = (base_generations, dedup, dtype, attempt)

    def resolve_duplicates(self, executor: Executor, duplicate_files: DuplicateFiles) -> list[UnitDedupCounts]:
        """Return the counts of remaining documents of every unit."""
        dedup_counts = {
            tokenized_unit.unit.number: read_dedup_counts(self._work.resolution_folder(tokenized_unit.unit.number))
            for tokenized_unit in self._units
        }
        pending_units = [
            tokenized_unit for tokenized_unit in self._units if dedup_counts[tokenized_unit.unit.number] is None
        ]
        tasks = {
            tokenized_unit.unit.number: ResolveDuplicatesTask(
                parts=len(tokenized_unit.unit.parts),
                folder=tokenized_unit.folder,
                resolution_folder=self._work.resolution_folder(tokenized_unit.unit.number),
                attempt=self._attempt,
                number=tokenized_unit.unit.number + len(self._base_generations.files),
                exact=duplicate_files.exact,
                near=duplicate_files.near,
                sharding=self._sharding,
            )
            for tokenized_unit in pending_units
        }
        dedup_counts |= run_tasks(executor, tasks)
        return [counts for number in sorted(dedup_counts) if (counts := dedup_counts[number]) is not None]

    def find_duplicates(self, executor: Executor) -> DuplicateFiles:
        """Find exact duplicates and near duplicates."""
        mode, units = self._dedup.mode, self._units
        if mode == "none" or not units:
            return DuplicateFiles()
        folder, documents = (self._work.duplicates, sum(tokenized_unit.facts.documents for tokenized_unit in units))
        base_files = self._base_generations.files
        files = (*base_files, *(tokenized_unit.folder / KEYS_NAME for tokenized_unit in units))
        exact = find_all_duplicates(executor, files, folder / EXACT, self._attempt, first_new=len(base_files))
        if mode != "near" or not documents:
            return DuplicateFiles(exact)
        signature_files = self._sort_signatures(executor, exact)
        # Stored documents are always kept, so only new ones need links.
        first = len(base_files)
        links = find_all_duplicates(
            executor, signature_files, folder / "links", self._attempt, first_new=first, kind=SIGNATURE_KEY
        )
        near_folder = folder / NEAR
        if near_folder.exists():
            return DuplicateFiles(exact, tuple(sorted(near_folder.iterdir())))
        task = LinkComponentsTask(links, folder / "scratch", near_folder, first, self._attempt)
        return DuplicateFiles(exact, run_tasks(executor, {0: task})[0])

    def _sort_signatures(self, executor: Executor, exact: tuple[Path, ...]) -> tuple[Path, ...]:
        """Return the files of sorted signature keys: of stored shards, then of all units."""
        count, first = self._dedup.banding.bands, len(self._base_generations.files)
        folder = self._work.duplicates / "bands"
        empty_path = folder / f"none{KEYS_SUFFIX}"
        tasks: dict[int, SortSignaturesTask | SortStoredSignaturesTask] = {}
        paths = []
        for number, shard_signatures in enumerate(self._base_generations.signatures):
            paths.append(empty_path if shard_signatures is None else folder / f"{number:05d}{KEYS_SUFFIX}")
            if shard_signatures is not None:
                tasks[number] = SortStoredSignaturesTask(shard_signatures, paths[-1], self._attempt)
        for number, tokenized_unit in enumerate(self._units, first):
            paths.append(folder / f"{number:05d}{KEYS_SUFFIX}")
            sources = tokenized_unit.folder, number, exact, count
            tasks[number] = SortSignaturesTask(*sources, paths[-1], self._attempt)
        run_tasks(executor, {n: task for n, task in tasks.items() if not task.output_path.exists()})
        if empty_path in paths:
            write_file(empty_path, b"")
        return tuple(paths)

    def decide(self, dedup_counts: Sequence[UnitDedupCounts]) -> Decision:
        """Decide subset overrides and shard numbers; a stored decision is reused."""
        decision = self._work.decision()
        if decision is None:
            folders = [
                (tokenized_unit.folder, self._work.resolution_folder(tokenized_unit.unit.number))
                for tokenized_unit in self._units
            ]
            find_present_hashes = partial(self._base_generations.find_present_hashes, self._work.out)
            decision = make_decision(dedup_counts, folders, self._sharding, find_present_hashes)
            self._work.decide(decision)
        return decision

    def write(
        self,
        executor: Executor,
        dedup_counts: Sequence[UnitDedupCounts],
        decision: Decision,
        on_unit_written: OnUnitWritten,
    ) -> list[UnitShardEntries]:
        """Write the shards of every unit.

        ``on_unit_written`` is called for each unit whose shards are written, also by an earlier run.
        """
        sharding = self._sharding
        settings = ShardSettings(
            *(self._work.store, self._dtype, sharding.membership),
            *(sharding.apply_overrides(parse_overrides(decision)), sharding.tokens_per_shard),
            self._dedup.stored_banding,
        )
        shards: dict[int, UnitShardEntries] = {}
        tasks: dict[int, WriteShardsTask] = {}
        moved_units = set(decision.moved)
        for tokenized_unit, unit_counts, numbers in zip(self._units, dedup_counts, decision.shards, strict=True):
            number = tokenized_unit.unit.number
            shard_entries = read_unit_shards(self._work.shards(number))
            if shard_entries is not None:
                shards[number] = shard_entries
                on_unit_written(number, already_written=True)
                continue
            tasks[number] = WriteShardsTask(
                first_part=tokenized_unit.unit.first_part + self._base_generations.parts,
                folder=tokenized_unit.folder,
                resolution_folder=self._work.resolution_folder(number),
                shards=self._work.shards(number),
                attempt=self._attempt,
                checksums=tokenized_unit.facts.checksums,
                has_all_documents=not (unit_counts.dropped > unit_counts.seen or number in moved_units),
                numbers=numbers,
                settings=settings,
            )
        shards |= run_tasks(executor, tasks, lambda number: on_unit_written(number, already_written=False))
        return [shards[number] for number in sorted(shards)]


def find_all_duplicates(
    executor: Executor,
    files: tuple[Path, ...],
    folder: Path,
    attempt: str,
    *,
    first_new: int = 0,
    kind: np.dtype[np.void] = KEY,
) -> tuple[Path, ...]:
    """Search all key ranges and return the files that list the later copies.

    ``files`` are key files in document order; documents of files before ``first_new`` are always kept.
    """
    ranges = count_partitions(count_keys(files, kind))
    paths = tuple(folder / f"{number:05d}{DUPLICATES_SUFFIX}" for number in range(ranges))
    has_signature_keys = kind == SIGNATURE_KEY
    tasks = {
        number: FindDuplicatesTask(files, first_new, (number, ranges), path, attempt, has_signature_keys)
        for number, path in enumerate(paths)
        if not path.exists()
    }
    run_tasks(executor, tasks)
    return paths


def run_tasks(
    executor: Executor,
    tasks: Mapping[int, Any],
    on_done: Callable[[int], None] = lambda _: None,
    crash_tracker: CrashTracker | None = None,
) -> dict[int, Any]:
    """Run tasks and return their results by number; tasks of lost workers are retried.

    ``crash_tracker`` is for tasks that a single document may crash. Repeated deaths at one task raise WorkerError.
    """
    deaths: dict[int, int] = {}

    def handle_crash(number: int, task: Any, reason: str) -> Any:
        deaths[number] = deaths.get(number, 0) + 1
        if deaths[number] > _MAX_TASK_DEATHS:
            raise WorkerError(
                f"A worker {reason}, {deaths[number]} times at the same task. Give workers more memory (fewer of "
                "them: --workers 1), then give the same command again to resume."
            )
        # A worker reported dead may still be running and writing, so the retry uses other file names.
        attempt = f"{task.attempt.partition('-')[0]}-{deaths[number]}"
        return replace(task, attempt=attempt)

    results: dict[int, Any] = {}
    for event in iter_task_events(
        executor, tasks.items(), crash_tracker.handle_crash if crash_tracker else handle_crash
    ):
        if isinstance(event, TaskMessage):
            if crash_tracker is not None:
                crash_tracker.record_marker(event.number, event.message)
        else:
            if crash_tracker is not None:
                crash_tracker.forget_unit(event.number)
            results[event.number] = event.result
            on_done(event.number)
    return results
