"""Phases B and C: what every shard holds is decided over all units, then each unit writes its own."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.recipe import SHARD_DOCUMENTS
from batchloom.preparation.subsets import Membership, Smallest
from batchloom.preparation.unit_files import (
    ROW,
    ROWS_NAME,
    SHARDS_NAME,
    gather,
    tokens_name,
    trained_name,
)
from batchloom.preparation.units import Unit
from batchloom.preparation.work import Decision, UnitFacts, WorkFolder, reading
from batchloom.store.format import SUBSETS, shard_name
from batchloom.store.index import index_bytes
from batchloom.store.manifest import ShardEntry
from batchloom.store.mask import MaskBits
from batchloom.store.origins import Origins
from batchloom.store.pairs import CHOSEN, Sides, pair_numbers
from batchloom.store.writer import (
    ASIDE,
    ShardWriter,
    make_folder,
    sync_folder,
    write_file,
    write_mask,
    write_sides,
    writing,
)

_STRETCH_ROWS = 1 << 16
_STRETCH_TOKENS = 1 << 20


@final
class ShardCutter:
    """Where the shards of one unit and subset end, as its documents pass.

    Args:
        most_tokens: a shard has at most so many, except for a single longer document or pair.
        most_documents: a shard has at most so many.
    """

    def __init__(self, most_tokens: int, most_documents: int = SHARD_DOCUMENTS) -> None:
        self._most_tokens, self._most_documents = most_tokens, most_documents
        self._tokens = self._documents = 0
        self.shards = 0

    def cut(self, rows: NDArray[np.void]) -> list[tuple[int, int, bool]]:
        """Stretches (start, stop, whether a shard begins) of the next documents.

        Args:
            rows: the documents [D], with the second of each pair that begins among them.
        """
        sums = np.cumsum(rows["length"], dtype=np.int64)
        # Where a shard may end: behind every document but the first of a pair.
        ends = np.flatnonzero(rows["side"] != CHOSEN) + 1
        reach = sums[ends - 1]
        pieces, at, start = [], 0, 0
        while at < len(ends):
            before = int(reach[at - 1]) if at else 0
            room = before + self._most_tokens - self._tokens
            last = start + self._most_documents - self._documents
            fit = int(np.searchsorted(reach, room, side="right"))
            fit = min(fit, int(np.searchsorted(ends, last, side="right")))
            if fit <= at and self._documents:
                self._tokens = self._documents = 0
                continue
            fit = max(fit, at + 1)
            stop = int(ends[fit - 1])
            fresh = self._documents == 0
            self.shards += fresh
            self._documents += stop - start
            self._tokens += int(reach[fit - 1]) - before
            pieces.append((start, stop, fresh))
            at, start = fit, stop
        return pieces


def decide(
    work: WorkFolder,
    units: Sequence[Unit],
    facts: Sequence[UnitFacts],
    membership: Membership,
    most: int,
) -> Decision:
    """Decide, once over all units, the subsets of single hashes and the numbers of the shards.

    Args:
        work: holds the units' temporary files, and keeps the decision.
        units: all units in order.
        facts: what came of each.
        membership: the shares of the subsets.
        most: tokens of a shard at most.
    """
    smallest = Smallest()
    for fact in facts:
        smallest.merge(fact.smallest)
    overrides = smallest.overrides(membership.wanted())
    decided = Membership(membership.val_fraction, membership.test_fraction, overrides)
    shards, counts = [], dict.fromkeys(SUBSETS, 0)
    for unit in units:
        cutters = _cut_unit(work.unit(unit.number), decided, most)
        shards.append({name: (counts[name], cutters[name].shards) for name in SUBSETS})
        for name in SUBSETS:
            counts[name] += cutters[name].shards
    decision = Decision({f"{value:032x}": name for value, name in overrides}, shards)
    work.decide(decision)
    return decision


def decided_membership(decision: Decision, membership: Membership) -> Membership:
    """The shares of the subsets together with what was decided for single hashes."""
    overrides = tuple((int(value, 16), name) for value, name in decision.overrides.items())
    return Membership(membership.val_fraction, membership.test_fraction, overrides)


def _cut_unit(folder: Path, membership: Membership, most: int) -> dict[str, ShardCutter]:
    cutters = {name: ShardCutter(most) for name in SUBSETS}
    for rows in _row_stretches(folder):
        codes = membership.codes(rows["hash"])
        for code, name in enumerate(SUBSETS):
            cutters[name].cut(rows[codes == code])
    return cutters


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What writing the shards of every unit needs to know.

    Attributes:
        store: folder of the growing store.
        dtype: of a token on disk.
        natural: the shares of the subsets, by which the temporary files are apart.
        decided: the subsets, overrides included.
        most: tokens of a shard at most.
    """

    store: Path
    dtype: np.dtype[np.generic]
    natural: Membership
    decided: Membership
    most: int


def write_unit(
    unit: Unit, folder: Path, task: ShardTask, facts: UnitFacts, numbers: dict[str, tuple[int, int]]
) -> dict[str, list[ShardEntry]]:
    """Write a unit's documents into its own shards of each subset, then drop its temporary files.

    A token file that is one whole shard already is linked into the store; others are copied.

    Args:
        unit: the unit.
        folder: its temporary files.
        task: the job's settings.
        facts: what came of the unit.
        numbers: of each subset the number of the unit's first shard, and how many it has.

    Raises:
        OutputError: the shards cannot be written.
    """
    overridden = {f"{value:032x}" for value, _ in task.decided.overrides}
    moved = any(overridden.intersection(values) for values in facts.smallest.values())
    entries: dict[str, list[ShardEntry]] = {name: [] for name in SUBSETS}
    copied = []
    for name, (first, count) in numbers.items():
        stem = task.store / name / shard_name(first)
        if count == 1 and not moved and _link_tokens(folder / tokens_name(name), stem):
            entries[name] = [_adopt(unit, folder, task, stem, facts.checksums[name])]
        elif count:
            copied.append(name)
    if copied:
        entries |= _copy(unit, folder, task, {name: numbers[name][0] for name in copied})
    for name in {name for name, found in entries.items() if found}:
        sync_folder(task.store / name)
    write_file(folder / SHARDS_NAME, msgspec.json.encode(entries))
    sync_folder(folder)
    _drop_temporary(folder)
    return entries


def _drop_temporary(folder: Path) -> None:
    with writing(folder):
        for name in (ROWS_NAME, *map(tokens_name, SUBSETS), *map(trained_name, SUBSETS)):
            (folder / name).unlink(missing_ok=True)


def _link_tokens(tokens: Path, stem: Path) -> bool:
    """Give a token file its place in the store, under the name of a file not finished."""
    make_folder(stem.parent)
    aside = _aside(stem)
    aside.unlink(missing_ok=True)
    try:
        aside.hardlink_to(tokens)
    except OSError:
        # Not every file system has links; copying finds any other fault and names it.
        return False
    return True


def _aside(stem: Path) -> Path:
    return stem.with_name(stem.name + ".bin" + ASIDE)


def _adopt(unit: Unit, folder: Path, task: ShardTask, stem: Path, checksum: str) -> ShardEntry:
    """Finish a shard whose tokens are linked: its index, its origins, its name."""
    code = SUBSETS.index(stem.parent.name)
    taken = np.concatenate(
        [rows[task.decided.codes(rows["hash"]) == code] for rows in _row_stretches(folder)]
    )
    lengths, tokens = taken["length"].astype(np.uint32), int(taken["length"].sum(dtype=np.int64))
    idx = write_file(stem.with_suffix(".idx"), index_bytes(lengths, task.dtype))
    docs = write_file(stem.with_suffix(".docs"), _origins(taken, unit.first_part).to_bytes())
    bits = _mask_bits(folder / trained_name(stem.parent.name))
    mask = write_mask(stem, bits)
    pairs = write_sides(stem, _sides(taken, unit.first_part))
    with writing(stem):
        _aside(stem).replace(stem.with_suffix(".bin"))
    return ShardEntry(
        name=stem.name,
        documents=len(taken),
        tokens=tokens,
        bytes=tokens * task.dtype.itemsize,
        bin=checksum,
        idx=idx,
        docs=docs,
        mask=mask,
        trained=bits.trained if mask else None,
        pairs=pairs,
    )


def _mask_bits(path: Path) -> MaskBits:
    """The flags of a whole token file, packed; none where the file is not there."""
    bits = MaskBits()
    if path.exists():
        with reading(path), path.open("rb") as file:
            while (flags := np.fromfile(file, np.bool_, _STRETCH_TOKENS)).size:
                bits.append(flags)
    return bits


def _copy(
    unit: Unit, folder: Path, task: ShardTask, first_shards: dict[str, int]
) -> dict[str, list[ShardEntry]]:
    """Write the shards of these subsets document by document."""
    writers = {
        name: SubsetWriter(task, name, first, unit.first_part)
        for name, first in first_shards.items()
    }
    try:
        for rows, tokens, starts, trained in _stretches(folder, task):
            codes = task.decided.codes(rows["hash"])
            for name, writer in writers.items():
                mine = np.flatnonzero(codes == SUBSETS.index(name))
                writer.add(rows, tokens, starts, mine, trained)
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()


def _row_stretches(folder: Path) -> Iterator[NDArray[np.void]]:
    """A unit's rows, a bounded stretch at a time; the two of a pair stay together."""
    path = folder / ROWS_NAME
    with reading(path), path.open("rb") as file:
        while (rows := np.fromfile(file, ROW, _STRETCH_ROWS)).size:
            if rows["side"][-1] == CHOSEN:
                rows = np.concatenate([rows, np.fromfile(file, ROW, 1)])
            yield rows


class _Stretch(NamedTuple):
    """Documents of a unit: rows, tokens, where each begins in them, which tokens are trained."""

    rows: NDArray[np.void]
    tokens: NDArray[np.generic]
    starts: NDArray[np.int64]
    trained: NDArray[np.bool_] | None


def _stretches(folder: Path, task: ShardTask) -> Iterator[_Stretch]:
    """A unit's documents, a bounded stretch at a time."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(folder / tokens_name(name))) for name in SUBSETS]
        flags = [folder / trained_name(name) for name in SUBSETS]
        masks = [stack.enter_context(_open(path)) if path.exists() else None for path in flags]
        for rows in _row_stretches(folder):
            sums = np.cumsum(rows["length"], dtype=np.int64)
            at = 0
            while at < len(rows):
                before = int(sums[at - 1]) if at else 0
                stop = int(np.searchsorted(sums, before + _STRETCH_TOKENS, side="right"))
                stop = max(stop, at + 1)
                stop += int(rows["side"][stop - 1] == CHOSEN)
                yield _tokens_of(rows[at:stop], files, masks, task)
                at = stop


def _open(path: Path) -> IO[bytes]:
    with reading(path):
        return path.open("rb")


def _tokens_of(
    rows: NDArray[np.void],
    files: Sequence[IO[bytes]],
    masks: Sequence[IO[bytes] | None],
    task: ShardTask,
) -> _Stretch:
    """The tokens of these rows from the files of the subsets, and what belongs to them."""
    codes = task.natural.codes(rows["hash"])
    starts, pieces, at = np.zeros(len(rows), np.int64), [], 0
    flags = []
    for code, (file, mask) in enumerate(zip(files, masks, strict=True)):
        mine = codes == code
        lengths = rows["length"][mine].astype(np.int64)
        stops = at + np.cumsum(lengths)
        starts[mine] = stops - lengths
        count = int(lengths.sum())
        pieces.append(np.fromfile(file, task.dtype, count))
        flags.append(np.fromfile(mask, np.bool_, count) if mask else np.ones(count, bool))
        at += count
    trained = np.concatenate(flags) if any(masks) else None
    return _Stretch(rows, np.concatenate(pieces), starts, trained)


def _origins(rows: NDArray[np.void], first_part: int) -> Origins:
    parts = (rows["part"] + np.uint32(first_part)).astype(np.uint32)
    return Origins(rows["hash"], rows["record"], rows["offset"], parts)


def _sides(rows: NDArray[np.void], first_part: int) -> Sides | None:
    """Pair and side of each document; None where they are no preferences."""
    if not rows["side"].any():
        return None
    origins = _origins(rows, first_part)
    return Sides(pair_numbers(origins.parts, origins.records), rows["side"])


@final
class SubsetWriter:
    """Writes shards of one subset one after the other: those of a unit, or of copied ids."""

    def __init__(self, task: ShardTask, subset: str, first_shard: int, first_part: int) -> None:
        self._task, self._folder = task, task.store / subset
        self._next, self._first_part = first_shard, first_part
        self._cutter = ShardCutter(task.most)
        self._shard: ShardWriter | None = None
        self._rows: list[NDArray[np.void]] = []
        self._entries: list[ShardEntry] = []

    def add(
        self,
        rows: NDArray[np.void],
        tokens: NDArray[np.generic],
        starts: NDArray[np.int64],
        mine: NDArray[np.int64],
        trained: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append the documents ``mine`` of a stretch, whose tokens begin at ``starts``.

        ``trained`` says of each of ``tokens`` whether it is trained; None: every one.
        """
        for begin, end, fresh in self._cutter.cut(rows[mine]):
            if fresh:
                self._close()
                self._open()
            chosen = mine[begin:end]
            if self._shard is None:
                raise AssertionError("a cutter's first stretch begins a shard")
            taken = rows[chosen]
            stops = starts[chosen] + taken["length"]
            flags = None if trained is None else gather(trained, starts[chosen], stops)
            self._shard.append(gather(tokens, starts[chosen], stops), flags)
            self._rows.append(taken)

    def finish(self) -> list[ShardEntry]:
        """Close the last shard; the entries of all."""
        self._close()
        return self._entries

    def abandon(self) -> None:
        """Close what is open without a name, after an error."""
        if self._shard is not None:
            with contextlib.suppress(OSError):
                self._shard.abandon()

    def _open(self) -> None:
        make_folder(self._folder)
        self._shard = ShardWriter(self._folder / shard_name(self._next), self._task.dtype)
        self._next += 1

    def _close(self) -> None:
        if self._shard is not None:
            rows, self._rows = np.concatenate(self._rows), []
            origins = _origins(rows, self._first_part)
            sides = _sides(rows, self._first_part)
            lengths = rows["length"].astype(np.uint32)
            self._entries.append(self._shard.finish(lengths, origins, sides))
            self._shard = None
