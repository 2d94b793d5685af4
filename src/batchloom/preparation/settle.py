"""Phase B: what is left of each unit when duplicates are gone, and which shards hold it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.dedup.find import gather
from batchloom.preparation.cutter import ShardCutter
from batchloom.preparation.subsets import Membership, Smallest
from batchloom.preparation.unit_files import (
    DROPPED_NAME,
    KEPT_NAME,
    ROW,
    ROWS_NAME,
    first_of_records,
)
from batchloom.preparation.work import Decision, Kept, UnitKept, attempt_folder, claim, reading
from batchloom.store.format import SUBSETS
from batchloom.store.pairs import CHOSEN
from batchloom.store.writer import make_folder, sync_folder, write_file

_STRETCH_ROWS = 1 << 16
# Documents that are left out: the number of the first of their record in the unit, and why.
DROPPED = np.dtype([("number", "<u4"), ("reason", "u1")])
REASONS = ("exact duplicate", "near duplicate")


@dataclass(frozen=True, slots=True)
class Sharding:
    """What decides where documents go.

    Attributes:
        membership: the shares of the subsets.
        most: tokens of a shard at most.
        shards: number of the next shard of each subset, where a store has some already.
        filled: subsets that hold documents already.
        settled: the subset of single hashes, as older generations have it.
    """

    membership: Membership
    most: int
    shards: Mapping[str, int] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    settled: tuple[tuple[int, str], ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """Subsets that must not be empty, and are."""
        return tuple(name for name in self.membership.wanted() if name not in self.filled)

    def decided(self, overrides: tuple[tuple[int, str], ...]) -> Membership:
        """The shares of the subsets together with what is decided for single hashes."""
        natural, known = self.membership, (*self.settled, *overrides)
        return Membership(natural.val_fraction, natural.test_fraction, known)


@dataclass(frozen=True, slots=True)
class SettleOrder:
    """One unit whose duplicates are known.

    Attributes:
        parts: how many parts it has.
        folder: its temporary files.
        place: folder of what is decided of it.
        attempt: sets the files of this attempt apart from those of another one.
        number: of the unit among all that were looked through, those of older generations first.
        exact: files that name exact duplicates, one a partition.
        near: files that name documents that are alike.
        sharding: decides where documents go.
    """

    parts: int
    folder: Path
    place: Path
    attempt: str
    number: int
    exact: tuple[Path, ...]
    near: tuple[Path, ...]
    sharding: Sharding


def settle_unit(order: SettleOrder) -> UnitKept:
    """Count what is left of a unit, and the shards it fills; keep both beside the list of drops.

    Raises:
        OutputError: the files cannot be written.
    """
    sharding, drops = order.sharding, _drops(order)
    parts = [[0, 0] for _ in range(order.parts)]
    dropped: list[Counter[str]] = [Counter() for _ in range(order.parts)]
    cutters = {name: ShardCutter(sharding.most) for name in SUBSETS}
    smallest, moved, seen = Smallest(), False, 0
    settled = sharding.decided(())
    for rows, why in _judged(order.folder, drops):
        kept = rows if why is None else rows[why == 0]
        seen += int(np.count_nonzero(rows["seen"]))
        if kept["seen"].any():
            raise AssertionError("a text that stood before is a duplicate")
        codes = sharding.membership.codes(kept["hash"])
        moved |= bool(sharding.settled) and bool((settled.codes(kept["hash"]) != codes).any())
        smallest.add(kept["hash"], codes)
        for code, name in enumerate(SUBSETS):
            cutters[name].cut(kept[codes == code])
        documents = np.bincount(kept["part"], minlength=order.parts)
        tokens = np.bincount(kept["part"], kept["length"], minlength=order.parts)
        for number in np.flatnonzero(documents).tolist():
            parts[number][0] += int(documents[number])
            parts[number][1] += int(tokens[number])
        for code, reason in enumerate(REASONS, 1) if why is not None else ():
            gone = np.bincount(rows["part"][why == code], minlength=order.parts)
            for number in np.flatnonzero(gone).tolist():
                dropped[number][reason] += int(gone[number])
    facts = UnitKept(
        parts=[
            Kept(counts[0], counts[1], dict(gone))
            for counts, gone in zip(parts, dropped, strict=True)
        ],
        documents=sum(counts[0] for counts in parts),
        tokens=sum(counts[1] for counts in parts),
        dropped=sum(gone.total() for gone in dropped),
        smallest=smallest.to_hex(),
        shards={name: cutters[name].shards for name in SUBSETS},
        moved=moved,
        seen=seen,
    )
    folder = attempt_folder(order.place, order.attempt)
    make_folder(folder)
    write_file(folder / DROPPED_NAME, drops.tobytes())
    write_file(folder / KEPT_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    claim(folder, order.place)
    return facts


def _drops(order: SettleOrder) -> NDArray[np.void]:
    """What is left out of a unit, in ascending order."""
    pieces = []
    for reason, files in enumerate((order.exact, order.near)):
        numbers = gather(files, order.number)["number"]
        drops = np.zeros(len(numbers), DROPPED)
        drops["number"], drops["reason"] = numbers, reason
        pieces.append(drops)
    return np.sort(np.concatenate(pieces), order="number")


def decide(
    kept: Sequence[UnitKept],
    folders: Sequence[tuple[Path, Path]],
    sharding: Sharding,
    held: Callable[[Collection[int]], Collection[int]] = lambda _: (),
) -> Decision:
    """Decide, once over all units, the subsets of single hashes and the numbers of the shards.

    Args:
        kept: what is left of each unit, in order.
        folders: of each unit the folders of its temporary files and of what is decided of it.
        sharding: the shares of the subsets, and the size of a shard.
        held: which of some hashes older documents have, whose subset is settled.
    """
    smallest = Smallest()
    for unit in kept:
        smallest.merge(unit.smallest)
    settled = held(smallest.hashes()) if sharding.wanted else ()
    overrides = smallest.overrides(sharding.wanted, settled)
    decided = sharding.decided(overrides)
    moved = {f"{value:032x}" for value, _ in overrides}
    shards, counts = [], {name: sharding.shards.get(name, 0) for name in SUBSETS}
    for unit, (folder, place) in zip(kept, folders, strict=True):
        mine = unit.shards
        if unit.moved or any(moved.intersection(values) for values in unit.smallest.values()):
            cutters = {name: ShardCutter(sharding.most) for name in SUBSETS}
            for rows in kept_rows(folder, place):
                codes = decided.codes(rows["hash"])
                for code, name in enumerate(SUBSETS):
                    cutters[name].cut(rows[codes == code])
            mine = {name: cutter.shards for name, cutter in cutters.items()}
        shards.append({name: (counts[name], mine[name]) for name in SUBSETS})
        for name in SUBSETS:
            counts[name] += mine[name]
    return Decision({f"{value:032x}": name for value, name in overrides}, shards)


def overrides_of(decision: Decision) -> tuple[tuple[int, str], ...]:
    """What was decided for single hashes."""
    return tuple((int(value, 16), name) for value, name in decision.overrides.items())


def row_stretches(folder: Path) -> Iterator[NDArray[np.void]]:
    """A unit's rows, a bounded stretch at a time; the two of a pair stay together."""
    path = folder / ROWS_NAME
    with reading(path), path.open("rb") as file:
        while (rows := np.fromfile(file, ROW, _STRETCH_ROWS)).size:
            if rows["side"][-1] == CHOSEN:
                rows = np.concatenate([rows, np.fromfile(file, ROW, 1)])
            yield rows


def kept_rows(folder: Path, place: Path) -> Iterator[NDArray[np.void]]:
    """The rows of a unit that are left, a bounded stretch at a time."""
    for rows, why in judged(folder, place):
        yield rows if why is None else rows[why == 0]


def judged(
    folder: Path, place: Path
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None]]:
    """A unit's rows, each with 0 or 1 plus the place in ``REASONS`` of why it is left out.

    None stands for rows that are all kept.
    """
    path = place / DROPPED_NAME
    with reading(path):
        dropped = np.fromfile(path, DROPPED)
    return _judged(folder, dropped)


def _judged(
    folder: Path, dropped: NDArray[np.void]
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None]]:
    at, before, group = 0, (-1, -1), -1
    for rows in row_stretches(folder):
        why = None
        if len(dropped):
            fresh = first_of_records(rows, before)
            firsts = np.where(fresh, np.arange(at, at + len(rows)), -1)
            firsts[0] = max(int(firsts[0]), group)
            firsts = np.maximum.accumulate(firsts)
            found = np.searchsorted(dropped["number"], firsts)
            found = np.minimum(found, len(dropped) - 1)
            gone = dropped["number"][found] == firsts
            if gone.any():
                why = np.where(gone, dropped["reason"][found] + 1, 0).astype(np.uint8)
            before, group = (int(rows["part"][-1]), int(rows["record"][-1])), int(firsts[-1])
        yield rows, why
        at += len(rows)
