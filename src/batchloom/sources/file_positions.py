"""Where people find a record: the line or the row that an editor or a table shows."""

from batchloom.core.document import BadRecord
from batchloom.core.errors import RecordError, make_record_error
from batchloom.sources.files import ReadRules, Source, choose_read_method

_MAX_SNIPPET_LENGTH = 60


def locate_record(
    source: Source, rules: ReadRules, records_before: int | None, bad_record: BadRecord
) -> tuple[int | None, int | None]:
    """1-based line and row of a bad record, each None where it means nothing.

    Args:
        source: holds the record.
        rules: how it is read.
        records_before: records of the source before the part; None where nobody has counted them.
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
    """What is said of a bad record: its place, the reason with the remedy, and its beginning.

    Where nobody has counted the records before it, its place is told in bytes.
    """
    line, row = locate_record(source, rules, records_before, bad_record)
    snippet = (
        bad_record.snippet
        if len(bad_record.snippet) <= _MAX_SNIPPET_LENGTH
        else bad_record.snippet[: _MAX_SNIPPET_LENGTH - 3] + "..."
    )
    # Escapes that stand for bytes are not escaped again.
    quoted_snippet = f"'{snippet}'" if snippet.isprintable() and "'" not in snippet else repr(snippet)
    verb = "reads" if snippet.startswith("...") else "begins"
    reason = f"{bad_record.reason} (it {verb} {quoted_snippet})" if snippet else bad_record.reason
    if records_before is None and line is None and row is None:
        reason = f"{reason} (at byte {bad_record.offset:,})"
    return make_record_error(source.name, line, bad_record.column, reason, row)


def format_record_name(source: Source, rules: ReadRules, records_before: int | None, record: BadRecord) -> str:
    """What a record is called: its file, and its line, row or byte; else as :func:`locate_record`."""
    line, row = locate_record(source, rules, records_before, record)
    if line is not None:
        return f"{source.name}, line {line:,}"
    position = f"row {row:,}" if row is not None else f"byte {record.offset:,}"
    return f"{source.name}, {position}"
