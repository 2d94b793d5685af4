"""Documents as they travel from a source to the store: in columns, many at a time."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used: it goes to the quarantine file.

    Attributes:
        record: 0-based number of the record inside its part of the source.
        offset: byte offset of the record in the (decompressed) source.
        column: 1-based column of the fault, None where it is the record as a whole.
        reason: what is wrong and how to mend it, one sentence.
        snippet: the first characters of the record, for a person to recognise it.
    """

    record: int
    offset: int
    column: int | None
    reason: str
    snippet: str


@dataclass(slots=True)
class Documents:
    """A batch of documents of one source, in columns of equal length, in source order.

    Attributes:
        texts: the text of each document.
        records: 0-based number of each document's record inside its part of the source.
        offsets: byte offset of each record in the (decompressed) source.
        bad: records of the same stretch that cannot be used.
        seen: records read in this stretch, good, bad and empty ones alike.
    """

    texts: list[str] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    seen: int = 0
