"""Tasks and messages between the coordinator and the workers of units."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.preparation.units.quarantine import ReasonCounts
from batchloom.preparation.units.units import Unit
from batchloom.sources.formats import KnownCut

# A record of a unit: (number of its part in the unit, its number in the part).
RecordPosition = tuple[int, int]
WorkerStage = Literal["clean", "encode"]


class CrashMarker(msgspec.Struct, frozen=True):
    """Range (first, last) of records that a worker is about to process; None for none."""

    stage: WorkerStage
    in_hand: tuple[RecordPosition, RecordPosition] | None


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
    """Task of reading and tokenizing one unit.

    Attributes:
        unit: parts to read.
        folder: final folder of its temporary files.
        attempt: suffix that keeps the files of this attempt apart from those of other attempts.
        suspected_ranges: record ranges (first, last) in which a worker died; processed in small batches, so
            that the next death narrows them down.
        excluded: records to skip, each with the reason.
        repeated: files that list repeated lines or paragraphs.
        known_cuts: part boundaries of its large CSV files and JSON lists.
    """

    unit: Unit
    folder: Path
    attempt: str
    suspected_ranges: tuple[tuple[RecordPosition, RecordPosition], ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()
    repeated: tuple[Path, ...] = ()
    known_cuts: tuple[KnownCut, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentKeysTask:
    """Task of writing the keys of a unit's lines or paragraphs, before tokenization.

    Attributes:
        unit: parts to read.
        keys_path: output file.
        attempt: suffix that keeps the file of this attempt apart from those of other attempts.
        suspected_ranges, excluded, known_cuts: as in :class:`UnitTask`.
    """

    unit: Unit
    keys_path: Path
    attempt: str
    suspected_ranges: tuple[tuple[RecordPosition, RecordPosition], ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()
    known_cuts: tuple[KnownCut, ...] = ()


class UnusableError(InputError):
    """A record that ends the job; the coordinator adds its position in the source.

    Attributes:
        unit: number of the unit.
        part: number of the part inside the unit.
        bad: the record.
    """

    def __init__(self, unit: int, part: int, bad: BadRecord) -> None:
        super().__init__(bad.reason)
        self.unit, self.part, self.bad = unit, part, bad

    def __reduce__(self) -> tuple[type["UnusableError"], tuple[int, int, BadRecord]]:
        return UnusableError, (self.unit, self.part, self.bad)
