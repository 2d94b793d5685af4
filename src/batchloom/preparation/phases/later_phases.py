"""Phases B and C over all units: who is told to do what, and what is found done already."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np

from batchloom.core.errors import WorkerError
from batchloom.preparation.dedup import KEY, SIGNATURE_KEY, count_keys, count_partitions
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
from batchloom.preparation.settings import DedupRecipe
from batchloom.preparation.units import (
    DUPLICATES_SUFFIX,
    KEYS_NAME,
    KEYS_SUFFIX,
    CrashTracker,
    Decision,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    read_dedup_counts,
    read_unit_shards,
)
from batchloom.preparation.workers import Executor, TaskMessage, iter_task_events
from batchloom.store import ShardEntry, write_file

# Nothing in these phases depends on single documents: who dies of them dies of the machine.
_MAX_TASK_DEATHS = 3

UnitShardEntries = dict[str, list[ShardEntry]]


class OnUnitWritten(Protocol):
    """Hears of units whose shards are there."""

    def __call__(self, number: int, *, found: bool) -> None:
        """One unit's are; found: an earlier run wrote them."""
        ...


@dataclass(frozen=True, slots=True)
class DuplicateFiles:
    """The files that name what is left out: exact duplicates, and documents that are alike."""

    exact: tuple[Path, ...] = ()
    near: tuple[Path, ...] = ()


@final
class LaterPhases:
    """What follows when every unit is tokenized.

    Args:
        work: the job's folder.
        units: all units in order.
        sharding: decides where documents go.
        older: what stands before the units.
        dedup: which duplicates are left out.
        dtype: of a token on disk.
        attempt: sets the files of this run apart from those of another one.
    """

    def __init__(
        self,
        work: WorkFolder,
        units: Sequence[TokenizedUnit],
        sharding: ShardingSettings,
        older: BaseGenerations,
        dedup: DedupRecipe,
        dtype: np.dtype[np.generic],
        attempt: str,
    ) -> None:
        self._work, self._units, self._sharding = work, units, sharding
        self._older, self._dedup, self._dtype, self._attempt = older, dedup, dtype, attempt

    def settle(self, crew: Executor, found: DuplicateFiles) -> list[UnitDedupCounts]:
        """What is left of every unit."""
        kept = {
            one.unit.number: read_dedup_counts(self._work.kept(one.unit.number))
            for one in self._units
        }
        todo = [one for one in self._units if kept[one.unit.number] is None]
        orders = {
            one.unit.number: ResolveDuplicatesTask(
                parts=len(one.unit.parts),
                folder=one.folder,
                place=self._work.kept(one.unit.number),
                attempt=self._attempt,
                number=one.unit.number + len(self._older.files),
                exact=found.exact,
                near=found.near,
                sharding=self._sharding,
            )
            for one in todo
        }
        kept |= run_tasks(crew, orders)
        return [one for number in sorted(kept) if (one := kept[number]) is not None]

    def duplicates(self, crew: Executor) -> DuplicateFiles:
        """Find documents that stand in several places, and those that are alike."""
        mode, units = self._dedup.mode, self._units
        if mode == "none" or not units:
            return DuplicateFiles()
        folder, documents = self._work.duplicates, sum(one.facts.documents for one in units)
        older = self._older.files
        files = (*older, *(one.folder / KEYS_NAME for one in units))
        exact = find_all_duplicates(
            crew, files, folder / EXACT, self._attempt, first_new=len(older)
        )
        if mode != "near" or not documents:
            return DuplicateFiles(exact)
        bands = self._sort_signatures(crew, exact)
        # What is there stays: only what is new need be linked to it.
        first = len(older)
        links = find_all_duplicates(
            crew, bands, folder / "links", self._attempt, first_new=first, kind=SIGNATURE_KEY
        )
        place = folder / NEAR
        if place.exists():
            return DuplicateFiles(exact, tuple(sorted(place.iterdir())))
        order = LinkComponentsTask(links, folder / "scratch", place, first, self._attempt)
        return DuplicateFiles(exact, run_tasks(crew, {0: order})[0])

    def _sort_signatures(self, crew: Executor, exact: tuple[Path, ...]) -> tuple[Path, ...]:
        """The files of sorted keys of bands: of what is there, where signatures are kept, then of all units."""
        count, first = self._dedup.banding.bands, len(self._older.files)
        place = self._work.duplicates / "bands"
        none = place / f"none{KEYS_SUFFIX}"
        orders: dict[int, SortSignaturesTask | SortStoredSignaturesTask] = {}
        paths = []
        for number, stored in enumerate(self._older.bands):
            paths.append(none if stored is None else place / f"{number:05d}{KEYS_SUFFIX}")
            if stored is not None:
                orders[number] = SortStoredSignaturesTask(stored, paths[-1], self._attempt)
        for number, one in enumerate(self._units, first):
            paths.append(place / f"{number:05d}{KEYS_SUFFIX}")
            sources = one.folder, number, exact, count
            orders[number] = SortSignaturesTask(*sources, paths[-1], self._attempt)
        run_tasks(crew, {n: one for n, one in orders.items() if not one.place.exists()})
        if none in paths:
            write_file(none, b"")
        return tuple(paths)

    def decide(self, kept: Sequence[UnitDedupCounts]) -> Decision:
        """The subsets of single hashes and the numbers of all shards: decided once."""
        decision = self._work.decision()
        if decision is None:
            folders = [(one.folder, self._work.kept(one.unit.number)) for one in self._units]
            held = partial(self._older.holding, self._work.out)
            decision = make_decision(kept, folders, self._sharding, held)
            self._work.decide(decision)
        return decision

    def write(
        self,
        crew: Executor,
        kept: Sequence[UnitDedupCounts],
        decision: Decision,
        tell: OnUnitWritten,
    ) -> list[UnitShardEntries]:
        """Have every unit write its shards.

        Args:
            crew: does it.
            kept: what is left of each unit.
            decision: the numbers of the shards.
            tell: is told of each unit whose shards are there, and whether an earlier run wrote them.
        """
        sharding = self._sharding
        task = ShardSettings(
            *(self._work.store, self._dtype, sharding.membership),
            *(sharding.decided(parse_overrides(decision)), sharding.most),
            self._dedup.kept_banding,
        )
        shards: dict[int, UnitShardEntries] = {}
        orders: dict[int, WriteShardsTask] = {}
        moved = set(decision.moved)
        for one, left, numbers in zip(self._units, kept, decision.shards, strict=True):
            number = one.unit.number
            found = read_unit_shards(self._work.shards(number))
            if found is not None:
                shards[number] = found
                tell(number, found=True)
                continue
            orders[number] = WriteShardsTask(
                first_part=one.unit.first_part + self._older.parts,
                folder=one.folder,
                place=self._work.kept(number),
                shards=self._work.shards(number),
                attempt=self._attempt,
                checksums=one.facts.checksums,
                whole=not (left.dropped > left.seen or number in moved),
                numbers=numbers,
                task=task,
            )
        shards |= run_tasks(crew, orders, lambda number: tell(number, found=False))
        return [shards[number] for number in sorted(shards)]


def find_all_duplicates(
    crew: Executor,
    files: tuple[Path, ...],
    folder: Path,
    attempt: str,
    *,
    first_new: int = 0,
    kind: np.dtype[np.void] = KEY,
) -> tuple[Path, ...]:
    """Look through all ranges of keys; the files that name what stood before.

    Args:
        crew: does it.
        files: of keys, in the order of documents.
        folder: where the files go.
        attempt: sets the files of this run apart from those of another one.
        first_new: what is in files before it stays.
        kind: of the keys.
    """
    ranges = count_partitions(count_keys(files, kind))
    places = tuple(folder / f"{number:05d}{DUPLICATES_SUFFIX}" for number in range(ranges))
    bands = kind == SIGNATURE_KEY
    orders = {
        number: FindDuplicatesTask(files, first_new, (number, ranges), place, attempt, bands)
        for number, place in enumerate(places)
        if not place.exists()
    }
    run_tasks(crew, orders)
    return places


def run_tasks(
    crew: Executor,
    orders: Mapping[int, Any],
    tell: Callable[[int], None] = lambda _: None,
    losses: CrashTracker | None = None,
) -> dict[int, Any]:
    """What came of orders, by number; those whose workers are lost are given again, as another attempt.

    Args:
        crew: does them.
        orders: what is to be done, by number.
        tell: is told of each that is done.
        losses: knows of units whose workers died, where single documents may be what they die of.

    Raises:
        WorkerError: workers die of an order again and again.
    """
    deaths: dict[int, int] = {}

    def lost(number: int, order: Any, reason: str) -> Any:
        deaths[number] = deaths.get(number, 0) + 1
        if deaths[number] > _MAX_TASK_DEATHS:
            raise WorkerError(
                f"A worker {reason}, {deaths[number]} times at the same work. Give workers more memory (fewer of them: "
                "--workers 1), then give the same command again: it goes on."
            )
        # Who is believed dead may live on where nobody sees it.
        attempt = f"{order.attempt.partition('-')[0]}-{deaths[number]}"
        return replace(order, attempt=attempt)

    made: dict[int, Any] = {}
    for event in iter_task_events(crew, orders.items(), losses.lost if losses else lost):
        if isinstance(event, TaskMessage):
            if losses is not None:
                losses.hear(event.number, event.message)
        else:
            if losses is not None:
                losses.done(event.number)
            made[event.number] = event.result
            tell(event.number)
    return made
