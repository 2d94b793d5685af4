"""Loss weights of tokens, stored as one of 256 codes.

Code 0 is weight 0 (not trained) and code 1 is weight 1, so an array of trained flags is an array of codes. The other
codes are 0.01 to 0.99 in hundredths, 1.05 to 3 in steps of 0.05, 3.1 to 10 in tenths, and 11 to 55.
``docs/reference/format.md`` lists them.
"""

from collections.abc import Iterable
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import is_positive_number

MAX_LOSS_WEIGHT = 55
_HUNDREDTHS = [0, 100, *range(1, 100), *range(105, 301, 5), *range(310, 1001, 10), *range(1100, 5501, 100)]
_WEIGHTS = np.array(_HUNDREDTHS) / 100
# Weight of each code, float32 [256].
LOSS_WEIGHTS: NDArray[np.float32] = _WEIGHTS.astype(np.float32)
LOSS_WEIGHTS.setflags(write=False)
_ASCENDING_CODES = np.argsort(_WEIGHTS).astype(np.uint8)
_ASCENDING_WEIGHTS = _WEIGHTS[_ASCENDING_CODES]
_MIDPOINTS = (_ASCENDING_WEIGHTS[1:] + _ASCENDING_WEIGHTS[:-1]) / 2
# Differences of this share are the rounding of binary fractions, not of weights.
_TOLERANCE = 1e-6


@final
class LossFlags:
    """Trained flags and loss weights of tokens.

    A text whose tokens are all trained needs no array, and most texts are such.

    Attributes:
        size: number of tokens.
        rounded: True if a weight was rounded to that of its code.
    """

    __slots__ = ("_codes", "rounded", "size")

    def __init__(self, size: int, codes: NDArray[np.uint8] | None = None, *, rounded: bool = False) -> None:
        self.size = size
        self.rounded = rounded
        self._codes = codes

    @classmethod
    def all_trained(cls, size: int) -> Self:
        """Return the flags of tokens that all have weight 1."""
        return cls(size)

    @classmethod
    def none_trained(cls, size: int) -> Self:
        """Return the flags of tokens without a loss."""
        return cls(size, np.zeros(size, np.uint8))

    @classmethod
    def from_codes(cls, codes: NDArray[np.bool_ | np.uint8], *, rounded: bool = False) -> Self:
        """Return the flags with codes, or trained flags, [size], without a copy."""
        return cls(codes.size, codes.view(np.uint8), rounded=rounded)

    @classmethod
    def from_weights(cls, weights: NDArray[np.floating[Any]]) -> Self:
        """Return the flags with the codes nearest to these weights [size].

        A weight in the middle of two codes becomes the smaller one. A positive weight is at least 0.01, so that
        rounding never excludes a token from training.

        Raises:
            UnusableRecordError: a weight is above ``MAX_LOSS_WEIGHT``, as the product of several may be.
        """
        if (largest := weights.max(initial=0)) > MAX_LOSS_WEIGHT:
            raise UnusableRecordError(
                f"its loss weights multiply to {largest:g}; the largest is {MAX_LOSS_WEIGHT}: lower one of them"
            )
        numbers = np.searchsorted(_MIDPOINTS, weights)
        numbers = np.where(weights > 0, np.maximum(numbers, 1), 0)
        rounded = np.abs(_ASCENDING_WEIGHTS[numbers] - weights) > _TOLERANCE * weights
        return cls.from_codes(_ASCENDING_CODES[numbers], rounded=bool(rounded.any()))

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """Return the flags of several ranges of tokens, back to back."""
        parts = list(parts)
        if all(part.is_plain for part in parts):
            return cls(sum(part.size for part in parts))
        rounded = any(part.rounded for part in parts)
        return cls.from_codes(np.concatenate([part.codes for part in parts]), rounded=rounded)

    def __getitem__(self, tokens: slice | NDArray[np.bool_]) -> "LossFlags":
        if self._codes is not None:
            codes = self._codes[tokens]
            return LossFlags(codes.size, codes, rounded=self.rounded)
        if isinstance(tokens, slice):
            return LossFlags(len(range(self.size)[tokens]))
        return LossFlags(int(np.count_nonzero(tokens)))

    def __repr__(self) -> str:
        return f"LossFlags({self.size}, {self._codes!r})"

    @property
    def is_plain(self) -> bool:
        """True if no token has a code: all have weight 1, and nothing needs to be stored."""
        return self._codes is None

    @property
    def codes(self) -> NDArray[np.uint8]:
        """Code of the weight of each token, uint8 [size]."""
        return np.ones(self.size, np.uint8) if self._codes is None else self._codes

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Trained flag of each token, bool [size]."""
        return np.not_equal(self.codes, 0)

    @property
    def weights(self) -> NDArray[np.float32]:
        """Weight of each token, float32 [size]; 0 if it is not trained."""
        return LOSS_WEIGHTS[self.codes]

    @property
    def has_weights(self) -> bool:
        """True if a token has another weight than 0 and 1."""
        return self._codes is not None and bool(self._codes.max(initial=0) > 1)

    def count_trained(self) -> int:
        """Count the trained tokens."""
        return self.size if self._codes is None else int(np.count_nonzero(self._codes))

    def count_weights(self) -> dict[float, int]:
        """Return the number of trained tokens of each weight, ascending."""
        counts = np.bincount(self.codes, minlength=256)[_ASCENDING_CODES].tolist()
        weights = zip(_ASCENDING_WEIGHTS.tolist(), counts, strict=True)
        return {weight: count for weight, count in weights if weight and count}

    def scale(self, factor: float) -> "LossFlags":
        """Return the flags with all weights multiplied; raises as :meth:`from_weights`."""
        scaled = LossFlags.from_weights(self.weights * np.float64(factor))
        return LossFlags.from_codes(scaled.codes, rounded=self.rounded or scaled.rounded)

    def repeat(self, counts: NDArray[np.integer[Any]]) -> "LossFlags":
        """Return the flags with each token repeated, as by ``np.repeat``."""
        return LossFlags.from_codes(np.repeat(self.codes, counts), rounded=self.rounded)


def parse_loss_weight(value: object, field_path: str, remedy: str = "") -> float:
    """Return the weight that a record holds; ``remedy`` ends the error.

    Raises:
        UnusableRecordError: not a number from 0 to ``MAX_LOSS_WEIGHT``. Text and ``true`` are not numbers.
    """
    if isinstance(value, int | float) and is_positive_number(value, zero=True) and value <= MAX_LOSS_WEIGHT:
        return float(value)
    raise UnusableRecordError(
        f"{field_path} is {value!r:.40}; a loss weight is a number from 0 (not trained) to {MAX_LOSS_WEIGHT}{remedy}"
    )
