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
        record_parser: how.
        batch: documents; rows that make none are among its bad records.
        before: records of the source before the part; None where nobody has counted them.
        consumed: bytes of the part, as listed, that were read so far.
        ended: whether the part was read to its end; this stretch holds nothing more of it.
    """

    part: SourcePart
    record_parser: RecordParser
    batch: Records
    before: int | None
    consumed: int
    ended: bool = False


def iter_parsed_records(
    parts: Iterable[tuple[SourcePart, int | None]],
    record_parsers: RecordParsers,
    bounds: RecordBounds | None,
    on_input_error: OnInputError,
) -> Iterator[ParsedRecords]:
    """The stretches of parts, one part after the other.

    Args:
        parts: parts, each with the characters of documents after which no more is read (None: all).
        record_parsers: how the records of each source become documents.
        bounds: moves the ends of nominal parts to where records begin; None where they do.
        on_input_error: is told of each part that cannot be read (on); the others are read nevertheless.
    """
    ends: dict[str, tuple[int, int | None]] = {}
    for part, max_characters in parts:
        end, before = ends.get(part.source.name, (0, 0))
        if part.start != end:
            before = None
        record_count, character_count, truncated = 0, 0, False
        try:
            record_parser = record_parsers.get_parser(part.source)
            with PartReader(part, record_parser.rules, bounds) as reader:
                for batch in reader:
                    record_parser.parse_records(batch)
                    record_count += batch.records_read
                    character_count += (
                        0
                        if max_characters is None
                        else max(sum(map(estimate_characters, batch.values)), _MIN_BATCH_CHARACTERS)
                    )
                    yield ParsedRecords(part, record_parser, batch, before, reader.consumed)
                    truncated = max_characters is not None and character_count >= max_characters
                    if truncated:
                        break
                if not truncated:
                    reader.finish()
                    character_count = part.stop - part.start
                    yield ParsedRecords(part, record_parser, Records(), before, character_count, ended=True)
        except InputError as error:
            on_input_error(part, error)
        ends[part.source.name] = (
            part.stop,
            None if before is None or truncated else before + record_count,
        )
