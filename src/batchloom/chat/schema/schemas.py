"""Schemas: which columns of a source hold what, the names that are known, and their order.

A role is what a column is for (``prompt``, ``response``, ``messages`` ...); a form is a set of
roles that makes a record. Forms stand in the order in which they are tried, and the names of a
role in the order in which they are taken.
"""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["text", "interleaved", "conversation", "preference", "tokens"]
Form = Literal[
    "messages", "pair", "prompt-completion", "instruction", "tokens", "interleaved", "text"
]

PROMPT = ("instruction", "prompt", "question")
RESPONSE = ("response", "output", "answer", "completion", "answers.text[0]")
TURNS = ("messages", "conversations")
_CONTEXT = ("input", "context")
_SYSTEM = ("system", "system_prompt")
_TOOLS = ("tools",)
_LABEL = ("label", "kto_tag")
_SWIFT_REJECTED = ("rejected_response", "rejected_messages")
_MEDIA: dict[str, tuple[str, ...]] = {
    "images": ("images", "image"),
    "audios": ("audios", "audio"),
    "videos": ("videos", "video"),
}


@dataclass(frozen=True, slots=True)
class FormRule:
    """One form: the roles it must have, and those it may have, each with its known names."""

    form: Form
    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]]

    @property
    def roles(self) -> set[str]:
        """Every role a record of this form can have."""
        return {*self.required, *self.optional}

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of records that it can become."""
        if self.form in ("text", "interleaved", "tokens"):
            return frozenset((self.form,))
        if self.form == "pair":
            return frozenset(("preference",))
        return frozenset(("conversation", "preference"))


_HISTORY = ("history",)
_AROUND_PAIR = {
    "prompt": PROMPT,
    "context": _CONTEXT,
    "history": _HISTORY,
    "system": _SYSTEM,
    "tools": _TOOLS,
}
FORMS = (
    # ms-swift's pairs: a conversation, or a prompt and its response, with the rejected answer.
    FormRule("pair", {"chosen": TURNS, "rejected": _SWIFT_REJECTED}, _AROUND_PAIR),
    FormRule(
        "pair",
        {"prompt": PROMPT, "chosen": RESPONSE, "rejected": _SWIFT_REJECTED},
        {"context": _CONTEXT, "history": _HISTORY, "system": _SYSTEM, "tools": _TOOLS},
    ),
    FormRule(
        "messages",
        {"messages": TURNS},
        {"system": _SYSTEM, "tools": _TOOLS, "label": _LABEL, **_MEDIA},
    ),
    FormRule(
        "pair",
        {"chosen": ("chosen",), "rejected": ("rejected",)},
        _AROUND_PAIR,
    ),
    FormRule(
        "prompt-completion",
        {"prompt": ("prompt",), "completion": ("completion",)},
        {"system": _SYSTEM, "tools": _TOOLS, "label": _LABEL, **_MEDIA},
    ),
    FormRule(
        "instruction",
        {"prompt": PROMPT, "response": RESPONSE},
        {
            "context": _CONTEXT,
            "history": _HISTORY,
            "system": _SYSTEM,
            "tools": (),
            "label": _LABEL,
            **_MEDIA,
        },
    ),
    FormRule(
        "tokens",
        {"input_ids": ("input_ids",)},
        {
            "labels": ("labels",),
            "loss_mask": ("loss_mask",),
            "attention_mask": ("attention_mask",),
        },
    ),
    FormRule("text", {"text": ("text", "content")}, {}),
)
# Tried before texts where media are read: of these names the last ones are a text only beside a medium.
INTERLEAVED = FormRule(
    "interleaved", {"text": ("text", "content", "caption", "transcription", "texts")}, _MEDIA
)
ROLES = tuple(dict.fromkeys(role for rule in FORMS for role in (*rule.required, *rule.optional)))


@dataclass(frozen=True, slots=True)
class Schema:
    """How the records of one source are read.

    Attributes:
        form: what the columns make together.
        columns: for each role the columns that may hold it, the first that holds something wins.
            Roles a record must have name one column.
        description: one line for people, such as ``instruction/output -> 2 turns``.
        late: columns that would make something else of a record (a label, a mask), by role, where the
            first records have none of that role: one that has such a column is refused.
        mapped: whether a mapping names a role that the form must have, and so decides the form.
        ignored: columns and message keys that are left out of records before they are read.
        left_out: columns of the roles that a mapping leaves out (``label=``).
    """

    form: Form
    columns: dict[str, tuple[str, ...]]
    description: str
    late: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mapped: bool = False
    ignored: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    @property
    def kind(self) -> Kind:
        """What a record becomes: a text, one with media, a conversation, a preference or token ids."""
        if self.form in ("text", "interleaved", "tokens"):
            return self.form
        if self.form == "pair" or "label" in self.columns:
            return "preference"
        return "conversation"
