"""Where people find a record: the line or the row that an editor or a table shows."""

from batchloom.core.document import BadRecord
from batchloom.core.errors import RecordError, make_record_error
from batchloom.sources.files import ReadRules, Source, choose_read_method

_MAX_SNIPPET_LENGTH = 60


def locate_record(
    source: Source, rules: ReadRules, before: int | None, bad: BadRecord
) -> tuple[int | None, int | None]:
    """1-based line and row of a bad record, each None where it means nothing.

    Args:
        source: holds the record.
        rules: how it is read.
        before: records of the source before the part; None where nobody has counted them.
        bad: the record.
    """
    way = choose_read_method(source, rules)
    number = None if before is None else before + bad.record + 1
    if way in ("jsonl", "line"):
        return number, None
    if way in ("json", "csv", "table", "samples"):
        return bad.line, number
    return bad.line, None


def make_bad_record_error(
    source: Source, rules: ReadRules, before: int | None, bad: BadRecord
) -> RecordError:
    """What is said of a bad record: its place, the reason with the remedy, and its beginning.

    Where nobody has counted the records before it, its place is told in bytes.
    """
    line, row = locate_record(source, rules, before, bad)
    shown = (
        bad.snippet
        if len(bad.snippet) <= _MAX_SNIPPET_LENGTH
        else bad.snippet[: _MAX_SNIPPET_LENGTH - 3] + "..."
    )
    # Escapes that stand for bytes are not escaped again.
    quoted = f"'{shown}'" if shown.isprintable() and "'" not in shown else repr(shown)
    verb = "reads" if shown.startswith("...") else "begins"
    reason = f"{bad.reason} (it {verb} {quoted})" if shown else bad.reason
    if before is None and line is None and row is None:
        reason = f"{reason} (at byte {bad.offset:,})"
    return make_record_error(source.name, line, bad.column, reason, row)


def format_record_name(
    source: Source, rules: ReadRules, before: int | None, record: BadRecord
) -> str:
    """What a record is called: its file, and its line, row or byte; else as :func:`locate_record`."""
    line, row = locate_record(source, rules, before, record)
    if line is not None:
        return f"{source.name}, line {line:,}"
    shown = f"row {row:,}" if row is not None else f"byte {record.offset:,}"
    return f"{source.name}, {shown}"
