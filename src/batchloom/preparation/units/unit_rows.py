"""Rows of a unit's documents, and the names of the files of their tokens."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from batchloom.core.loss_weights import LossFlags

_T = TypeVar("_T", bound=np.generic)

# Number of documents that 32-bit numbers distinguish.
MAX_DOCUMENTS = 1 << 32

# One document. `part` counts inside the unit. `side` is 0 for no preference. `subset` is 0 if the hash chooses it, else
# 1 plus its code. A `seen` text repeats an earlier one of its unit: it has the length of the first copy, and no tokens
# in the files.
ROW = np.dtype(
    [
        ("hash", "<u8", (2,)),
        ("record", "<u8"),
        ("offset", "<u8"),
        ("part", "<u4"),
        ("length", "<u4"),
        ("side", "u1"),
        ("seen", "u1"),
        ("subset", "u1"),
    ]
)


def stored_lengths(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the tokens of each document in the unit's token files, int64 [D]."""
    return np.where(rows["seen"], 0, rows["length"].astype(np.int64))


def mark_first_of_records(rows: NDArray[np.void], before: tuple[int, int]) -> NDArray[np.bool_]:
    """Mark the first document of each record, after one of (part, record) ``before``."""
    parts = np.concatenate([[before[0]], rows["part"].astype(np.int64)])
    records = np.concatenate([[before[1]], rows["record"].astype(np.int64)])
    fresh: NDArray[np.bool_] = (parts[1:] != parts[:-1]) | (records[1:] != records[:-1])
    return fresh


def concatenate_ranges(tokens: NDArray[_T], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[_T]:
    """Return the ranges [starts, stops) in sequence; a view if they are adjacent."""
    apart = starts[1:] != stops[:-1]
    begins = starts[np.concatenate([[True], apart])]
    ends = stops[np.concatenate([apart, [True]])]
    chunks = [tokens[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def select_flag_ranges(flags: LossFlags, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> LossFlags:
    """Return the flags of the ranges [starts, stops) in sequence."""
    if flags.is_plain:
        return LossFlags.all_trained(int((stops - starts).sum()))
    return LossFlags.from_codes(concatenate_ranges(flags.codes, starts, stops))


def tokens_file_name(subset: str) -> str:
    return f"tokens.{subset}.bin"


def trained_file_name(subset: str) -> str:
    """Return the file name of the flags of a subset.

    The file has one byte per token, the code of its loss weight. It exists only if some token is not
    trained or has another weight than 1.
    """
    return f"trained.{subset}.bool"
