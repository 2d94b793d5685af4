"""The columns of a conversion: renamed to their roles, chosen, and put in order; values as they are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchloom.chat.schema import format_columns, get_column_value
from batchloom.core.errors import SchemaError, UnusableRecordError
from batchloom.core.settings import quote_value, suggest

Row = dict[str, Any]
RowMapper = Callable[[Row], Row]


def coerce_row(value: Any) -> Row:
    """What a reader gives as a row: a text is a row of one column."""
    return {"text": value} if isinstance(value, str) else value


def make_row_mapper(mapping: Mapping[str, str], columns: Sequence[str] | None) -> RowMapper | None:
    """What makes a row of the output of a row of the input; None where rows stay as they are.

    It raises UnusableRecordError where a role would hide another column.

    Args:
        mapping: columns by role; a column takes its role's name where it stands, and what a path
            leads to (``answers.text[0]``) is added behind the others.
        columns: names in the output, in order; None for all. A row that lacks one goes without it.
    """
    if not mapping and columns is None:
        return None
    roles = {column: role for role, column in mapping.items()}

    def choose(row: Row) -> Row:
        made = _rename_columns(row, roles) if roles else row
        if columns is None:
            return made
        return {name: made[name] for name in columns if name in made}

    return choose


def _rename_columns(row: Row, roles: Mapping[str, str]) -> Row:
    names = [roles.get(name, name) for name in row]
    made = dict(zip(names, row.values(), strict=True))
    if len(made) < len(names):
        raise _column_conflict_error(next(name for name in names if names.count(name) > 1))
    for column, role in roles.items():
        value = None if column in row else get_column_value(row, column)
        if value is not None:
            if role in made:
                raise _column_conflict_error(role)
            made[role] = value
    return made


def _column_conflict_error(role: str) -> UnusableRecordError:
    return UnusableRecordError(
        f"there is a column {role!r} already beside the one mapped to it; map that one to another role, "
        "or rename it first"
    )


def check_output_columns(mapping: Mapping[str, str], columns: object) -> list[str]:
    """What is wrong with the columns asked for, one sentence each, before any row is seen."""
    problems = [
        f"map.{role}: names no column; leave {role}= out" for role in mapping if not mapping[role]
    ]
    named = [column for column in mapping.values() if column]
    problems += [
        f"map: column {column!r} is named for several roles; name it once"
        for column in sorted({one for one in named if named.count(one) > 1})
    ]
    if columns is None:
        return problems
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not columns
        or not all(isinstance(name, str) for name in columns)
    ):
        return [*problems, f"columns: {quote_value(columns)} is no list of the names of columns"]
    renamed = {column: role for role, column in mapping.items() if column not in mapping}
    problems += [
        f"columns: {name!r} is called {renamed[name]!r} after --map; write that"
        for name in columns
        if name in renamed
    ]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    return problems + [f"columns: {name!r} is named twice" for name in twice]


def find_missing_columns(
    mapping: Mapping[str, str], columns: Sequence[str] | None, rows: Iterable[Row]
) -> list[tuple[str, str]]:
    """Columns asked for that none of these rows has, each with the option that asks for it."""
    wanted = {("--map", column) for column in mapping.values()}
    wanted |= {("--columns", name) for name in columns or () if name not in mapping}
    for row in rows:
        wanted -= {
            one for one in wanted if one[1] in row or get_column_value(row, one[1]) is not None
        }
        if not wanted:
            break
    return sorted(wanted)


def unknown_column_error(option: str, column: str, known: Sequence[str]) -> SchemaError:
    """The error of a column that the first records lack."""
    hint = suggest(column, known) or f"; name one of them with {option}"
    return SchemaError(
        f"no column {column!r} ({option}): the first records have {format_columns(known)}{hint}",
        known,
    )
