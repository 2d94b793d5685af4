"""Texts of records in the inputs of a store, which may be missing or changed."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError
from batchloom.core.files import describe_os_error
from batchloom.preparation.report.report import ReportedSource
from batchloom.sources import PartReader, ReadLimits, ReadRules, SourcePart
from batchloom.sources.files import Source
from batchloom.sources.formats import COLUMNAR_KINDS, is_splittable
from batchloom.store import PartEntry
from batchloom.store.format import SourceEntry

# So many bytes are read at most to find records whose position in the file is unknown.
_MAX_READ_BYTES = 4 << 20
# Small reads, as most records are short and only their beginnings are shown.
_LIMITS = ReadLimits(chunk_bytes=16 << 10)
_TEXT_COLUMN = " -> plain text"


def read_source_texts(
    reported: ReportedSource, source: SourceEntry, part: PartEntry, offsets: Mapping[int, int], split_on: str
) -> dict[int, str]:
    """Return texts of records as their file has them; the JSON of other rows.

    Records that are too far inside the file to be read in a moment are missing.

    Args:
        reported: the file, as the report of the store recorded it.
        source: its entry in the manifest.
        part: the part of the file that holds the records.
        offsets: byte offset in the file of each record, by its number in the part.
        split_on: rule that splits text files into documents.

    Raises:
        InputError: the file is remote, missing, changed or damaged.
    """
    _check_unchanged(reported)
    rules = ReadRules(None, split_on, _LIMITS)
    compression = reported.compression or None
    file = Source(
        reported.name,
        reported.path,
        source.kind,
        compression,
        reported.bytes,
        reported.mtime_ns,
        encoding=reported.encoding,
    )
    texts: dict[int, str] = {}
    if is_splittable(file, rules) and source.kind not in COLUMNAR_KINDS:
        for record, offset in offsets.items():
            # A damaged report may hold an offset behind the end of the part.
            rest = SourcePart(file, min(offset, part.stop), part.stop)
            for _, value in islice(_iter_records(rest, rules), 1):
                texts[record] = _format_record(value, source)
    else:
        for record, value in _iter_records(SourcePart(file, part.start, part.stop), rules):
            if record in offsets:
                texts[record] = _format_record(value, source)
            if len(texts) == len(offsets):
                break
    return texts


def _format_record(value: Any, source: SourceEntry) -> str:
    if isinstance(value, dict):
        text = value.get(source.detected.removesuffix(_TEXT_COLUMN))
        return text if isinstance(text, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return str(value)


def _check_unchanged(reported: ReportedSource) -> None:
    if is_url(reported.path):
        raise InputError("Its file is remote and is not read here.")
    try:
        status = Path(reported.path).stat()
    except NotADirectoryError as error:
        # The path of a member begins with that of its archive.
        raise InputError("It is in an archive, which is not read here.") from error
    except OSError as error:
        raise InputError(f"Its file cannot be read: {describe_os_error(error)}.") from error
    if (status.st_size, status.st_mtime_ns) != (reported.bytes, reported.mtime_ns):
        raise InputError("Its file was changed after it was prepared.")


def _iter_records(part: SourcePart, rules: ReadRules) -> Iterator[tuple[int, Any]]:
    """Yield the first records of a part with their numbers."""
    with PartReader(part, rules) as reader:
        for batch in reader:
            yield from zip(batch.records, batch.values, strict=True)
            if reader.consumed > _MAX_READ_BYTES:
                break
