"""Settings of chat rendering: trained turns, and the overlong policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.chat.templates import TrainOn
from batchloom.core.errors import InputError
from batchloom.core.settings import Setting, find_problems, raise_problems

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


CHAT_PANEL = "Conversations"

TRAIN_ON = Setting(
    help="Turns to train on: assistant, all, last or completion.",
    shown_default="assistant; completion for prompt-completion records",
    panel=CHAT_PANEL,
)
# Token counts are stored in 64 bits.
MaxTokensSetting = Annotated[
    int | None, Setting(help="Maximum tokens of a conversation.", minimum=1, maximum=10**12, panel=CHAT_PANEL)
]
OverlongSetting = Annotated[
    OverlongPolicy,
    Setting(help="Policy for longer conversations: drop, truncate-turns, split or error.", panel=CHAT_PANEL),
]
ProveSetting = Annotated[bool, Setting(help="Decode trained tokens and compare them with the text.", panel=CHAT_PANEL)]


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Rules for the conversations of one source.

    Attributes:
        train_on: turns to train on: ``assistant``, ``all``, ``last`` or ``completion``.
        max_tokens: maximum tokens of a conversation; None for no limit.
        overlong: policy for longer ones: ``drop``, ``truncate-turns``, ``split`` or ``error``.
        prove: whether trained tokens are decoded and compared with the text.
    """

    train_on: Annotated[TrainOn, TRAIN_ON] = "assistant"
    max_tokens: MaxTokensSetting = None
    overlong: OverlongSetting = "drop"
    prove: ProveSetting = False

    def __post_init__(self) -> None:
        raise_problems(find_problems(self))
