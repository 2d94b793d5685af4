"""Units of work, planned from the listing alone before anything is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from batchloom.core.files import decode_file_name
from batchloom.core.fingerprint import fingerprint
from batchloom.sources import ReadRules, SourcePart, split_source
from batchloom.sources.files import Source

# Listed input bytes of a unit; a constant, because the cuts of large files depend on it.
UNIT_BYTES = 256 << 20
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
        """Bytes of listed input."""
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


def plan_units(sources: Sequence[Source], rules: ReadRules, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Group the parts of all sources, in order, into units of about ``unit_bytes``."""
    units: list[Unit] = []
    group: list[SourcePart] = []
    size = done = 0

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
