"""Units of work, planned from the listing alone, and their tasks and messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.core.files import decode_file_name
from batchloom.core.fingerprint import fingerprint
from batchloom.preparation.settings.run_settings import UNIT_BYTES
from batchloom.preparation.units.quarantine import ReasonCounts
from batchloom.sources import KnownCut, ReadRules, SourcePart, split_source
from batchloom.sources.files import Source

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
    parts: tuple[SourcePart, ...]

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
                    *(decode_file_name(part.source.name), part.source.kind, part.source.size),
                    content.get(part.source.path, part.source.mtime_ns),
                    *(part.start, part.stop),
                ]
                for part in unit.parts
            ],
        }
    )


def plan_units(
    sources: Sequence[Source], rules: ReadRules, unit_bytes: int = UNIT_BYTES, first_part: int = 0
) -> list[Unit]:
    """Group the parts of all sources, in order, into units of about ``unit_bytes``."""
    units: list[Unit] = []
    group: list[SourcePart] = []
    size, done = 0, first_part

    def close() -> None:
        nonlocal group, size, done
        units.append(Unit(len(units), done, tuple(group)))
        done += len(group)
        group, size = [], 0

    for source in sources:
        for part in split_source(source, rules, unit_bytes):
            length = part.stop - part.start
            if group and (size + length > unit_bytes or len(group) >= _MAX_UNIT_PARTS):
                close()
            group.append(part)
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
        output_path: final folder of its temporary files; of ``segment_keys`` the key file.
        attempt: suffix that keeps the files of this attempt apart from those of other attempts.
        suspected_ranges: record ranges (first, last) in which a worker died; processed in small batches, so
            that the next death narrows them down.
        excluded: records to skip, each with the reason.
        repeated: files that list repeated lines or paragraphs.
        known_cuts: part boundaries of its large CSV files and JSON lists.
        segment_keys: only write the keys of its lines or paragraphs.
    """

    unit: Unit
    output_path: Path
    attempt: str
    suspected_ranges: tuple[tuple[RecordPosition, RecordPosition], ...] = ()
    excluded: tuple[tuple[RecordPosition, str], ...] = ()
    repeated: tuple[Path, ...] = ()
    known_cuts: tuple[KnownCut, ...] = ()
    segment_keys: bool = False


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
