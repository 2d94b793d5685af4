"""What is trained of conversations, and what becomes of long ones."""

from dataclasses import dataclass

from batchloom.chat.templates import TRAIN_ON, TrainOn
from batchloom.core.settings import nearest, raise_problems, shown, whole
from batchloom.preparation.settings.overlong_policy import OVERLONG, Overlong

# Numbers of tokens are kept in 64 bits.
_MOST_TOKENS = 10**12


@dataclass(frozen=True, slots=True)
class ChatRules:
    """What is trained of conversations, and what becomes of long ones.

    Attributes:
        train_on: the turns that are trained: ``assistant``, ``all``, ``last`` or ``completion``.
        max_tokens: tokens a conversation may have, None for any number.
        overlong: what becomes of one that has more: ``drop``, ``truncate-turns``, ``split`` or
            ``error``.
        prove: whether trained tokens are decoded and compared with the text, too.
    """

    train_on: TrainOn = "assistant"
    max_tokens: int | None = None
    overlong: Overlong = "drop"
    prove: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {shown(value)} is not one of {', '.join(known)}{nearest(str(value), known)}"
            for name, value, known in (
                ("train_on", self.train_on, TRAIN_ON),
                ("overlong", self.overlong, OVERLONG),
            )
            if value not in known
        ]
        most = whole(self.max_tokens)
        if self.max_tokens is not None and (most is None or most > _MOST_TOKENS):
            problems.append(
                f"max_tokens: {shown(self.max_tokens)} is not a whole number from 1 to {_MOST_TOKENS:,}"
            )
        elif most is not None and most < 1:
            problems.append(f"max_tokens: {shown(most)} leaves no room for a token")
        raise_problems(problems)
