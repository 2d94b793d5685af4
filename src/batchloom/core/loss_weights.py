"""Loss weights of tokens, stored as one of 256 codes.

Code 0 is weight 0 (not trained) and code 1 is weight 1, so an array of trained flags is an array of codes. The other
codes are 0.01 to 0.99 in hundredths, 1.05 to 3 in steps of 0.05, 3.1 to 10 in tenths, and 11 to 55.
``docs/reference/format.md`` lists them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import is_positive_number

# Trained flags (bool), or codes of weights (uint8).
TokenFlags = NDArray[np.bool_ | np.uint8]

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


def encode_loss_weights(weights: NDArray[np.floating[Any]]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Round weights to the nearest code, and flag those that are not exact.

    A weight in the middle of two codes becomes the smaller one. A positive weight is at least 0.01, so that rounding
    never excludes a token from training.

    Args:
        weights: weights from 0 to ``MAX_LOSS_WEIGHT`` [N].

    Returns:
        Codes, uint8 [N], and whether each weight was changed by rounding, bool [N].
    """
    numbers = np.searchsorted(_MIDPOINTS, weights)
    numbers = np.where(weights > 0, np.maximum(numbers, 1), 0)
    rounded = np.abs(_ASCENDING_WEIGHTS[numbers] - weights) > _TOLERANCE * weights
    return _ASCENDING_CODES[numbers], rounded


def decode_loss_weights(flags: TokenFlags) -> NDArray[np.float32]:
    """Return the weights of trained flags or codes, float32 of the same shape."""
    return LOSS_WEIGHTS[flags.view(np.uint8)]


def has_loss_weights(flags: TokenFlags | None) -> bool:
    """Return whether a token has another weight than 0 and 1."""
    return flags is not None and flags.dtype == np.uint8 and bool((flags > 1).any())


def make_token_flags(weights: NDArray[np.floating[Any]]) -> tuple[TokenFlags, bool]:
    """Return the codes of weights [N], and whether any was rounded.

    The codes are trained flags (bool) if no weight is other than 0 and 1.

    Raises:
        UnusableRecordError: a weight is above ``MAX_LOSS_WEIGHT``, as the product of several may be.
    """
    if (largest := weights.max(initial=0)) > MAX_LOSS_WEIGHT:
        raise UnusableRecordError(
            f"its loss weights multiply to {largest:g}; the largest is {MAX_LOSS_WEIGHT}: lower one of them"
        )
    codes, rounded = encode_loss_weights(weights)
    return codes if has_loss_weights(codes) else codes.view(np.bool_), bool(rounded.any())


def count_loss_weights(flags: TokenFlags) -> dict[float, int]:
    """Return the number of trained tokens of each weight, ascending."""
    counts = np.bincount(flags.view(np.uint8), minlength=256)[_ASCENDING_CODES].tolist()
    weights = zip(_ASCENDING_WEIGHTS.tolist(), counts, strict=True)
    return {weight: count for weight, count in weights if weight and count}


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
