"""Texts of a unit that were tokenized already."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

# Maximum number of remembered texts, about 40 MB. Repeats of other texts are tokenized, and removed by deduplication.
_MAX_REMEMBERED = 1 << 18
_UNKNOWN_LENGTH = -1


@dataclass(frozen=True, slots=True)
class SeenBatch:
    """Number of each text of a batch (-1: not remembered), and whether it is new."""

    numbers: NDArray[np.int64]
    fresh: NDArray[np.bool_]


@final
class SeenTexts:
    """Hashes of the texts of a unit, each with its number of tokens.

    This only avoids tokenizing texts that are dropped later: deduplication over all units finds the
    repeats again.
    """

    def __init__(self, most: int = _MAX_REMEMBERED) -> None:
        self._numbers: dict[bytes, int] = {}
        self._lengths = np.zeros(most, np.uint32)

    def look(self, digests: Sequence[bytes]) -> SeenBatch:
        """Return which of the next texts are repeats; remember new ones if possible."""
        numbers_by_digest = self._numbers
        before = len(self._numbers)
        if before + len(digests) > len(self._lengths):
            numbers = np.array([numbers_by_digest.get(digest, _UNKNOWN_LENGTH) for digest in digests], np.int64)
            return SeenBatch(numbers, numbers == _UNKNOWN_LENGTH)
        numbers = np.array(
            [numbers_by_digest.setdefault(digest, len(numbers_by_digest)) for digest in digests], np.int64
        )
        # Numbers ascend, so a new number is above all numbers before it.
        highest = np.maximum.accumulate(np.concatenate([[before - 1], numbers[:-1]]))
        return SeenBatch(numbers, numbers > highest)

    def lengths(self, batch: SeenBatch, fresh_lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the tokens of each text of a batch, given those of its new texts.

        A repeat has the length of its first occurrence. Batches come in the order of :meth:`look`.
        """
        lengths = np.empty(len(batch.fresh), np.uint32)
        lengths[batch.fresh] = fresh_lengths
        new = batch.fresh & (batch.numbers != _UNKNOWN_LENGTH)
        self._lengths[batch.numbers[new]] = lengths[new]
        lengths[~batch.fresh] = self._lengths[batch.numbers[~batch.fresh]]
        return lengths
