"""Finding the document that kills its worker: each death narrows the stretch it must lie in."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import WorkerError
from batchloom.preparation.documents import make_snippet
from batchloom.preparation.units.tasks import CrashMarker, RecordPosition, SegmentKeysTask, UnitTask
from batchloom.preparation.units.units import Unit

# A suspected stretch is taken in hand in so many pieces, so a few deaths find one record in thousands.
_SPLITS = 16

RecordRange = tuple[RecordPosition, RecordPosition]


@final
class CrashIsolation:
    """Records that are taken in hand a few at a time, and records that are not taken at all.

    Args:
        stretches: first and last record of each suspected stretch, both included.
        excluded: records that are kept aside, each with the reason.
    """

    def __init__(
        self, stretches: Sequence[RecordRange], excluded: Sequence[tuple[RecordPosition, str]]
    ) -> None:
        self._stretches, self._excluded = tuple(stretches), dict(excluded)

    def pieces(self, part: int, found: Records) -> Iterator[tuple[Records, bool]]:
        """What a reader gave, in pieces, each with whether it is suspected; bad ones come first."""
        if not self._stretches and not self._excluded:
            yield found, False
            return
        self._exclude(part, found)
        first = Records(bad=found.bad, seen=found.seen)
        yield first, False
        sizes = [self._size(part, record) for record in found.records]
        at = 0
        while at < len(sizes):
            stop, size = at + 1, sizes[at]
            while stop < len(sizes) and sizes[stop] == size and (not size or stop - at < size):
                stop += 1
            piece = Records(found.values[at:stop], found.records[at:stop], found.offsets[at:stop])
            yield piece, size > 0
            at = stop

    def _size(self, part: int, record: int) -> int:
        """How many records are taken with this one at most; 0 for any number."""
        sizes = [
            max(1, math.ceil((last[1] - first[1] + 1) / _SPLITS)) if first[0] == last[0] else 1
            for first, last in self._stretches
            if first <= (part, record) <= last
        ]
        return min(sizes, default=0)

    def _exclude(self, part: int, found: Records) -> None:
        kept = []
        for at, record in enumerate(found.records):
            reason = self._excluded.get((part, record))
            if reason is None:
                kept.append(at)
                continue
            snippet = _make_snippet(found.values[at])
            found.bad.append(BadRecord(record, found.offsets[at], None, reason, snippet))
        found.values = [found.values[at] for at in kept]
        found.records = [found.records[at] for at in kept]
        found.offsets = [found.offsets[at] for at in kept]


def _make_snippet(value: object) -> str:
    return make_snippet(value) if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class CrashState:
    """What is known of a unit whose workers died.

    Attributes:
        count: how many died since a record was last excluded.
        stretches: where the last of them may have died.
        excluded: records that are kept aside, each with the reason.
    """

    count: int = 0
    stretches: tuple[RecordRange, ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()


# Beyond these the deaths are of no document's making.
MAX_DEATHS = 12


def update_after_crash(
    known: CrashState, in_hand: Sequence[RecordRange], reason: str
) -> CrashState:
    """What to do with a unit after one more of its workers died: the decision, without doing it.

    The first death says nothing: the machine may have been out of memory for anybody's sake. After the
    second the records that were in hand are suspected; a single one in whose hand a worker died
    again is excluded.

    Args:
        known: what was known before.
        in_hand: the stretches of records that the worker had in hand.
        reason: how it died, in the middle of a sentence.
    """
    count = known.count + 1
    if count == 1:
        return CrashState(count, (), known.excluded)
    single = [first for first, last in in_hand if first == last]
    fresh = [place for place in single if any(a <= place <= b for a, b in known.stretches)]
    if fresh and len(in_hand) == len(single):
        why = (
            f"the worker that took it in hand {reason}, {count:,} times; give workers more memory "
            "(--workers fewer), or mend or remove the record"
        )
        place = fresh[0]
        return CrashState(0, (), (*known.excluded, (place, why)))
    return CrashState(count, tuple(in_hand), known.excluded)


_UnitTaskT = TypeVar("_UnitTaskT", UnitTask, SegmentKeysTask)


class RecordExcludedError(Exception):
    """A record is kept aside, and with it goes what others were compared with.

    Attributes:
        unit: number of its unit.
        excluded: all that is kept aside of that unit, each with the reason.
    """

    def __init__(self, unit: int, excluded: tuple[tuple[RecordPosition, str], ...]) -> None:
        super().__init__(unit)
        self.unit, self.excluded = unit, excluded


@final
class CrashTracker:
    """What is known of units whose workers died.

    Args:
        units: all units in order.
        note: is given sentences for the user.
        together: whether what is kept aside of one unit has a say in what becomes of others.
    """

    def __init__(
        self, units: Sequence[Unit], note: Callable[[str], None], *, together: bool
    ) -> None:
        self._units, self._note, self._together = units, note, together
        self._in_hand: dict[int, dict[str, RecordRange]] = {}
        self._deaths: dict[int, CrashState] = {}

    def hear(self, number: int, at: CrashMarker) -> None:
        """Take what the worker of a unit has in hand."""
        stages = self._in_hand.setdefault(number, {})
        if at.in_hand is None:
            stages.pop(at.stage, None)
        else:
            stages[at.stage] = at.in_hand

    def done(self, number: int) -> None:
        """What was known of a unit does not matter any more."""
        self._in_hand.pop(number, None)
        self._deaths.pop(number, None)

    def lost(self, number: int, order: _UnitTaskT, reason: str) -> _UnitTaskT:
        """The order to give in place of one whose worker is gone.

        Raises:
            WorkerError: workers die of this unit for ever.
            RecordExcludedError: a record is kept aside, and other units have to know.
        """
        stages = self._in_hand.pop(number, {})
        known = self._deaths.get(number, CrashState(excluded=order.excluded))
        deaths = self._deaths[number] = update_after_crash(known, list(stages.values()), reason)
        parts = self._units[number].parts
        part = next(iter(stages.values()))[0][0] if stages else 0
        name = parts[part].source.name
        if deaths.count > MAX_DEATHS:
            raise WorkerError(
                f"{deaths.count} workers died of unit {number} ({name}), and no single record does it; the last one "
                f"{reason}. Give workers more memory (fewer of them: --workers 1), then give the same command again: "
                "it goes on."
            )
        if len(deaths.excluded) > len(order.excluded):
            (part, record), _ = deaths.excluded[-1]
            name = parts[part].source.name
            self._note(
                f"Record {record:,} of a part of {name} is kept aside: the worker that took it in hand {reason}, again."
            )
            if self._together:
                raise RecordExcludedError(number, deaths.excluded)
        else:
            self._note(f"A worker of unit {number} ({name}) {reason}: the unit is done again.")
        attempt = f"{order.attempt.partition('-')[0]}-{deaths.count}-{len(deaths.excluded)}"
        return replace(order, attempt=attempt, suspects=deaths.stretches, excluded=deaths.excluded)
