"""Pretokenized records: ``input_ids``, and columns that mark the trained ones."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.chat.schema.record_columns import Row, get_column_value, missing_column_error
from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import describe_json_type

_IGNORED_LABEL = -100


@final
@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """A document that needs no tokenizer.

    Attributes:
        ids: token ids, int64, shape [tokens].
        trained: mask of the trained tokens, bool, shape [tokens]; None if the record has no such column.
    """

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_] | None


def read_token_row(row: Row, columns: dict[str, tuple[str, ...]]) -> TokenRow:
    """Read unpadded ids and the training mask of ``labels`` and ``loss_mask``.

    ``labels`` are aligned with ``input_ids`` as in Hugging Face: each is -100 or the id itself.
    A token is trained if both columns say so. Zeros of ``attention_mask`` mark padding, which is
    removed and may only precede or follow the tokens.

    Raises:
        UnusableRecordError: values that are not integers, columns of different lengths, labels that differ
            from ``input_ids``, masks with values other than 0 and 1, or padding between tokens.
    """
    name = columns["input_ids"][0]
    ids = _read_integers(row, "input_ids", name)
    if len(ids) and (worst := int(ids.argmin())) >= 0 and ids[worst] < 0:
        raise UnusableRecordError(f"{name}[{worst}] is {ids[worst]}: a token id is 0 or more")
    keep = slice(None)
    if "attention_mask" in columns:
        keep = _find_unpadded_range(_read_mask(row, "attention_mask", columns, ids), columns["attention_mask"][0])
    trained: NDArray[np.bool_] | None = None
    if "labels" in columns:
        trained = _read_label_mask(row, columns, ids, keep)
    if "loss_mask" in columns:
        mask = _read_mask(row, "loss_mask", columns, ids)
        trained = mask if trained is None else trained & mask
    return TokenRow(ids[keep], None if trained is None else trained[keep])


def _read_label_mask(
    row: Row, columns: dict[str, tuple[str, ...]], ids: NDArray[np.int64], keep: slice
) -> NDArray[np.bool_]:
    name = columns["labels"][0]
    labels = _check_same_length(_read_integers(row, "labels", name), name, ids, columns)
    trained: NDArray[np.bool_] = labels != _IGNORED_LABEL
    wrong = np.flatnonzero((trained & (labels != ids))[keep])
    if len(wrong):
        index = int(wrong[0]) + (keep.start or 0)
        raise UnusableRecordError(
            f"{name}[{index}] is {labels[index]} where {columns['input_ids'][0]}[{index}] is {ids[index]}; a label "
            "is -100 or the id at the same position (models shift labels themselves)"
        )
    return trained


def _read_mask(row: Row, role: str, columns: dict[str, tuple[str, ...]], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    name = columns[role][0]
    values = _check_same_length(_read_integers(row, role, name), name, ids, columns)
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        raise UnusableRecordError(f"{name}[{wrong[0]}] is {values[wrong[0]]}; a mask holds 0 and 1")
    return values.astype(np.bool_)


def _check_same_length(
    values: NDArray[np.int64],
    name: str,
    ids: NDArray[np.int64],
    columns: dict[str, tuple[str, ...]],
) -> NDArray[np.int64]:
    if len(values) != len(ids):
        ids_column = columns["input_ids"][0]
        raise UnusableRecordError(
            f"column {name!r} holds {len(values)} numbers and {ids_column!r} {len(ids)}; both must have the same length"
        )
    return values


def _find_unpadded_range(mask: NDArray[np.bool_], name: str) -> slice:
    present = np.flatnonzero(mask)
    if not len(present):
        return slice(0, 0)
    start, stop = int(present[0]), int(present[-1]) + 1
    if stop - start != len(present):
        hole = start + int(np.flatnonzero(~mask[start:stop])[0])
        raise UnusableRecordError(f"{name}[{hole}] is 0 between tokens; padding must be before or after all tokens")
    return slice(start, stop)


def _read_integers(row: Row, role: str, name: str) -> NDArray[np.int64]:
    value: Any = get_column_value(row, name)
    if value is None:
        raise missing_column_error(row, role, name)
    if not isinstance(value, list | tuple | np.ndarray):
        raise UnusableRecordError(f"column {name!r} holds {describe_json_type(value)}, not a list of numbers")
    try:
        array = np.asarray(value)
    except ValueError:  # Nested lists of different lengths.
        array = np.zeros((0, 0))
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in ("iub" if role.endswith("mask") else "iu"):
        raise UnusableRecordError(_describe_not_integers(value, name))
    return array.astype(np.int64)


def _describe_not_integers(value: Any, name: str) -> str:
    for number, item in enumerate(value):
        if not isinstance(item, int | np.integer) or isinstance(item, bool):
            description = repr(item) if isinstance(item, float | str) else describe_json_type(item)
            return f"{name}[{number}] is {description}, not a whole number"
    return f"column {name!r} holds numbers beyond 64 bits"
