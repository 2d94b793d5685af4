"""What becomes of a conversation of more tokens than allowed: pure decisions on its mask."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError

OverlongPolicy = Literal["drop", "truncate-turns", "split", "error"]
OVERLONG_POLICIES: tuple[str, ...] = get_args(OverlongPolicy)


class OverlongError(InputError):
    """A conversation has more tokens than allowed, and that is to stop the work.

    Attributes:
        number: of the conversation in its batch, from 0.
        reason: how long it is, and the remedy.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"conversation {number} {reason}")
        self.number, self.reason = number, reason

    def __reduce__(self) -> tuple[type[Self], tuple[int, str]]:
        return type(self), (self.number, self.reason)


class ConversationSegment(NamedTuple):
    """A stretch of a conversation's tokens, for a document of its own.

    Attributes:
        start: its first token.
        stop: behind its last token.
        trains: whether it has anything to train.
    """

    start: int
    stop: int
    trains: bool


def count_fitting_tokens(mask: NDArray[np.bool_], heads: Sequence[int], limit: int) -> int:
    """How many tokens are left of a conversation when whole turns are left out from its end.

    Every turn that is kept still follows what it answers, and a trained one is last.

    Args:
        mask: the trained tokens [tokens].
        heads: the token each turn begins with, in order of the text.
        limit: tokens allowed.

    Returns:
        The tokens kept; 0 where no whole turns with something to train fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask)])
    edges = [*heads[1:], mask.size]
    ends = [stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]]
    return max((stop for stop in ends if stop <= limit), default=0)


def split_at_limit(mask: NDArray[np.bool_], limit: int) -> list[ConversationSegment]:
    """Consecutive pieces of ``limit`` tokens, the last of what is left.

    Nothing is trained on the first token of a piece, which nothing foretells.
    """
    return [
        ConversationSegment(start, min(start + limit, mask.size), bool(mask[start + 1 : start + limit].any()))
        for start in range(0, mask.size, limit)
    ]
