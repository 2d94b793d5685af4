"""What is said between the one who hands out units and the workers who do them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.preparation.units.quarantine import ReasonCounts
from batchloom.preparation.units.units import Unit
from batchloom.sources.formats import KnownCut

# A record of a unit: number of its part inside the unit, its own number inside the part.
RecordPosition = tuple[int, int]
WorkerStage = Literal["clean", "encode"]


class CrashMarker(msgspec.Struct, frozen=True):
    """A worker is about to take records in hand, those from ``first`` to ``last``; None: it has none."""

    stage: WorkerStage
    in_hand: tuple[RecordPosition, RecordPosition] | None


class UnitProgress(msgspec.Struct, frozen=True):
    """What came of a unit so far, counted from its beginning; of bad records the first and their reasons, too."""

    bytes: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: tuple[int, BadRecord] | None = None
    reasons: ReasonCounts = {}


@dataclass(frozen=True, slots=True)
class UnitTask:
    """One unit to be read and tokenized.

    Attributes:
        unit: the parts to read.
        folder: where its temporary files are when they are whole.
        attempt: sets the files of this attempt apart from those of another one.
        suspected_ranges: stretches of records (first, last) in which a worker died: taken in hand a few
            at a time, so that the next death says more.
        excluded: records that are kept aside unread, with the reason.
        repeated: files that name lines (or paragraphs) that stood before.
        known_cuts: where its parts of large CSV files and JSON lists begin and end.
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
    """One unit whose lines (or paragraphs) are to be kept as keys, before any unit is tokenized.

    Attributes:
        unit: the parts to read.
        keys_path: file of the keys.
        attempt: sets the file of this attempt apart from that of another one.
        suspected_ranges, excluded, known_cuts: as those of a :class:`UnitTask`.
    """

    unit: Unit
    keys_path: Path
    attempt: str
    suspected_ranges: tuple[tuple[RecordPosition, RecordPosition], ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()
    known_cuts: tuple[KnownCut, ...] = ()


class UnusableError(InputError):
    """A record that ends the job: who knows the records before its part says where it stands.

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
