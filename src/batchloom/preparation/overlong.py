"""What becomes of a conversation of more tokens than allowed: pure decisions on turn boundaries."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError

Overlong = Literal["drop", "truncate-turns", "split", "error"]
OVERLONG: tuple[str, ...] = get_args(Overlong)


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


class Kept(NamedTuple):
    """Tokens that are kept as one document.

    Attributes:
        head: this many tokens from the beginning, repeated before later pieces; not trained there.
        start: of the rest.
        stop: of the rest.
    """

    head: int
    start: int
    stop: int


def fit_turns(
    mask: NDArray[np.bool_],
    heads: Sequence[int],
    roles: Sequence[str],
    limit: int,
    *,
    split: bool,
) -> list[Kept]:
    """The pieces of a conversation that fit into ``limit`` tokens, each with something to train.

    Whole turns are left out, from the end, so that every turn that is kept still follows what it
    answers. The pieces of a split begin where a user speaks, behind the system's turn, which each
    of them repeats.

    Args:
        mask: the trained tokens [tokens].
        heads: the token each turn begins with, in order of the text.
        roles: of these turns.
        limit: tokens allowed.
        split: whether later turns become pieces of their own; else only the first piece is kept.

    Returns:
        The pieces; none where no whole turns with something to train fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask)])
    edges = [*heads[1:], mask.size]
    # A piece ends behind a turn that is trained.
    ends = [
        stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]
    ]
    system = [role == "system" for role in roles]
    head = next((at for at, is_system in zip(heads, system, strict=True) if not is_system), 0)
    begins = [at for at, role in zip(heads, roles, strict=True) if role == "user"]
    fitting = [stop for stop in ends if stop <= limit and trained[stop]]
    kept = [Kept(0, 0, fitting[-1])] if fitting else []
    if not split:
        return kept
    done = fitting[-1] if fitting else head
    for start in begins:
        if start < done:
            continue
        fitting = [
            stop
            for stop in ends
            if start < stop <= start + limit - head and trained[stop] > trained[start]
        ]
        if fitting:
            done = fitting[-1]
            kept.append(Kept(head, start, done))
    return kept
