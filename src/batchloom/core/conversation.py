"""Conversations, and texts with media, as they travel from a source to the tokens."""

from dataclasses import dataclass, field
from typing import Any

from batchloom.core.medium import Medium


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, every turn of it, untouched.

    Attributes:
        messages: the turns as Hugging Face chat templates take them: dicts with ``role`` and
            ``content`` (a string or typed parts), and whatever else the record held
            (``tool_calls``, ``name``, ``reasoning_content``, ...).
        tools: the tools the template is given, None where the record has none.
        trained: for each message whether the record itself says that it is trained (a ``train``
            flag, a ``weight``); None where it does not say and ``train_on`` decides.
        completion: number of the first message of the completion, for prompt-completion records;
            None where the record makes no such difference.
        media: what the parts of the contents stand for whose type is that of a medium, in their order.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    trained: list[bool | None] = field(default_factory=list)
    completion: int | None = None
    media: list[Medium] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InterleavedText:
    """A text with media in it.

    Attributes:
        texts: what stands before, between and behind the media: one more than there are media; ``""`` for nothing.
        media: in their order.
    """

    texts: list[str]
    media: list[Medium] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A preference: two answers to one prompt, two documents that share a pair id.

    Attributes:
        chosen: what is preferred; a text where the record holds two texts and no prompt.
        rejected: what is not, of the same type as ``chosen``.
    """

    chosen: Conversation | str
    rejected: Conversation | str


@dataclass(frozen=True, slots=True)
class LabelledConversation:
    """A conversation somebody called good or bad (KTO's unpaired preference).

    Attributes:
        conversation: the conversation, which knows where the answer that is judged begins.
        label: True where it is called good.
    """

    conversation: Conversation
    label: bool
