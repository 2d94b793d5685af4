"""Settings of chat rendering: trained turns, and the overlong policy."""

from dataclasses import dataclass
from typing import Annotated

from batchloom.chat.templates import TrainOn
from batchloom.core.settings import Setting, find_problems, raise_problems
from batchloom.preparation.settings.overlong_policy import OverlongPolicy

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
