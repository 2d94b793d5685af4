"""What is trained of conversations, and what becomes of long ones."""

from dataclasses import dataclass

from batchloom.chat.templates import TRAIN_ON, TrainOn
from batchloom.core.settings import as_int, quote_value, raise_problems, suggest
from batchloom.preparation.settings.overlong_policy import OVERLONG_POLICIES, OverlongPolicy

# Numbers of tokens are kept in 64 bits.
_MAX_TOKENS_LIMIT = 10**12


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
    overlong: OverlongPolicy = "drop"
    prove: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {quote_value(value)} is not one of {', '.join(choices)}{suggest(str(value), choices)}"
            for name, value, choices in (
                ("train_on", self.train_on, TRAIN_ON),
                ("overlong", self.overlong, OVERLONG_POLICIES),
            )
            if value not in choices
        ]
        most = as_int(self.max_tokens)
        if self.max_tokens is not None and (most is None or most > _MAX_TOKENS_LIMIT):
            problems.append(
                f"max_tokens: {quote_value(self.max_tokens)} is not a whole number from 1 to {_MAX_TOKENS_LIMIT:,}"
            )
        elif most is not None and most < 1:
            problems.append(f"max_tokens: {quote_value(most)} leaves no room for a token")
        raise_problems(problems)
