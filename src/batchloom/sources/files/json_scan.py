"""Positions of brackets outside of strings in JSON text, without decoding it.

A quote is unescaped if an even number of backslashes precedes it. A bracket is structural if an
even number of quotes precedes it. All of it is vectorized, after Langdale and Lemire, "Parsing
Gigabytes of JSON per Second", 2019, section 3.1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_QUOTE, _SLASH = b'"\\'
# Longer runs of backslashes take another method.
_MAX_WALKED = 8
# Table for bytes.translate: 1 for a quote or a bracket, else 0.
_IS_MARK = bytes(byte in b'"{}[]' for byte in range(256))
_DEPTH_STEPS = np.zeros(256, np.int8)
_DEPTH_STEPS[list(b"{[")] = 1
_DEPTH_STEPS[list(b"}]")] = -1


@dataclass(frozen=True, slots=True)
class BracketScan:
    """Brackets of a block of bytes, in columns of equal length, and the final state.

    Attributes:
        offsets: offset of each bracket outside of strings in the block, int64.
        steps: 1 for an opening bracket, -1 for a closing one, int8.
        depths: number of open brackets after each, int64.
        in_string: whether the block ends inside a string.
        escaped: whether the byte after the block is escaped.
    """

    offsets: NDArray[np.int64]
    steps: NDArray[np.int8]
    depths: NDArray[np.int64]
    in_string: bool = False
    escaped: bool = False

    @property
    def depth(self) -> int:
        """Number of open brackets at the end of the block."""
        return int(self.depths[-1])


def scan_brackets(data: bytes, *, depth: int = 0, in_string: bool = False, escaped: bool = False) -> BracketScan:
    """Find the brackets of a block of bytes that begins in the given state.

    The first entry represents the beginning of the block: offset -1, step 0, initial depth.
    """
    array = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(np.frombuffer(data.translate(_IS_MARK), bool))
    if escaped or _SLASH in data:
        marks = marks[~_mask_escaped(array, marks, escaped=escaped)]
        tail = len(data) - len(data.rstrip(b"\\"))
        escaped = (tail + (escaped and tail == len(data))) % 2 == 1
    kinds = array[marks]
    quotes = kinds == _QUOTE
    inside = (np.cumsum(quotes) + in_string) & 1
    outside = (inside == 0) & ~quotes
    steps = np.concatenate([[0], _DEPTH_STEPS[kinds[outside]]]).astype(np.int8)
    return BracketScan(
        np.concatenate([[-1], marks[outside]]),
        steps,
        np.cumsum(steps, dtype=np.int64) + depth,
        bool(inside[-1]) if len(inside) else in_string,
        escaped,
    )


def _mask_escaped(array: NDArray[np.uint8], marks: NDArray[np.int64], *, escaped: bool) -> NDArray[np.bool_]:
    """Return which marks follow an odd run of backslashes.

    ``escaped`` states that the first byte is escaped.
    """
    is_escaped = np.zeros(len(marks), bool)
    if escaped and len(marks):
        is_escaped[0] = marks[0] == 0
    # Few marks follow one backslash, and fewer follow two: runs are walked back from those.
    candidates = np.flatnonzero(marks > 0)
    candidates = candidates[array[marks[candidates] - 1] == _SLASH]
    for back in range(2, _MAX_WALKED + 2):
        is_escaped[candidates] ^= True
        previous = marks[candidates] - back
        inside = previous >= 0
        # An escaped backslash escapes nothing.
        if escaped:
            is_escaped[candidates[previous == -1]] ^= True
        candidates = candidates[inside][array[previous[inside]] == _SLASH]
        if not len(candidates):
            return is_escaped
    slashes = np.flatnonzero(array == _SLASH)
    breaks = np.flatnonzero(np.diff(slashes) != 1)
    firsts = slashes[np.concatenate([[0], breaks + 1])]
    first = firsts[np.searchsorted(firsts, marks[candidates] - 1, "right") - 1]
    run = marks[candidates] - first - (escaped & (first == 0))
    is_escaped[candidates] = run % 2 == 1
    return is_escaped
