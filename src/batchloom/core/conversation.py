"""Conversations, and texts with media, between a source and tokenization."""

from dataclasses import dataclass, field
from typing import Any

from batchloom.core.medium import Medium


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation with all its turns, unchanged.

    Attributes:
        messages: turns as Hugging Face chat templates take them: dicts with ``role`` and
            ``content`` (a string or typed parts), and all other fields of the record
            (``tool_calls``, ``name``, ``reasoning_content``, ...).
        tools: tools for the template, None if the record has none.
        trained: for each message, whether the record itself marks it as trained (a ``train``
            flag, a ``weight``); None if it does not, and ``train_on`` decides.
        completion: index of the first message of the completion, for prompt-completion records;
            None for others.
        media: media of the typed content parts, in their order.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    trained: list[bool | None] = field(default_factory=list)
    completion: int | None = None
    media: list[Medium] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InterleavedText:
    """A text with embedded media.

    Attributes:
        texts: texts before, between and after the media, one more than there are media; ``""`` if empty.
        media: media in their order.
    """

    texts: list[str]
    media: list[Medium] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, stored as two documents that share a pair id.

    Attributes:
        chosen: the preferred answer; a text if the record holds two texts and no prompt.
        rejected: the rejected answer, of the same type as ``chosen``.
    """

    chosen: Conversation | str
    rejected: Conversation | str


@dataclass(frozen=True, slots=True)
class LabelledConversation:
    """A conversation labelled good or bad (KTO's unpaired preference).

    Attributes:
        conversation: the conversation, with the start of the judged answer.
        label: True for good.
    """

    conversation: Conversation
    label: bool
