"""Choice and names of the output columns of a row."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchloom.chat.schema import format_columns, get_column_value
from batchloom.core.errors import SchemaError, UnusableRecordError
from batchloom.core.settings import quote_value, suggest

Row = dict[str, Any]


def coerce_row(value: Any) -> Row:
    """Return a reader's value as a row; a text becomes a row of one column."""
    return {"text": value} if isinstance(value, str) else value


RowMapper = Callable[[Row], Row]


def make_row_mapper(mapping: Mapping[str, str], columns: Sequence[str] | None) -> RowMapper | None:
    """Return the function from input rows to output rows; None if rows stay unchanged."""
    if not mapping and columns is None:
        return None
    roles = {column: role for role, column in mapping.items()}

    def choose(row: Row) -> Row:
        renamed_row = _rename_columns(row, roles) if roles else row
        if columns is None:
            return renamed_row
        return {name: renamed_row[name] for name in columns if name in renamed_row}

    return choose


def _rename_columns(row: Row, roles: Mapping[str, str]) -> Row:
    names = [roles.get(name, name) for name in row]
    renamed_row = dict(zip(names, row.values(), strict=True))
    if len(renamed_row) < len(names):
        raise _column_conflict_error(next(name for name in names if names.count(name) > 1))
    for column, role in roles.items():
        value = None if column in row else get_column_value(row, column)
        if value is not None:
            if role in renamed_row:
                raise _column_conflict_error(role)
            renamed_row[role] = value
    return renamed_row


def _column_conflict_error(role: str) -> UnusableRecordError:
    return UnusableRecordError(
        f"a column {role!r} already exists next to the one mapped to it; map that one to another role, or rename "
        "it first"
    )


def check_output_columns(mapping: Mapping[str, str], columns: object) -> list[str]:
    """Return the problems of the requested columns, before any row is read."""
    problems = [f"map.{role}: names no column; leave {role}= out" for role in mapping if not mapping[role]]
    problems += [
        f"map: column {column!r} is named for several roles; name it once"
        for column, count in sorted(Counter(mapping.values()).items())
        if column and count > 1
    ]
    if columns is None:
        return problems
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not columns
        or not all(isinstance(name, str) for name in columns)
    ):
        return [*problems, f"columns: {quote_value(columns)} is not a list of column names"]
    renamed = {column: role for role, column in mapping.items() if column not in mapping}
    problems += [
        f"columns: {name!r} is called {renamed[name]!r} after --map; use that name"
        for name in columns
        if name in renamed
    ]
    return problems + [f"columns: {name!r} is named twice" for name, n in sorted(Counter(columns).items()) if n > 1]


def find_missing_columns(
    mapping: Mapping[str, str], columns: Sequence[str] | None, rows: Iterable[Row]
) -> list[tuple[str, str]]:
    """Return the requested columns that no row has, as (option, column)."""
    missing_columns = {("--map", column) for column in mapping.values()}
    missing_columns |= {("--columns", name) for name in columns or () if name not in mapping}
    for row in rows:
        missing_columns -= {
            missing_column
            for missing_column in missing_columns
            if missing_column[1] in row or get_column_value(row, missing_column[1]) is not None
        }
        if not missing_columns:
            break
    return sorted(missing_columns)


def unknown_column_error(option: str, column: str, column_names: Sequence[str]) -> SchemaError:
    hint = suggest(column, column_names) or f"; name one of them with {option}"
    return SchemaError(
        f"no column {column!r} ({option}): the first records have {format_columns(column_names)}{hint}", column_names
    )
