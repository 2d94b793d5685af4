"""Units of work, planned from the listing alone, their tasks, and crash isolation.

Each death of a worker narrows the range of suspected records.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import msgspec
import xxhash

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, WorkerError
from batchloom.core.files import decode_file_name
from batchloom.core.fingerprint import fingerprint
from batchloom.preparation.dedup.line_dedup import RepeatUnit
from batchloom.preparation.documents.document_facts import make_snippet
from batchloom.preparation.settings.run_settings import UNIT_BYTES
from batchloom.preparation.units.unit_report import ReasonCounts
from batchloom.sources import ReadRules, SourcePart, split_source
from batchloom.sources.files import CompactParts, Source

# Bounds the memory of a unit of very many small files.
_MAX_UNIT_PARTS = 1 << 14


@dataclass(frozen=True, slots=True)
class Unit:
    """Parts that are prepared together.

    Attributes:
        number: index of the unit in input order.
        first_part: number of its first part in the manifest's list of parts.
        parts: consecutive parts of one or several sources.
    """

    number: int
    first_part: int
    parts: Sequence[SourcePart]

    @property
    def bytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts)


def compute_unit_identity(unit: Unit, decided_by: Mapping[str, Any], content: Mapping[str, str]) -> str:
    """Return 32 hex digits that identify the inputs and settings of a unit.

    Args:
        unit: the parts.
        decided_by: settings as plain values: recipe, tokenizer, constants.
        content: content hash of each source by path, for sources not identified by mtime.
    """
    return fingerprint(
        {
            **decided_by,
            "parts": [
                [
                    decode_file_name(part.source.name),
                    part.source.kind,
                    part.source.size,
                    content.get(part.source.path, part.source.mtime_ns),
                    part.start,
                    part.stop,
                    *([asdict(part.source.sample)] if part.source.sample else []),
                ]
                for part in unit.parts
            ],
        }
    )


# A job of less than 8 GiB has 32 to 64 smaller units if they are large enough, so that several workers share it.
_UNITS_OF_SMALL_JOB = 32
_MIN_UNIT_BYTES = 32 << 20


def choose_unit_bytes(total_bytes: int) -> int:
    """Return the unit size for inputs: a power of two from 32 to 256 MiB.

    It depends on the inputs alone, so a store has the same bytes for any number of workers.
    """
    power_of_two = 1 << (total_bytes // _UNITS_OF_SMALL_JOB).bit_length() >> 1
    return min(max(power_of_two, _MIN_UNIT_BYTES), UNIT_BYTES)


def plan_units(
    sources: Sequence[Source], rules: ReadRules, unit_bytes: int = UNIT_BYTES, first_part: int = 0
) -> list[Unit]:
    """Group the parts of all sources, in order, into units of about ``unit_bytes``."""
    units: list[Unit] = []
    group = CompactParts(sources)
    size = 0
    done = first_part

    def close() -> None:
        nonlocal group, size, done
        units.append(Unit(len(units), done, group))
        done += len(group)
        group = CompactParts(sources)
        size = 0

    for number, source in enumerate(sources):
        for part in split_source(source, rules, unit_bytes):
            length = part.stop - part.start
            if group and (size + length > unit_bytes or len(group) >= _MAX_UNIT_PARTS):
                close()
            group.append(number, part.start, part.stop)
            size += length
    if group:
        close()
    return units


def combine_part_hashes(parts: Sequence[str]) -> str:
    """Return the hash of a source from the hashes of its parts, all as 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(part) for part in parts)))


# A record of a unit: (number of its part in the unit, its number in the part).
RecordPosition = tuple[int, int]
WorkerStage = Literal["clean", "encode"]


class CrashMarker(msgspec.Struct, frozen=True):
    """Range (first, last) of records that a worker is about to process; None for none."""

    stage: WorkerStage
    in_hand: tuple[RecordPosition, RecordPosition] | None


class DamagedPart(msgspec.Struct, frozen=True):
    """A part of a unit whose file is damaged: the unit starts over without it."""

    part: int
    reason: str


class UnitProgress(msgspec.Struct, frozen=True):
    """Progress of a unit since its start, with its first bad record and all reasons."""

    bytes: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: tuple[int, BadRecord] | None = None
    reasons: ReasonCounts = {}


@dataclass(frozen=True, slots=True)
class UnitTask:
    """Task of tokenizing one unit, or of finding its lines or paragraphs before.

    Attributes:
        unit: parts to read.
        output_path: final folder of its temporary files; with ``repeat_unit`` the key file.
        attempt: suffix that keeps the files of this attempt apart from those of other attempts.
        suspected_ranges: record ranges (first, last) in which a worker died; processed in small batches, so
            that the next death narrows them down.
        excluded: records to skip, each with the reason.
        repeated: files that list repeated lines or paragraphs.
        repeat_unit: only write the keys of its lines or paragraphs; None to tokenize it.
        whole_files: parts that are files which may be left out, if every record of them is bad.
    """

    unit: Unit
    output_path: Path
    attempt: str
    suspected_ranges: tuple[tuple[RecordPosition, RecordPosition], ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()
    repeated: tuple[Path, ...] = ()
    repeat_unit: RepeatUnit | None = None
    whole_files: frozenset[int] = frozenset()


class UnusableError(InputError):
    """A record that ends the job; the coordinator adds its position in the source.

    Attributes:
        unit: number of the unit.
        part: number of the part inside the unit.
        bad: the record.
    """

    def __init__(self, unit: int, part: int, bad: BadRecord) -> None:
        super().__init__(bad.reason)
        self.unit = unit
        self.part = part
        self.bad = bad

    def __reduce__(self) -> tuple[type["UnusableError"], tuple[int, int, BadRecord]]:
        return UnusableError, (self.unit, self.part, self.bad)


# A suspected range is processed in this many slices, so a few deaths find one record in thousands.
_SPLITS = 16

RecordRange = tuple[RecordPosition, RecordPosition]


@final
class CrashIsolation:
    """Splitter of batches into small suspected ones, without excluded records."""

    def __init__(self, suspected_ranges: Sequence[RecordRange], excluded: Sequence[tuple[RecordPosition, str]]) -> None:
        self._suspected_ranges = tuple(suspected_ranges)
        self._excluded = dict(excluded)

    def split_batch(self, part: int, batch: Records) -> Iterator[tuple[Records, bool]]:
        """Yield slices of a batch, each with whether it is suspected.

        The first slice has only the bad records, unless nothing is suspected or excluded.
        """
        if not self._suspected_ranges and not self._excluded:
            yield batch, False
            return
        self._exclude(part, batch)
        first = Records(bad=batch.bad, records_read=batch.records_read)
        yield first, False
        sizes = [self._size(part, record) for record in batch.records]
        start = 0
        while start < len(sizes):
            stop = start + 1
            size = sizes[start]
            while stop < len(sizes) and sizes[stop] == size and (not size or stop - start < size):
                stop += 1
            sub_batch = Records(batch.values[start:stop], batch.records[start:stop], batch.offsets[start:stop])
            yield sub_batch, size > 0
            start = stop

    def _size(self, part: int, record: int) -> int:
        """Return the maximum batch size for a record; 0 for no limit."""
        sizes = [
            max(1, math.ceil((last[1] - first[1] + 1) / _SPLITS)) if first[0] == last[0] else 1
            for first, last in self._suspected_ranges
            if first <= (part, record) <= last
        ]
        return min(sizes, default=0)

    def _exclude(self, part: int, batch: Records) -> None:
        kept_indices = []
        for index, record in enumerate(batch.records):
            reason = self._excluded.get((part, record))
            if reason is None:
                kept_indices.append(index)
                continue
            value = batch.values[index]
            snippet = make_snippet(value) if isinstance(value, str) else ""
            batch.bad.append(BadRecord(record, batch.offsets[index], None, reason, snippet))
        batch.select(kept_indices)


@dataclass(frozen=True, slots=True)
class CrashState:
    """Deaths of a unit's workers since a record was last excluded."""

    count: int = 0
    suspected_ranges: tuple[RecordRange, ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()


# After this many deaths no document is to blame.
MAX_DEATHS = 12


def update_after_crash(state: CrashState, in_hand: Sequence[RecordRange], reason: str) -> CrashState:
    """Decide the next state of a unit after another of its workers died.

    The first death proves nothing: any process may have used up the memory. After the second, the records in
    flight are suspected; a suspected single record is excluded if a worker dies with only it in flight.
    ``reason`` is a verb phrase.
    """
    count = state.count + 1
    if count == 1:
        return CrashState(count, (), state.excluded)
    single = [first for first, last in in_hand if first == last]
    suspected_positions = [
        position for position in single if any(a <= position <= b for a, b in state.suspected_ranges)
    ]
    if suspected_positions and len(in_hand) == len(single):
        exclusion_reason = (
            f"the worker that processed it {reason}, {count:,} times; give workers more memory (--workers fewer), "
            "or fix or remove the record"
        )
        position = suspected_positions[0]
        return CrashState(0, (), (*state.excluded, (position, exclusion_reason)))
    return CrashState(count, tuple(in_hand), state.excluded)


class RecordExcludedError(Exception):
    """A record was excluded that affects other units.

    ``excluded`` has all excluded records of its unit, with reasons.
    """

    def __init__(self, unit: int, excluded: tuple[tuple[RecordPosition, str], ...]) -> None:
        super().__init__(unit)
        self.unit = unit
        self.excluded = excluded


@final
class CrashTracker:
    """Tracker of worker deaths by unit.

    ``together`` means that excluded records of one unit affect other units.
    """

    def __init__(self, units: Sequence[Unit], note: Callable[[str], None], *, together: bool) -> None:
        self._units = units
        self._note = note
        self._together = together
        self._in_hand: dict[int, dict[str, RecordRange]] = {}
        self._deaths: dict[int, CrashState] = {}

    def record_marker(self, number: int, marker: CrashMarker) -> None:
        """Store the records that a unit's worker has in flight."""
        stages = self._in_hand.setdefault(number, {})
        if marker.in_hand is None:
            stages.pop(marker.stage, None)
        else:
            stages[marker.stage] = marker.in_hand

    def clear_markers(self, number: int) -> None:
        """Forget the records in flight; earlier deaths still count."""
        self._in_hand.pop(number, None)

    def forget_unit(self, number: int) -> None:
        self._in_hand.pop(number, None)
        self._deaths.pop(number, None)

    def handle_crash(self, number: int, task: UnitTask, reason: str) -> UnitTask:
        stages = self._in_hand.pop(number, {})
        state = self._deaths.get(number, CrashState(excluded=task.excluded))
        deaths = self._deaths[number] = update_after_crash(state, list(stages.values()), reason)
        parts = self._units[number].parts
        part = next(iter(stages.values()))[0][0] if stages else 0
        name = parts[part].source.name
        if deaths.count > MAX_DEATHS:
            raise WorkerError(
                f"{deaths.count} workers died at unit {number} ({name}), and no single record causes it; the last "
                f"one {reason}. Give workers more memory (fewer of them: --workers 1), then give the same command "
                "again to resume."
            )
        if len(deaths.excluded) > len(task.excluded):
            (part, record), _ = deaths.excluded[-1]
            name = parts[part].source.name
            self._note(
                f"Record {record:,} of a part of {name} is quarantined: the worker that processed it {reason}, again."
            )
            if self._together:
                raise RecordExcludedError(number, deaths.excluded)
        else:
            self._note(f"A worker of unit {number} ({name}) {reason}: the unit is retried.")
        attempt = f"{task.attempt.partition('-')[0]}-{deaths.count}-{len(deaths.excluded)}"
        return replace(task, attempt=attempt, suspected_ranges=deaths.suspected_ranges, excluded=deaths.excluded)
