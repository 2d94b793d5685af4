"""Policies for conversations above the token limit, as functions of their mask."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError

OverlongPolicy = Literal["drop", "truncate-turns", "split", "error"]
OVERLONG_POLICIES: tuple[str, ...] = get_args(OverlongPolicy)


class OverlongError(InputError):
    """A conversation has more tokens than allowed, and the policy is ``error``.

    Attributes:
        number: index of the conversation in its batch.
        reason: its length, and the remedy.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"conversation {number} {reason}")
        self.number, self.reason = number, reason

    def __reduce__(self) -> tuple[type[Self], tuple[int, str]]:
        return type(self), (self.number, self.reason)


class ConversationSegment(NamedTuple):
    """Token range of a conversation that becomes a document.

    Attributes:
        start: first token.
        stop: end, exclusive.
        trains: whether it has trained tokens.
    """

    start: int
    stop: int
    trains: bool


def count_fitting_tokens(mask: NDArray[np.bool_], heads: Sequence[int], limit: int) -> int:
    """Count the tokens that fit after turns are dropped from a conversation's end.

    Every remaining turn still follows the turn it answers, and the last one is trained.

    Args:
        mask: trained tokens, bool [tokens].
        heads: first token of each turn, in text order.
        limit: maximum number of tokens.

    Returns:
        Number of tokens; 0 if no complete turns with trained tokens fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask)])
    edges = [*heads[1:], mask.size]
    ends = [stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]]
    return max((stop for stop in ends if stop <= limit), default=0)


def split_at_limit(mask: NDArray[np.bool_], limit: int) -> list[ConversationSegment]:
    """Split into consecutive segments of ``limit`` tokens; the last may be shorter.

    The first token of a segment is not trained, because no token predicts it.
    """
    return [
        ConversationSegment(start, min(start + limit, mask.size), bool(mask[start + 1 : start + limit].any()))
        for start in range(0, mask.size, limit)
    ]
