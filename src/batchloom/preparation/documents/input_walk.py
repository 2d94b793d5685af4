"""Reading parts of sources as documents, for those who look and write nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batchloom.core.document import Records
from batchloom.core.errors import InputError
from batchloom.preparation.documents.record_parsers import RecordParser, RecordParsers
from batchloom.preparation.documents.token_encoder import estimate_characters
from batchloom.sources import PartReader, RecordBounds, SourcePart

# A stretch without documents counts as so many characters.
_MIN_BATCH_CHARACTERS = 64 << 10

OnInputError = Callable[[SourcePart, InputError], None]


@dataclass(frozen=True, slots=True)
class ParsedRecords:
    """What a reader gives at once.

    Attributes:
        part: what is read.
        reading: how.
        found: documents; rows that make none are among its bad records.
        before: records of the source before the part; None where nobody has counted them.
        consumed: bytes of the part, as listed, that were read so far.
        ended: whether the part was read to its end; this stretch holds nothing more of it.
    """

    part: SourcePart
    reading: RecordParser
    found: Records
    before: int | None
    consumed: int
    ended: bool = False


def iter_parsed_records(
    parts: Iterable[tuple[SourcePart, int | None]],
    readings: RecordParsers,
    bounds: RecordBounds | None,
    refused: OnInputError,
) -> Iterator[ParsedRecords]:
    """The stretches of parts, one part after the other.

    Args:
        parts: parts, each with the characters of documents after which no more is read (None: all).
        readings: how the records of each source become documents.
        bounds: moves the ends of nominal parts to where records begin; None where they do.
        refused: is told of each part that cannot be read (on); the others are read nevertheless.
    """
    ends: dict[str, tuple[int, int | None]] = {}
    for part, most in parts:
        end, before = ends.get(part.source.name, (0, 0))
        if part.start != end:
            before = None
        seen, size, cut = 0, 0, False
        try:
            reading = readings.of(part.source)
            with PartReader(part, reading.rules, bounds) as reader:
                for found in reader:
                    reading.parse_records(found)
                    seen += found.seen
                    size += (
                        0
                        if most is None
                        else max(sum(map(estimate_characters, found.values)), _MIN_BATCH_CHARACTERS)
                    )
                    yield ParsedRecords(part, reading, found, before, reader.consumed)
                    cut = most is not None and size >= most
                    if cut:
                        break
                if not cut:
                    reader.finish()
                    size = part.stop - part.start
                    yield ParsedRecords(part, reading, Records(), before, size, ended=True)
        except InputError as error:
            refused(part, error)
        ends[part.source.name] = part.stop, None if before is None or cut else before + seen
