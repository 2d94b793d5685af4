"""Schemas: the roles of columns, their known names, and the order of detection.

A role is the purpose of a column (``prompt``, ``response``, ``messages`` ...); a form is a set of
roles that makes a record. Forms, and the names of each role, are listed in the order in which they
are tried.
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
    """A form: its required and optional roles, each with its known column names."""

    form: SchemaForm
    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]]

    @property
    def roles(self) -> set[str]:
        """Every role a record of this form can have."""
        return {*self.required, *self.optional}

    @property
    def kinds(self) -> frozenset[SchemaKind]:
        """Kinds of records that this form can produce."""
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
# Tried before texts if media are read. The last of these names are a text only next to a medium.
INTERLEAVED_RULE = FormRule(
    "interleaved",
    {"text": ("text", "content", "caption", "transcription", "texts")},
    _MEDIA_COLUMNS,
)
COLUMN_ROLES = tuple(dict.fromkeys(role for rule in FORM_RULES for role in (*rule.required, *rule.optional)))


@dataclass(frozen=True, slots=True)
class Schema:
    """Rules for reading the records of one source.

    Attributes:
        form: the form that the columns make together.
        columns: candidate columns of each role; the first with a value wins.
            Required roles have exactly one column.
        description: one line for users, such as ``instruction/output -> 2 turns``.
        late: columns by role that would change the meaning of a record (a label, a mask), if the
            first records have none of that role; a record with such a column is refused.
        mapped: whether a mapping names a required role and thereby decides the form.
        ignored: columns and message keys that are dropped from records before they are read.
        left_out: columns of the roles that a mapping disables (``label=``).
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
        """Kind of the parsed records."""
        if self.form in ("text", "interleaved", "tokens"):
            return self.form
        if self.form == "pair" or "label" in self.columns:
            return "preference"
        return "conversation"
