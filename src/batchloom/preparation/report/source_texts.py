"""Texts of records in the inputs of a store, which may be missing or changed."""

from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError
from batchloom.core.files import describe_os_error
from batchloom.preparation.report.report import ReportedSource
from batchloom.sources import PartReader, ReadLimits, ReadRules, SourcePart
from batchloom.sources.files import Source
from batchloom.sources.formats import COLUMNAR_KINDS, is_sequential, is_splittable
from batchloom.store import PartEntry
from batchloom.store.format import SourceEntry

# Without a known position of the record, so many bytes of its part are read at most.
_MAX_READ_BYTES = 4 << 20
# Small reads, as most records are short and only their beginnings are shown.
_LIMITS = ReadLimits(chunk_bytes=16 << 10)
_TEXT_COLUMN = " -> plain text"


def read_source_text(
    reported: ReportedSource, source: SourceEntry, part: PartEntry, record: int, offset: int, split_on: str
) -> str:
    """Return the text of a record as its file has it; the JSON of other rows.

    Args:
        reported: the file, as the report of the store recorded it.
        source: its entry in the manifest.
        part: the part of the file that holds the record.
        record: number of the record in the part.
        offset: byte offset of the record in the file.
        split_on: rule that splits text files into documents.

    Raises:
        InputError: the file is remote, missing or changed, or the record is too far inside it.
    """
    _check_unchanged(reported)
    rules = ReadRules(None, split_on, _LIMITS)
    file = Source(
        reported.name, reported.path, source.kind, reported.compression or None, reported.bytes, reported.mtime_ns
    )
    is_ordered = is_sequential(file, rules)
    if is_splittable(file, rules) and not is_ordered and source.kind not in COLUMNAR_KINDS:
        value = _read_record(SourcePart(file, offset, part.stop), rules, 0)
    elif is_ordered and part.start:
        raise InputError("It is too far inside its file to be read here.")
    else:
        value = _read_record(SourcePart(file, part.start, part.stop), rules, record)
    if isinstance(value, dict):
        text = value.get(source.detected.removesuffix(_TEXT_COLUMN))
        value = text if isinstance(text, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return str(value)


def _check_unchanged(reported: ReportedSource) -> None:
    if is_url(reported.path):
        raise InputError("Its file is remote and is not read here.")
    try:
        status = Path(reported.path).stat()
    except OSError as error:
        # A member of an archive has no file of its own.
        raise InputError(f"Its file cannot be read: {describe_os_error(error)}.") from error
    if (status.st_size, status.st_mtime_ns) != (reported.bytes, reported.mtime_ns):
        raise InputError("Its file was changed after it was prepared.")


def _read_record(part: SourcePart, rules: ReadRules, record: int) -> Any:
    with PartReader(part, rules) as reader:
        for batch in reader:
            if record in batch.records:
                return batch.values[batch.records.index(record)]
            if batch.records and batch.records[-1] > record:
                break
            if reader.consumed > _MAX_READ_BYTES:
                raise InputError("It is too far inside its file to be read here.")
    raise InputError("Its file holds no such record any more.")
