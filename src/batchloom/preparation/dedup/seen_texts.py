"""Texts that their unit has had already: they are neither tokenized nor written a second time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

# Texts that are remembered; the repeats of others are tokenized, and left out with all other duplicates. About 40 MB.
_MAX_REMEMBERED = 1 << 18
_UNKNOWN_LENGTH = -1


@dataclass(frozen=True, slots=True)
class SeenBatch:
    """What is known of a batch of texts before they are tokenized.

    Attributes:
        numbers: of each text among those that are remembered; -1 where it is not [D].
        fresh: which have not been there [D].
    """

    numbers: NDArray[np.int64]
    fresh: NDArray[np.bool_]


@final
class SeenTexts:
    """The hashes of a unit's texts, each with the tokens it became.

    Duplicates are found over all units later, these again with them: what is decided here is only that nobody
    makes tokens that nobody will read.

    Args:
        most: how many texts are remembered.
    """

    def __init__(self, most: int = _MAX_REMEMBERED) -> None:
        self._numbers: dict[bytes, int] = {}
        self._lengths = np.zeros(most, np.uint32)

    def look(self, digests: Sequence[bytes]) -> SeenBatch:
        """Which of the next texts have been there; the others are remembered while there is room.

        Args:
            digests: of the texts, 16 bytes each [D].
        """
        numbers_by_digest, before = self._numbers, len(self._numbers)
        if before + len(digests) > len(self._lengths):
            numbers = np.array([numbers_by_digest.get(digest, _UNKNOWN_LENGTH) for digest in digests], np.int64)
            return SeenBatch(numbers, numbers == _UNKNOWN_LENGTH)
        numbers = np.array(
            [numbers_by_digest.setdefault(digest, len(numbers_by_digest)) for digest in digests],
            np.int64,
        )
        # Numbers are given in order, so that a new one is above all before it.
        highest = np.maximum.accumulate(np.concatenate([[before - 1], numbers[:-1]]))
        return SeenBatch(numbers, numbers > highest)

    def lengths(self, batch: SeenBatch, fresh_lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The tokens of each text of a batch, those of its first for one that had been there, uint32 [D].

        Args:
            batch: what was known of the batch; batches come in the order in which they were looked at.
            fresh_lengths: the tokens of each of the fresh.
        """
        lengths = np.empty(len(batch.fresh), np.uint32)
        lengths[batch.fresh] = fresh_lengths
        new = batch.fresh & (batch.numbers != _UNKNOWN_LENGTH)
        self._lengths[batch.numbers[new]] = lengths[new]
        lengths[~batch.fresh] = self._lengths[batch.numbers[~batch.fresh]]
        return lengths
