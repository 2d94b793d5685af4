"""Phase B: what is left of each unit when duplicates are gone, and which shards hold it."""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import release_pages
from batchloom.preparation.dedup import read_unit_duplicates
from batchloom.preparation.documents import SmallestHashes, SubsetRule
from batchloom.preparation.units import (
    DEDUP_COUNTS_NAME,
    DROPPED_NAME,
    ROW,
    ROWS_NAME,
    Decision,
    MoveCandidates,
    PartDedupCounts,
    ShardCutter,
    UnitDedupCounts,
    attempt_folder,
    balance_subsets,
    mark_first_of_records,
    misses_share,
    move_into_place,
    translate_read_errors,
)
from batchloom.store import CHOSEN, wrap_write_errors, write_file
from batchloom.store.format import SUBSETS
from batchloom.store.write import make_folder, sync_folder

_CHUNK_ROWS = 1 << 16
# Documents that are left out: the number of the first of their record in the unit, and why.
DROPPED_ROW = np.dtype([("number", "<u4"), ("reason", "u1")])
DROP_REASONS = ("exact duplicate", "near duplicate")
# Drops with numbers from one up to another one, in ascending order.
_DropRangeReader = Callable[[int, int], NDArray[np.void]]


@dataclass(frozen=True, slots=True)
class ShardingSettings:
    """What decides where documents go.

    Attributes:
        membership: the shares of the subsets.
        most: tokens of a shard at most.
        shards: number of the next shard of each subset, where a store has some already.
        filled: subsets that hold documents already.
        settled: the subset of single hashes, as older generations have it.
        tokens: of each subset in older generations.
        balance: whether single documents move where a subset misses its share of the tokens.
    """

    membership: SubsetRule
    most: int
    shards: Mapping[str, int] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    settled: tuple[tuple[int, str], ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    balance: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """Subsets that must not be empty, and are."""
        return tuple(name for name in self.membership.wanted() if name not in self.filled)

    def decided(self, overrides: tuple[tuple[int, str], ...]) -> SubsetRule:
        """The shares of the subsets together with what is decided for single hashes."""
        natural, known = self.membership, (*self.settled, *overrides)
        return SubsetRule(natural.val_fraction, natural.test_fraction, known)


@dataclass(frozen=True, slots=True)
class ResolveDuplicatesTask:
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
    sharding: ShardingSettings


def resolve_unit_duplicates(order: ResolveDuplicatesTask) -> UnitDedupCounts:
    """Count what is left of a unit, and the shards it fills; keep both beside the list of drops.

    Raises:
        OutputError: the files cannot be written.
    """
    folder = attempt_folder(order.place, order.attempt)
    make_folder(folder)
    left = _RemainingCounter(order)
    path, at = folder / DROPPED_NAME, 0
    with wrap_write_errors(path), path.open("wb") as file:
        for rows, why, drops in _iter_rows_with_drops(order.folder, _open_search_drops(order)):
            left.add(rows, why)
            # Those of a record that goes on from the stretch before are there.
            file.write(drops[drops["number"] >= at].tobytes())
            at += len(rows)
        file.flush()
        os.fsync(file.fileno())
    facts = left.kept()
    write_file(folder / DEDUP_COUNTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    move_into_place(folder, order.place)
    return facts


@final
class _RemainingCounter:
    """Counts what is left of a unit."""

    def __init__(self, order: ResolveDuplicatesTask) -> None:
        self._folder = order.folder
        self._sharding, self._settled = order.sharding, order.sharding.decided(())
        self._parts = [[0, 0] for _ in range(order.parts)]
        self._dropped: list[Counter[str]] = [Counter() for _ in range(order.parts)]
        self._cutters = {name: ShardCutter(order.sharding.most) for name in SUBSETS}
        self._smallest, self._moved, self._seen = SmallestHashes(), False, 0
        self._subsets = np.zeros(len(SUBSETS), np.int64)
        self._long, self._longest = 0, (0, 0, 0, 0)

    def add(self, rows: NDArray[np.void], why: NDArray[np.uint8] | None) -> None:
        """Count the next documents; ``why`` as :func:`iter_rows_with_reasons` gives it."""
        sharding, parts = self._sharding, len(self._parts)
        kept = rows if why is None else rows[why == 0]
        self._seen += int(np.count_nonzero(rows["seen"]))
        if kept["seen"].any():
            raise StoreConflictError(
                f"{self._folder} and what was found to stand twice do not fit: files of the work folder were changed; "
                "delete it to begin anew."
            )
        codes = settled = sharding.membership.codes(kept["hash"])
        if sharding.settled:
            settled = self._settled.codes(kept["hash"])
            self._moved |= bool((settled != codes).any())
        self._subsets += _tokens_by_subset(kept, settled)
        self._track_longest(kept)
        self._smallest.add(kept["hash"], codes)
        for code, name in enumerate(SUBSETS):
            self._cutters[name].cut(kept[codes == code])
        documents = np.bincount(kept["part"], minlength=parts)
        tokens = np.bincount(kept["part"], kept["length"], minlength=parts)
        for number in np.flatnonzero(documents).tolist():
            self._parts[number][0] += int(documents[number])
            self._parts[number][1] += int(tokens[number])
        for code, reason in enumerate(DROP_REASONS, 1) if why is not None else ():
            gone = np.bincount(rows["part"][why == code], minlength=parts)
            for number in np.flatnonzero(gone).tolist():
                self._dropped[number][reason] += int(gone[number])

    def _track_longest(self, kept: NDArray[np.void]) -> None:
        """Count documents and pairs that have more tokens than a shard may have."""
        ends = np.flatnonzero(kept["side"] != CHOSEN)
        if not len(ends):
            return
        sums = np.cumsum(kept["length"], dtype=np.int64)[ends]
        lengths = np.diff(sums, prepend=0)
        self._long += int(np.count_nonzero(lengths > self._sharding.most))
        at = int(lengths.argmax())
        if lengths[at] > max(self._sharding.most, self._longest[0]):
            row = kept[ends[at]]
            place = int(row["part"]), int(row["record"]), int(row["offset"])
            self._longest = int(lengths[at]), *place

    def kept(self) -> UnitDedupCounts:
        """What all of them were."""
        pairs = zip(self._parts, self._dropped, strict=True)
        return UnitDedupCounts(
            parts=[PartDedupCounts(counts[0], counts[1], dict(gone)) for counts, gone in pairs],
            documents=sum(counts[0] for counts in self._parts),
            tokens=sum(counts[1] for counts in self._parts),
            dropped=sum(gone.total() for gone in self._dropped),
            smallest=self._smallest.to_hex(),
            shards={name: self._cutters[name].shards for name in SUBSETS},
            moved=self._moved,
            seen=self._seen,
            subsets=dict(zip(SUBSETS, self._subsets.tolist(), strict=True)),
            long=self._long,
            longest=self._longest,
        )


def _tokens_by_subset(rows: NDArray[np.void], codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Tokens of documents by the place of their subset in ``SUBSETS``."""
    lengths = rows["length"].astype(np.int64)
    return np.array([lengths[codes == code].sum() for code in range(len(SUBSETS))], np.int64)


def _open_search_drops(order: ResolveDuplicatesTask) -> _DropRangeReader | None:
    """What is left out of a unit, as the search for duplicates found it."""
    if not order.exact and not order.near:
        return None

    def between(start: int, stop: int) -> NDArray[np.void]:
        pieces = []
        for reason, files in enumerate((order.exact, order.near)):
            numbers = read_unit_duplicates(files, order.number, start, stop)["number"]
            drops = np.zeros(len(numbers), DROPPED_ROW)
            drops["number"], drops["reason"] = numbers, reason
            pieces.append(drops)
        return np.sort(np.concatenate(pieces), order="number")

    return between


def _open_recorded_drops(path: Path) -> _DropRangeReader | None:
    """What is left out of a unit, as it was written down."""
    with translate_read_errors(path):
        if not path.stat().st_size:
            return None
        drops = np.memmap(path, DROPPED_ROW, "r").view(np.ndarray)

    def between(start: int, stop: int) -> NDArray[np.void]:
        # A search in the column itself would copy all of it.
        begin = bisect_left(drops, start, key=_drop_number)
        some = drops[begin : bisect_left(drops, stop, begin, key=_drop_number)].copy()
        release_pages(drops)
        return some

    return between


def _drop_number(drop: np.void) -> int:
    return int(drop["number"])


def make_decision(
    kept: Sequence[UnitDedupCounts],
    folders: Sequence[tuple[Path, Path]],
    sharding: ShardingSettings,
    held: Callable[[Collection[int]], Collection[int]] = lambda _: (),
) -> Decision:
    """Decide, once over all units, the subsets of single hashes and the numbers of the shards.

    Args:
        kept: what is left of each unit, in order.
        folders: of each unit the folders of its temporary files and of what is decided of it.
        sharding: the shares of the subsets, and the size of a shard.
        held: which of some hashes older documents have, whose subset is settled.
    """
    tokens = {name: sharding.tokens.get(name, 0) for name in SUBSETS}
    for unit in kept:
        for name, count in unit.subsets.items():
            tokens[name] += count
    total, shares = sum(tokens.values()), sharding.membership.shares
    if sharding.balance and any(misses_share(shares[name], tokens[name], total) for name in shares):
        overrides = _balance_shares(folders, sharding, tokens, held)
    else:
        overrides = _fill_empty(kept, sharding, held)
    decided = sharding.decided(overrides)
    affected = {value for value, _ in overrides}
    shards, moved = [], []
    counts = {name: sharding.shards.get(name, 0) for name in SUBSETS}
    tokens = dict(sharding.tokens)
    for number, (unit, (folder, place)) in enumerate(zip(kept, folders, strict=True)):
        mine, sums = unit.shards, unit.subsets
        if unit.moved or (
            affected and _has_moved_documents(folder, place, decided, sharding.decided(()))
        ):
            moved.append(number)
            cutters = {name: ShardCutter(sharding.most) for name in SUBSETS}
            added = np.zeros(len(SUBSETS), np.int64)
            for rows in iter_remaining_rows(folder, place):
                codes = decided.codes(rows["hash"])
                added += _tokens_by_subset(rows, codes)
                for code, name in enumerate(SUBSETS):
                    cutters[name].cut(rows[codes == code])
            mine = {name: cutter.shards for name, cutter in cutters.items()}
            sums = dict(zip(SUBSETS, added.tolist(), strict=True))
        shards.append({name: (counts[name], mine[name]) for name in SUBSETS})
        for name in SUBSETS:
            counts[name] += mine[name]
            tokens[name] = tokens.get(name, 0) + sums[name]
    plain = {f"{value:032x}": name for value, name in overrides}
    return Decision(plain, shards, moved, tokens)


def _fill_empty(
    kept: Sequence[UnitDedupCounts],
    sharding: ShardingSettings,
    held: Callable[[Collection[int]], Collection[int]],
) -> tuple[tuple[int, str], ...]:
    """Choose the hashes that move so that no wanted subset is empty."""
    smallest = SmallestHashes()
    for unit in kept:
        smallest.merge(unit.smallest)
    settled = held(smallest.hashes()) if sharding.wanted else ()
    return smallest.overrides(sharding.wanted, settled)


def _balance_shares(
    folders: Sequence[tuple[Path, Path]],
    sharding: ShardingSettings,
    tokens: Mapping[str, int],
    held: Callable[[Collection[int]], Collection[int]],
) -> tuple[tuple[int, str], ...]:
    """Choose the hashes that move so that subsets have their shares of the tokens."""
    candidates = {name: MoveCandidates(heaviest=name != SUBSETS[0]) for name in SUBSETS}
    membership = sharding.decided(())
    for folder, place in folders:
        for rows in iter_remaining_rows(folder, place):
            codes = membership.codes(rows["hash"])
            for code, name in enumerate(SUBSETS):
                some = rows[codes == code]
                candidates[name].add(some["hash"], some["length"])
    groups = {name: found.groups() for name, found in candidates.items()}
    # Equal documents of older generations stay where they are.
    fixed = {value for value, _ in sharding.settled}
    fixed |= set(held({one.hash for members in groups.values() for one in members}))
    free = {
        name: [one for one in members if one.hash not in fixed] for name, members in groups.items()
    }
    return tuple(balance_subsets(sharding.membership.shares, tokens, free).items())


def _has_moved_documents(
    folder: Path, place: Path, decided: SubsetRule, before: SubsetRule
) -> bool:
    """Return whether a unit has documents that move."""
    return any(
        bool((decided.codes(rows["hash"]) != before.codes(rows["hash"])).any())
        for rows in iter_remaining_rows(folder, place)
    )


def parse_overrides(decision: Decision) -> tuple[tuple[int, str], ...]:
    """What was decided for single hashes."""
    return tuple((int(value, 16), name) for value, name in decision.overrides.items())


def iter_unit_rows(folder: Path) -> Iterator[NDArray[np.void]]:
    """A unit's rows, a bounded stretch at a time; the two of a pair stay together."""
    path = folder / ROWS_NAME
    with translate_read_errors(path), path.open("rb") as file:
        while (rows := np.fromfile(file, ROW, _CHUNK_ROWS)).size:
            if rows["side"][-1] == CHOSEN:
                rows = np.concatenate([rows, np.fromfile(file, ROW, 1)])
            yield rows


def iter_remaining_rows(folder: Path, place: Path) -> Iterator[NDArray[np.void]]:
    """The rows of a unit that are left, a bounded stretch at a time."""
    for rows, why in iter_rows_with_reasons(folder, place):
        yield rows if why is None else rows[why == 0]


def iter_rows_with_reasons(
    folder: Path, place: Path
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None]]:
    """A unit's rows, each with 0 or 1 plus the place in ``DROP_REASONS`` of why it is left out.

    None stands for rows that are all kept.
    """
    for rows, why, _ in _iter_rows_with_drops(folder, _open_recorded_drops(place / DROPPED_NAME)):
        yield rows, why


def _iter_rows_with_drops(
    folder: Path, between: _DropRangeReader | None
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None, NDArray[np.void]]]:
    """The same with the drops that decide each stretch, of which there may be as many as documents."""
    at, before, group = 0, (-1, -1), -1
    for rows in iter_unit_rows(folder):
        why, drops = None, np.zeros(0, DROPPED_ROW)
        if between is not None:
            fresh = mark_first_of_records(rows, before)
            firsts = np.where(fresh, np.arange(at, at + len(rows)), -1)
            firsts[0] = max(int(firsts[0]), group)
            firsts = np.maximum.accumulate(firsts)
            drops = between(int(firsts[0]), at + len(rows))
            before, group = (int(rows["part"][-1]), int(rows["record"][-1])), int(firsts[-1])
        if len(drops):
            found = np.searchsorted(drops["number"], firsts)
            found = np.minimum(found, len(drops) - 1)
            gone = drops["number"][found] == firsts
            if gone.any():
                why = np.where(gone, drops["reason"][found] + 1, 0).astype(np.uint8)
        yield rows, why, drops
        at += len(rows)
