"""Locations of records: the line or row that an editor or a table shows."""

from batchloom.core.document import BadRecord
from batchloom.core.errors import RecordError, make_record_error
from batchloom.sources.files.source_rules import ReadRules, Source, choose_read_method

_MAX_SNIPPET_LENGTH = 60


def locate_record(
    source: Source, rules: ReadRules, records_before: int | None, bad_record: BadRecord
) -> tuple[int | None, int | None]:
    """Return the 1-based line and row of a bad record, None where not applicable.

    Args:
        source: source of the record.
        rules: read rules of the source.
        records_before: number of records in the source before the part; None if not counted.
        bad_record: the record.
    """
    read_method = choose_read_method(source, rules)
    number = None if records_before is None else records_before + bad_record.record + 1
    if read_method in ("jsonl", "line"):
        return number, None
    if read_method in ("json", "csv", "table", "samples"):
        return bad_record.line, number
    return bad_record.line, None


def make_bad_record_error(
    source: Source, rules: ReadRules, records_before: int | None, bad_record: BadRecord
) -> RecordError:
    """Return the error for a bad record: location, reason with remedy, and snippet.

    If the records before it are not counted, the location is a byte offset.
    """
    line, row = locate_record(source, rules, records_before, bad_record)
    snippet = (
        bad_record.snippet
        if len(bad_record.snippet) <= _MAX_SNIPPET_LENGTH
        else bad_record.snippet[: _MAX_SNIPPET_LENGTH - 3] + "..."
    )
    # Escapes of raw bytes must not be escaped again.
    quoted_snippet = f"'{snippet}'" if snippet.isprintable() and "'" not in snippet else repr(snippet)
    verb = "reads" if snippet.startswith("...") else "begins"
    reason = f"{bad_record.reason} (it {verb} {quoted_snippet})" if snippet else bad_record.reason
    if records_before is None and line is None and row is None:
        reason = f"{reason} (at byte {bad_record.offset:,})"
    return make_record_error(source.name, line, bad_record.column, reason, row)


def format_record_name(source: Source, rules: ReadRules, records_before: int | None, record: BadRecord) -> str:
    """Return the name of a record: its file with its line, row or byte offset."""
    line, row = locate_record(source, rules, records_before, record)
    if line is not None:
        return f"{source.name}, line {line:,}"
    position = f"row {row:,}" if row is not None else f"byte {record.offset:,}"
    return f"{source.name}, {position}"
