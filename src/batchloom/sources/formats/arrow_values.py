"""Conversion of Arrow columns to types whose Python values resemble JSON."""

import pyarrow as pa


def is_text_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds text."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds bytes."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def to_plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast decimals, dates, times and timestamps to text, and durations to numbers.

    Other types stay unchanged: numbers, booleans, text, null, lists, structs (dicts), maps
    (lists of pairs) and binary (bytes).
    """
    columns = []
    for column in batch.columns:
        values = column.storage if isinstance(column, pa.ExtensionArray) else column
        target_type = _get_plain_type(values.type)
        columns.append(values if target_type is values.type else values.cast(target_type))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _get_plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to cast to; the same object if nothing changes."""
    types = pa.types
    if types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind):
        return pa.string()
    if types.is_timestamp(kind):
        return pa.string()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_dictionary(kind):
        return _get_plain_type(kind.value_type)
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        plain_fields = [field.with_type(_get_plain_type(field.type)) for field in fields]
        return kind if _is_same_type(fields, plain_fields) else pa.struct(plain_fields)
    makers = (
        (types.is_list, pa.list_),
        (types.is_large_list, pa.large_list),
    )
    for is_kind, make in makers:
        if is_kind(kind):
            value = kind.value_field.with_type(_get_plain_type(kind.value_type))
            return kind if value.type is kind.value_type or value.type == kind.value_type else make(value)
    return kind


def _is_same_type(before: list[pa.Field], after: list[pa.Field]) -> bool:
    return all(a.type == b.type for a, b in zip(before, after, strict=True))
