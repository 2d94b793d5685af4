"""Schemas: which columns of a source hold what, the names that are known, and their order.

A role is what a column is for (``prompt``, ``response``, ``messages`` ...); a form is a set of
roles that makes a record. Forms stand in the order in which they are tried, and the names of a
role in the order in which they are taken.
"""

from dataclasses import dataclass, field
from typing import Literal

SchemaKind = Literal["text", "interleaved", "conversation", "preference", "tokens"]
SchemaForm = Literal["messages", "pair", "prompt-completion", "instruction", "tokens", "interleaved", "text"]

PROMPT_COLUMNS = ("instruction", "prompt", "question")
RESPONSE_COLUMNS = ("response", "output", "answer", "completion", "answers.text[0]")
TURN_COLUMNS = ("messages", "conversations")
_CONTEXT_COLUMNS = ("input", "context")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_TOOLS_COLUMNS = ("tools",)
_LABEL_COLUMNS = ("label", "kto_tag")
_SWIFT_REJECTED_COLUMNS = ("rejected_response", "rejected_messages")
_MEDIA_COLUMNS: dict[str, tuple[str, ...]] = {
    "images": ("images", "image"),
    "audios": ("audios", "audio"),
    "videos": ("videos", "video"),
}


@dataclass(frozen=True, slots=True)
class FormRule:
    """One form: the roles it must have, and those it may have, each with its known names."""

    form: SchemaForm
    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]]

    @property
    def roles(self) -> set[str]:
        """Every role a record of this form can have."""
        return {*self.required, *self.optional}

    @property
    def kinds(self) -> frozenset[SchemaKind]:
        """The kinds of records that it can become."""
        if self.form in ("text", "interleaved", "tokens"):
            return frozenset((self.form,))
        if self.form == "pair":
            return frozenset(("preference",))
        return frozenset(("conversation", "preference"))


_HISTORY_COLUMNS = ("history",)
_PAIR_OPTIONAL_COLUMNS = {
    "prompt": PROMPT_COLUMNS,
    "context": _CONTEXT_COLUMNS,
    "history": _HISTORY_COLUMNS,
    "system": _SYSTEM_COLUMNS,
    "tools": _TOOLS_COLUMNS,
}
FORM_RULES = (
    # ms-swift's pairs: a conversation, or a prompt and its response, with the rejected answer.
    FormRule(
        "pair",
        {"chosen": TURN_COLUMNS, "rejected": _SWIFT_REJECTED_COLUMNS},
        _PAIR_OPTIONAL_COLUMNS,
    ),
    FormRule(
        "pair",
        {"prompt": PROMPT_COLUMNS, "chosen": RESPONSE_COLUMNS, "rejected": _SWIFT_REJECTED_COLUMNS},
        {
            "context": _CONTEXT_COLUMNS,
            "history": _HISTORY_COLUMNS,
            "system": _SYSTEM_COLUMNS,
            "tools": _TOOLS_COLUMNS,
        },
    ),
    FormRule(
        "messages",
        {"messages": TURN_COLUMNS},
        {
            "system": _SYSTEM_COLUMNS,
            "tools": _TOOLS_COLUMNS,
            "label": _LABEL_COLUMNS,
            **_MEDIA_COLUMNS,
        },
    ),
    FormRule(
        "pair",
        {"chosen": ("chosen",), "rejected": ("rejected",)},
        _PAIR_OPTIONAL_COLUMNS,
    ),
    FormRule(
        "prompt-completion",
        {"prompt": ("prompt",), "completion": ("completion",)},
        {
            "system": _SYSTEM_COLUMNS,
            "tools": _TOOLS_COLUMNS,
            "label": _LABEL_COLUMNS,
            **_MEDIA_COLUMNS,
        },
    ),
    FormRule(
        "instruction",
        {"prompt": PROMPT_COLUMNS, "response": RESPONSE_COLUMNS},
        {
            "context": _CONTEXT_COLUMNS,
            "history": _HISTORY_COLUMNS,
            "system": _SYSTEM_COLUMNS,
            "tools": (),
            "label": _LABEL_COLUMNS,
            **_MEDIA_COLUMNS,
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
INTERLEAVED_RULE = FormRule(
    "interleaved",
    {"text": ("text", "content", "caption", "transcription", "texts")},
    _MEDIA_COLUMNS,
)
COLUMN_ROLES = tuple(dict.fromkeys(role for rule in FORM_RULES for role in (*rule.required, *rule.optional)))


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

    form: SchemaForm
    columns: dict[str, tuple[str, ...]]
    description: str
    late: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mapped: bool = False
    ignored: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    @property
    def kind(self) -> SchemaKind:
        """What a record becomes: a text, one with media, a conversation, a preference or token ids."""
        if self.form in ("text", "interleaved", "tokens"):
            return self.form
        if self.form == "pair" or "label" in self.columns:
            return "preference"
        return "conversation"
