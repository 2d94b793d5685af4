"""Iteration over parts of sources as documents, for commands that only read."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batchloom.core.document import Records
from batchloom.core.errors import InputError
from batchloom.preparation.documents.record_parsers import RecordParser, RecordParsers
from batchloom.preparation.documents.token_encoder import estimate_characters
from batchloom.sources import PartReader, RecordBounds, SourcePart

# Minimum number of characters that a batch counts as, so that batches without documents also end a part.
_MIN_BATCH_CHARACTERS = 64 << 10

OnInputError = Callable[[SourcePart, InputError], None]


@dataclass(frozen=True, slots=True)
class ParsedRecords:
    """Batch of parsed records.

    Attributes:
        part: part that is read.
        record_parser: parser of the part.
        batch: documents; rows that give none are among its bad records.
        before: records of the source before the part; None if they were not counted.
        consumed: bytes of the part (as listed) read so far.
        ended: the part was read to its end; this batch is empty.
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
    """Yield the parsed batches of parts, one part after the other.

    Args:
        parts: parts, each with the number of document characters after which reading stops (None: read all).
        record_parsers: record parser of each source.
        bounds: moves nominal part ends to record boundaries; None if the parts end there already.
        on_input_error: called for each part that cannot be read; the other parts are still read.
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
        ends[part.source.name] = (part.stop, None if before is None or truncated else before + record_count)
