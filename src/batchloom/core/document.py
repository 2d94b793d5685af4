"""What a stretch of a source holds: texts or whole rows, in columns, many at a time."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used: it goes to the quarantine file.

    Attributes:
        record: 0-based number of the record inside its part of the source.
        offset: byte offset of the record in the (decompressed) source.
        column: 1-based column of the fault, None where it is the record as a whole.
        reason: what is wrong and how to mend it, one sentence.
        snippet: the first characters of the record, for a person to recognise it.
        line: 1-based line of the source where the fault lies, where the reader counts lines
            that are not records; else None.
    """

    record: int
    offset: int
    column: int | None
    reason: str
    snippet: str
    line: int | None = None


@dataclass(slots=True)
class Records:
    """Records of one source, in columns of equal length, in source order.

    Attributes:
        values: of each record its text (str), where the source is text or a text field was
            named; else the whole row (``dict[str, Any]``), every value as it was found.
        records: 0-based number of each record inside its part of the source.
        offsets: byte offset of each record in the (decompressed) source; of a columnar source,
            of the row group or record batch that holds it.
        bad: records of the same stretch that cannot be used.
        records_read: records read in this stretch, good, bad and empty ones alike.
    """

    values: list[Any] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    records_read: int = 0
