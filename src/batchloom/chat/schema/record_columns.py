"""Columns of a record, by name or by path, and errors for missing columns."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import suggest
from batchloom.core.wording import describe_json_type

Row = Mapping[str, Any]
ColumnLookup = Callable[[Row], Any]

_PATH_PATTERN = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[-?\d+\])+")
_STEP_PATTERN = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_MAX_LISTED_COLUMNS = 12
_LABEL_VALUES = {"true": True, "1": True, "false": False, "0": False}


@functools.lru_cache(maxsize=1024)
def _parse_path(column: str) -> tuple[str | int, ...]:
    """Return the steps of a path such as ``answers.text[0]``; () for a plain name."""
    if not _PATH_PATTERN.fullmatch(column):
        return ()
    return tuple(int(index) if index else name for name, index in _STEP_PATTERN.findall(column))


def get_column_value(row: Row, column: str) -> Any:
    """Return the value of a column or path, or None; an exact name beats a path."""
    if column in row or not (steps := _parse_path(column)):
        return row.get(column)
    value: Any = row
    for step in steps:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, Mapping) else None
        elif isinstance(value, list | tuple) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def make_column_lookup(columns: tuple[str, ...]) -> ColumnLookup:
    """Return a function that maps a row to its first non-empty value of these columns."""
    if not columns:
        return lambda _row: None
    if any(_parse_path(column) for column in columns):
        return lambda row: _first_non_empty(get_column_value(row, column) for column in columns)
    if len(columns) == 1:
        (column,) = columns
        return lambda row: row.get(column)
    names = frozenset(columns)

    def first(row: Row) -> Any:
        return None if names.isdisjoint(row) else _first_non_empty(map(row.get, columns))

    return first


def _first_non_empty(values: Iterable[Any]) -> Any:
    return next((value for value in values if is_non_empty(value)), None)


def is_non_empty(value: Any) -> bool:
    """Return whether a column has a value: null, ``""`` and ``[]`` are empty."""
    return value is not None and not (isinstance(value, str | list) and not value)


def parse_label(value: Any) -> bool | None:
    """Parse a label: true or 1, also as text, is good; None if it is no label."""
    if isinstance(value, str):
        return _LABEL_VALUES.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None


def top_level_columns(columns: Iterable[str]) -> frozenset[str]:
    """Return the top-level names of columns; a row without any of them has none."""
    return frozenset(name for column in columns for name in (column, *map(str, _parse_path(column)[:1])))


def format_columns(columns: Iterable[str]) -> str:
    """Format column names as ``'a', 'b' and 3 more``."""
    names = [repr(name) for name in columns]
    more = f" and {len(names) - _MAX_LISTED_COLUMNS} more" if len(names) > _MAX_LISTED_COLUMNS else ""
    return ", ".join(names[:_MAX_LISTED_COLUMNS]) + more


def missing_column_error(row: Row, role: str, column: str) -> UnusableRecordError:
    """Return the error for a record whose column is missing or null."""
    if column in row:
        return UnusableRecordError(f"column {column!r} holds null, not the {role}; fill it in or remove the record")
    if not row:
        return UnusableRecordError(f"no column {column!r}: the record is empty")
    if (head := (_parse_path(column) or (column,))[0]) in row:
        return UnusableRecordError(
            f"no value at {column!r}: column {head!r} holds {describe_json_type(row[str(head)])} without it; fill it "
            f"in or name another column with --map {role}=..."
        )
    hint = suggest(column, row) or f"; name the one that holds the {role} with --map {role}=..."
    return UnusableRecordError(f"no column {column!r}: the record has {format_columns(row)}{hint}")
