"""Observed types of columns, and the Arrow schema that holds them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

from batchloom.core.errors import BatchloomError
from batchloom.core.wording import format_list

# More columns than this, including nested fields, mean that objects are used as dictionaries.
MAX_COLUMNS = 10_000
# Integers up to this are exact as float64.
_MAX_EXACT_INT = 1 << 53
_MAX_DEPTH = 64
_TYPE_LABELS = {
    bool: "true or false",
    int: "whole numbers",
    float: "fractions",
    str: "text",
    bytes: "bytes",
    dict: "objects",
    list: "lists",
}


@final
class UntabularError(BatchloomError):
    """A column holds values that a table cannot hold."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


@dataclass(slots=True)
class ColumnType:
    """Observed type of a column, of an object field or of list items."""

    kinds: list[type] = field(default_factory=list)  # Types of its values except null, in order of appearance
    least: int = 0  # Smallest integer, at most 0
    most: int = 0  # Largest integer, at least 0
    count: int = 0
    fields: "dict[str, ColumnType]" = field(default_factory=dict)  # Type of each field of the objects
    present: dict[str, int] = field(default_factory=dict)  # Number of objects that have each field
    items: "ColumnType | None" = None  # Type of the items of the lists

    def add(self, values: Sequence[Any], path: tuple[str, ...] = ()) -> None:
        if len(path) > _MAX_DEPTH:
            raise UntabularError(path[:1], f"is nested more than {_MAX_DEPTH} levels deep")
        value_types = dict.fromkeys(map(type, values))
        value_types.pop(type(None), None)
        for kind in value_types:
            kind = list if kind is tuple else kind  # noqa: PLW2901
            if kind not in self.kinds:
                self.kinds.append(kind)
        self._check_kinds(path)
        if int in value_types:
            numbers = [value for value in values if type(value) is int]
            self.least = min(self.least, *numbers)
            self.most = max(self.most, *numbers)
        if int in self.kinds:
            self._check_numbers(path)
        if dict in value_types:
            self._add_objects([value for value in values if type(value) is dict], path)
        if list in self.kinds:
            self.items = self.items or ColumnType()
            nested_lists = [value for value in values if type(value) in (list, tuple)]
            self.items.add(list(chain.from_iterable(nested_lists)), (*path, "[]"))

    def _add_objects(self, rows: list[dict[str, Any]], path: tuple[str, ...]) -> None:
        columns: dict[str, list[Any]] = {}
        for row in rows:
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        self.count += len(rows)
        for name, values in columns.items():
            self.present[name] = self.present.get(name, 0) + len(values)
            self.fields.setdefault(name, ColumnType()).add(values, (*path, name))
        if len(self.fields) > MAX_COLUMNS:
            raise UntabularError(path, f"holds objects of more than {MAX_COLUMNS:,} different fields")

    def _check_kinds(self, path: tuple[str, ...]) -> None:
        unsupported_types = [kind.__name__ for kind in self.kinds if kind not in _TYPE_LABELS]
        if unsupported_types:
            raise UntabularError(path, f"holds values of type {unsupported_types[0]}")
        if len(self.kinds) > 1 and set(self.kinds) != {int, float}:
            type_labels = " and ".join(_TYPE_LABELS[kind] for kind in self.kinds)
            raise UntabularError(path, f"holds {type_labels}")

    def _check_numbers(self, path: tuple[str, ...]) -> None:
        if float in self.kinds:
            if max(-self.least, self.most) > _MAX_EXACT_INT:
                raise UntabularError(path, "holds fractions and whole numbers too large for float64")
        elif self.most >= 1 << (64 if self.least == 0 else 63) or self.least < -(1 << 63):
            raise UntabularError(path, "holds whole numbers of more than 64 bits")

    def find_mismatched_row(self, rows: Sequence[Any], path: tuple[str, ...]) -> int | None:
        """Return the first row whose value at ``path`` has another type, or None."""
        for number, row in enumerate(rows):
            row_type = ColumnType()
            try:
                row_type.add([row])
            except UntabularError:
                return number
            value_type = row_type._lookup(path)
            expected_type = self._lookup(path)
            if value_type and expected_type and value_type.kinds and value_type.kinds[0] is not expected_type.kinds[0]:
                return number
        return None

    def _lookup(self, path: tuple[str, ...]) -> "ColumnType | None":
        shape: ColumnType | None = self
        for name in path:
            if shape is not None:
                shape = shape.items if name == "[]" else shape.fields.get(name)
        return shape

    def walk(self, path: tuple[str, ...] = ()) -> "Iterator[tuple[tuple[str, ...], ColumnType]]":
        """Yield this type and all nested types, each with its path."""
        yield path, self
        for name, inner in self.fields.items():
            yield from inner.walk((*path, name))
        if self.items is not None:
            yield from self.items.walk((*path, "[]"))


def format_column_path(path: Iterable[str]) -> str:
    """Format a path: ``messages[].content``."""
    return ".".join(path).replace(".[]", "[]")


def describe_type_changes(shape: ColumnType) -> list[str]:
    """Describe where nulls and floats in the table differ from the rows."""
    mixed = []
    absent = []
    for path, column_type in shape.walk():
        if len(column_type.kinds) > 1:
            mixed.append(format_column_path(path))
        absent += [
            format_column_path((*path, name))
            for name, count in column_type.present.items()
            if count < column_type.count
        ]
    notes = []
    if mixed:
        notes.append(f"Whole numbers are written as fractions of equal value in {_format_names(mixed)}.")
    if absent:
        notes.append(f"Null is written where rows lack {_format_names(absent)}; .jsonl keeps rows as they are.")
    return notes


def _format_names(names: list[str]) -> str:
    return format_list([repr(name) for name in names], 5)


def build_arrow_schema(shape: ColumnType) -> Any:
    """Return the Arrow schema of rows of this type."""
    import pyarrow as pa

    if not shape.fields:
        raise UntabularError((), "the rows have no columns")
    scalar_types = {bool: pa.bool_(), str: pa.string(), bytes: pa.binary()}

    def choose_type(column_type: ColumnType, path: tuple[str, ...]) -> Any:
        kinds = set(column_type.kinds)
        if not kinds:
            return pa.null()
        if float in kinds:
            return pa.float64()
        if int in kinds:
            return pa.int64() if column_type.most < 1 << 63 else pa.uint64()
        if list in kinds:
            return pa.list_(choose_type(column_type.items or ColumnType(), (*path, "[]")))
        if dict in kinds:
            if not column_type.fields:
                raise UntabularError(path, "holds objects without fields")
            return pa.struct([(name, choose_type(inner, (*path, name))) for name, inner in column_type.fields.items()])
        return scalar_types[column_type.kinds[0]]

    return pa.schema([(name, choose_type(inner, (name,))) for name, inner in shape.fields.items()])
