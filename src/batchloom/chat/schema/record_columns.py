"""The columns of a record: by name or by path, and what is said where one is not there."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import nearest
from batchloom.core.wording import kind_of

Row = Mapping[str, Any]
Lookup = Callable[[Row], Any]

_PATH = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[-?\d+\])+")
_STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_COLUMNS_SHOWN = 12
_LABELS = {"true": True, "1": True, "false": False, "0": False}


@functools.lru_cache(maxsize=1024)
def _steps(column: str) -> tuple[str | int, ...]:
    """The steps of a path such as ``answers.text[0]``; none where the name is no path."""
    if not _PATH.fullmatch(column):
        return ()
    return tuple(int(index) if index else name for name, index in _STEP.findall(column))


def value_at(row: Row, column: str) -> Any:
    """The value of a column, None where it is not there; a column of that very name wins over a path."""
    if column in row or not (steps := _steps(column)):
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


def lookup(columns: tuple[str, ...]) -> Lookup:
    """A function from a row to the value of its first column that holds something, else None."""
    if not columns:
        return lambda _row: None
    if any(_steps(column) for column in columns):
        return lambda row: _first(value_at(row, column) for column in columns)
    if len(columns) == 1:
        (column,) = columns
        return lambda row: row.get(column)
    names = frozenset(columns)

    def first(row: Row) -> Any:
        return None if names.isdisjoint(row) else _first(map(row.get, columns))

    return first


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if says_something(value)), None)


def says_something(value: Any) -> bool:
    """Whether a column one may leave out holds anything: null, ``""`` and ``[]`` are nothing."""
    return value is not None and not (isinstance(value, str | list) and not value)


def label_of(value: Any) -> bool | None:
    """What a column of labels says: true, 1, or these as text, is good; None where it is no label."""
    if isinstance(value, str):
        return _LABELS.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None


def heads(columns: Iterable[str]) -> frozenset[str]:
    """What a row has at its top where one of these columns is there; disjoint from it, none is."""
    return frozenset(name for column in columns for name in (column, *map(str, _steps(column)[:1])))


def listed(columns: Iterable[str]) -> str:
    """``'a', 'b' and 3 more`` for the names of columns."""
    names = [repr(name) for name in columns]
    more = f" and {len(names) - _COLUMNS_SHOWN} more" if len(names) > _COLUMNS_SHOWN else ""
    return ", ".join(names[:_COLUMNS_SHOWN]) + more


def absent(row: Row, role: str, column: str) -> UnusableRecordError:
    """The fault of a record whose column is missing, or null."""
    if column in row:
        return UnusableRecordError(
            f"column {column!r} holds null, not the {role}; fill it in or remove the record"
        )
    if not row:
        return UnusableRecordError(f"no column {column!r}: the record is empty")
    if (head := (_steps(column) or (column,))[0]) in row:
        return UnusableRecordError(
            f"nothing at {column!r}: column {head!r} holds {kind_of(row[str(head)])} without it; "
            f"fill it in or name another column with --map {role}=..."
        )
    hint = nearest(column, row) or f"; name the one that holds the {role} with --map {role}=..."
    return UnusableRecordError(f"no column {column!r}: the record has {listed(row)}{hint}")
