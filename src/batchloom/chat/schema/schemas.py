"""Schemas: columns, their roles and known names, detection order, ``--map``.

A role is the purpose of a column (``prompt``, ``response``, ``messages`` ...); a form is a set of
roles that makes a record. Forms, and the names of each role, are listed in the order in which they
are tried.

Names inside messages: ``role=speaker,content=utterance`` names keys of messages, ``assistant=bot`` the value that a
role has in the records. Several values of one role are separated by ``|``.
"""

import functools
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import raise_problems, suggest
from batchloom.core.wording import describe_json_type, format_list

Row = Mapping[str, Any]
ColumnLookup = Callable[[Row], Any]

_PATH_PATTERN = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[-?\d+\]|\[\])+")
_STEP_PATTERN = re.compile(r"([^.\[\]]+)|\[(-?\d*)\]")
# Between the texts of a list.
_TEXT_SEPARATOR = "\n"
_MAX_LISTED_COLUMNS = 12
_LABEL_VALUES = {"true": True, "1": True, "false": False, "0": False}

SchemaKind = Literal["text", "interleaved", "segments", "conversation", "preference", "prompt", "tokens"]
SchemaForm = Literal[
    "messages",
    "pair",
    "prompt-completion",
    "instruction",
    "prompt",
    "segments",
    "tokens",
    "interleaved",
    "text",
]
# Kind of the records of each form; a conversation with a label is a preference.
_KIND_BY_FORM: dict[SchemaForm, SchemaKind] = {
    **{form: form for form in get_args(SchemaKind) if form in get_args(SchemaForm)},
    "pair": "preference",
    **dict.fromkeys(("messages", "prompt-completion", "instruction"), "conversation"),
}

# Keys of a message that a mapping can name.
NAMED_KEYS = ("role", "content", "tool_calls", "reasoning_content", "train", "train_detail")
# Roles whose values a mapping can name. ``system`` is the role of a column, so its value has another name.
NAMED_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "developer",
    "system_role": "system",
    "function_call": "function_call",
}
MESSAGE_MAPPING_NAMES = (*NAMED_KEYS, *NAMED_ROLES)
_VALUE_SEPARATOR = "|"
# Keys that other conventions use for the two parts of a message, and values that they use for roles. They are only
# suggested, because a key such as ``text`` may also be something else.
_ROLE_KEYS = ("role", "from", "speaker", "sender", "author", "participant", "actor", "who", "user", "agent")
_CONTENT_KEYS = ("content", "value", "utterance", "text", "message", "msg", "body", "sentence")
ROLE_GUESSES = {
    **dict.fromkeys(("user", "human", "client", "customer", "usr", "person", "prompter"), "user"),
    **dict.fromkeys(("assistant", "bot", "gpt", "chatbot", "model", "ai", "agent", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "tools"), "tool"),
    "system": "system_role",
}

# ``query`` is ms-swift's.
PROMPT_COLUMNS = ("instruction", "prompt", "question", "query")
RESPONSE_COLUMNS = ("response", "output", "answer", "completion", "answers.text[0]")
TURN_COLUMNS = ("messages", "conversations", "conversation")
_SWIFT_REJECTED_COLUMNS = ("rejected_response", "rejected_messages")
CHOSEN_COLUMNS = ("chosen", "chosen_response")
REJECTED_COLUMNS = ("rejected", "rejected_response")
# The prompt of axolotl's pairs (chatml.icr), which is a context next to any other prompt.
LAST_PROMPT_COLUMN = "input"
OPENAI_PROMPT = "input.messages"
MEDIA_COLUMNS: dict[str, tuple[str, ...]] = {
    "images": ("images", "image"),
    "audios": ("audios", "audio"),
    "videos": ("videos", "video"),
}
# Known columns of the roles that are optional in several forms.
_OPTIONAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "context": ("input", "context"),
    "history": ("history",),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "template_args": ("chat_template_kwargs",),
    "label": ("label", "kto_tag"),
    "weight": ("weight",),
    **MEDIA_COLUMNS,
    # ms-swift's images of the rejected side, in place of the images.
    "rejected_images": ("rejected_images",),
}
_FIRST_PATH_STEP = re.compile(r"[^.\[\]]+")


@dataclass(frozen=True, slots=True)
class FormRule:
    """A form: its required and optional roles, each with its known column names.

    Attributes:
        result: the documents that its records become, for the reference of schemas.
    """

    form: SchemaForm
    result: str
    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]]

    @property
    def roles(self) -> set[str]:
        return {*self.required, *self.optional}

    @property
    def kinds(self) -> frozenset[SchemaKind]:
        kind = _KIND_BY_FORM[self.form]
        return frozenset((kind, "preference") if kind == "conversation" else (kind,))


def _list_optional_columns(*roles: str) -> dict[str, tuple[str, ...]]:
    return {role: _OPTIONAL_COLUMNS[role] for role in roles}


_WEIGHT = _list_optional_columns("weight")
_PROMPT_ROLES = _list_optional_columns("system", "tools", "template_args")
_ANSWERS_ROLES = {
    **_list_optional_columns("context", "history"),
    **_PROMPT_ROLES,
    **MEDIA_COLUMNS,
    **_list_optional_columns("rejected_images"),
}
_CONVERSATION_ROLES = {**_PROMPT_ROLES, **_list_optional_columns("label", "weight"), **MEDIA_COLUMNS}
_PAIR_ROLES = {"prompt": PROMPT_COLUMNS, **_ANSWERS_ROLES}
FORM_RULES = (
    # OpenAI's pairs.
    FormRule(
        "pair",
        "a preference pair (OpenAI)",
        {"prompt": (OPENAI_PROMPT,), "chosen": ("preferred_output",), "rejected": ("non_preferred_output",)},
        {"tools": ("input.tools",)},
    ),
    # ms-swift's pairs: a conversation, or a prompt and its response, with the rejected answer.
    FormRule(
        "pair",
        "a preference pair (ms-swift): the rejected answer replaces the turns after the last question",
        {"chosen": TURN_COLUMNS, "rejected": _SWIFT_REJECTED_COLUMNS},
        _PAIR_ROLES,
    ),
    FormRule(
        "pair",
        "a preference pair (ms-swift)",
        {"prompt": PROMPT_COLUMNS, "chosen": RESPONSE_COLUMNS, "rejected": _SWIFT_REJECTED_COLUMNS},
        _ANSWERS_ROLES,
    ),
    FormRule(
        "messages",
        "a conversation",
        {"messages": TURN_COLUMNS},
        _CONVERSATION_ROLES,
    ),
    FormRule(
        "pair",
        "a preference pair of conversations, or of texts if there is nothing else",
        {"chosen": CHOSEN_COLUMNS, "rejected": REJECTED_COLUMNS},
        _PAIR_ROLES,
    ),
    FormRule(
        "prompt-completion",
        "a conversation of a prompt and its completion",
        {"prompt": ("prompt",), "completion": ("completion",)},
        _CONVERSATION_ROLES,
    ),
    FormRule(
        "instruction",
        "a conversation of two turns",
        {"prompt": PROMPT_COLUMNS, "response": RESPONSE_COLUMNS},
        # Tools are read only if they are mapped.
        {**_list_optional_columns("context", "history"), **_CONVERSATION_ROLES, "tools": ()},
    ),
    # axolotl's labelled conversations (kto chatml.argilla_chat).
    FormRule(
        "messages",
        "a conversation (axolotl: a list of messages)",
        {"messages": ("completion",)},
        _CONVERSATION_ROLES,
    ),
    FormRule("segments", "texts that are each trained or not", {"segments": ("segments",)}, _WEIGHT),
    FormRule(
        "tokens",
        "token ids",
        {"input_ids": ("input_ids",)},
        {
            "labels": ("labels",),
            "loss_mask": ("loss_mask",),
            "loss_weights": ("loss_weights", "loss_scale"),
            "attention_mask": ("attention_mask",),
            **_WEIGHT,
        },
    ),
    FormRule("text", "a text", {"text": ("text", "content")}, _WEIGHT),
)
# Forms for --prompts, which reads no answers, and the remedy for records without one.
PROMPTS_REMEDY = "for prompt-only data pass --prompts"
PROMPT_RULES = (
    FormRule(
        "prompt",
        "a prompt",
        {"prompt": ("prompt", "instruction", "question", "problem")},
        {**_list_optional_columns("context", "history"), **_PROMPT_ROLES},
    ),
    FormRule("prompt", "a prompt: the turns up to the last answer", {"messages": TURN_COLUMNS}, _PROMPT_ROLES),
)
# Tried before texts if media are read. The last of these names are a text only next to a medium.
# Only if the answer is mapped: without a prompt it is a text to most readers.
ANSWER_RULE = FormRule(
    "instruction", "an answer without a prompt", {"response": RESPONSE_COLUMNS}, {**_CONVERSATION_ROLES, "tools": ()}
)
INTERLEAVED_RULE = FormRule(
    "interleaved",
    "a text with images or audio, if these are read",
    {"text": ("text", "content", "caption", "transcription", "texts")},
    {**_WEIGHT, **MEDIA_COLUMNS},
)
COLUMN_ROLES = tuple(dict.fromkeys(role for rule in FORM_RULES for role in (*rule.required, *rule.optional)))
ROLE_MEANINGS = {
    "messages": "all turns of a conversation",
    "system": "system turn before all others; must equal one that the conversation has",
    "tools": "tools for the chat template: a list of objects or of their JSON texts, or JSON text of a list",
    "template_args": "variables of the chat template, an object or JSON text of one",
    "prompt": "question, as a text or as messages",
    "context": "appended to the prompt after one newline, unless it is empty",
    "history": "earlier turns, a list of `[prompt, response]` or JSON text of one",
    "response": "answer, as a text",
    "completion": "answer, as a text or as messages; the store records where it begins",
    "chosen": "preferred answer: a text, a message or messages, or the full conversation",
    "rejected": "rejected answer, in the same forms",
    "rejected_images": "images of the rejected answer",
    "label": "true or false, 1 or 0: makes a conversation a good or bad answer (KTO); all records have it, or none",
    "weight": "weight of the loss of the record",
    "labels": "for each token id -100 or the id at the same position",
    "segments": "list of `{text, label}`; each text is tokenized alone and trained if its label is true",
    "input_ids": "token ids",
    "loss_mask": "0 or 1 for each token",
    "loss_weights": "weight of the loss of each token",
    "attention_mask": "0 for padding, which is left out",
    "text": "text",
    "images": "images of the record",
    "audios": "audio of the record",
    "videos": "videos of the record",
}
"""Meaning of each role, for the reference of schemas."""
# Forms without messages.
_FLAT_FORMS = ("text", "interleaved", "tokens")
# Column names that users write in place of a role.
_ROLE_BY_COLUMN = {
    name: role
    for rule in FORM_RULES
    for role, names in (*rule.required.items(), *rule.optional.items())
    for name in names
    if name not in COLUMN_ROLES
}


@dataclass(frozen=True, slots=True)
class MessageNames:
    """Names of the keys and roles of messages in the records of one source.

    Attributes:
        keys: key in the records by the key that templates read.
        roles: role by its value in the records.
    """

    keys: Mapping[str, str]
    roles: Mapping[str, str]

    def occur_in(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message has a role under its name."""
        return any(name in message for name in (self.keys.get("role", "role"), "from"))

    def rename(self, message: Mapping[str, Any], field_path: str) -> dict[str, Any]:
        """Return a message with the keys and roles that templates read.

        Raises:
            UnusableRecordError: the key of the role is missing, or a key occurs under both names.
        """
        renamed = dict(message)
        for key, own_key in self.keys.items():
            value = None if own_key == key else renamed.pop(own_key, None)
            if value is None:
                if key == "role" and renamed.get("role") is None:
                    keys = ", ".join(repr(str(name)) for name in message) or "nothing"
                    raise UnusableRecordError(f"{field_path} has no {own_key!r}: the message has {keys}")
                continue
            if renamed.get(key) is not None:
                raise UnusableRecordError(
                    f"{field_path} has {own_key!r} and {key!r}, and both mean the {key}; leave one of them out with "
                    f"--ignore 'messages[].{key}'"
                )
            renamed[key] = value
        if "role" in self.keys and "content" not in renamed and "value" in renamed:
            renamed["content"] = renamed.pop("value")
        sender_key = "role" if renamed.get("role") is not None else "from"
        sender = renamed.get(sender_key)
        if isinstance(sender, str):
            renamed[sender_key] = self.roles.get(sender, sender)
        return renamed


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
        carried: (name, column) of each column that a prompt carries.
        names: keys and roles of messages that a mapping names; None for the usual ones.
    """

    form: SchemaForm
    columns: dict[str, tuple[str, ...]]
    description: str
    late: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mapped: bool = False
    ignored: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    carried: tuple[tuple[str, str], ...] = ()
    names: MessageNames | None = None

    @property
    def kind(self) -> SchemaKind:
        return "preference" if "label" in self.columns else _KIND_BY_FORM[self.form]


def parse_mapping(text: str) -> dict[str, str]:
    """Parse ``role=column,role=column`` to a dict.

    A column may be a path such as ``answers.text[0]``; an empty one (``context=``) disables the
    role. ``role`` and ``content`` name keys of messages, and ``assistant`` the value of a role.
    Columns whose names hold a comma must be passed to ``detect_schema`` as a dict.

    Raises:
        SettingsError: items that are not role=column, roles that are unknown, repeated, or cannot be
            combined; all problems at once.
    """
    problems: list[str] = []
    mapping: dict[str, str] = {}
    for item in text.split(","):
        role, equals, column = (part.strip() for part in item.partition("="))
        if not equals or not role:
            problems.append(f"map: {item.strip()!r} is not role=column")
        elif role in mapping:
            problems.append(f"map.{role}: named twice, as {mapping[role]!r} and {column!r}")
        else:
            mapping[role] = column
    raise_problems(problems + find_mapping_problems(mapping))
    return mapping


def match_mapping_columns(mapping: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Map to the exact column names where those begin or end with white space."""
    column_names = dict.fromkeys(names)
    name_by_stripped = {name.strip(): name for name in reversed(column_names) if isinstance(name, str)}
    return {
        role: column if role in MESSAGE_MAPPING_NAMES else _match_column(column, column_names, name_by_stripped)
        for role, column in mapping.items()
    }


def _match_column(column: str, column_names: Container[str], name_by_stripped: Mapping[str, str]) -> str:
    if column in column_names or column in name_by_stripped:
        return column if column in column_names else name_by_stripped[column]
    # The first step of a path such as answers.text[0] is a column.
    head = _FIRST_PATH_STEP.match(column)
    if head is None or head[0] in column_names:
        return column
    return name_by_stripped.get(head[0], head[0]) + column[head.end() :]


def find_mapping_problems(mapping: Mapping[str, str]) -> list[str]:
    """Return the problems of a mapping from roles to columns, one sentence each."""
    # In Python a role may be any object.
    roles = ", ".join((*COLUMN_ROLES, *MESSAGE_MAPPING_NAMES))
    problems = [
        f"map.{role}: unknown role{_suggest_role(str(role))}; roles are {roles}"
        for role in mapping
        if role not in COLUMN_ROLES and role not in MESSAGE_MAPPING_NAMES
    ]
    problems += [
        f"map.{role}: {column!r} is not the name of a column"
        for role, column in mapping.items()
        if not isinstance(column, str)
    ]
    if not problems:
        problems = find_name_problems(mapping)
    mapped_roles = {role for role, column in mapping.items() if column and role not in MESSAGE_MAPPING_NAMES}
    rules = [rule for rule in (*FORM_RULES, INTERLEAVED_RULE) if mapped_roles <= rule.roles]
    names = [role for role in mapping if role in MESSAGE_MAPPING_NAMES]
    if not problems and names and rules and all(rule.form in _FLAT_FORMS for rule in rules):
        problems.append(
            f"map.{names[0]}: is a name inside messages, but {', '.join(sorted(mapped_roles))} holds none; leave it out"
        )
    if not problems and not rules:
        problems.append(
            f"map: no record has {', '.join(sorted(mapped_roles))} together; valid combinations are "
            f"{'; or '.join(_find_role_conflicts(mapped_roles))}"
        )
    return problems


def _suggest_role(role: str) -> str:
    hint = suggest(role, [*COLUMN_ROLES, *MESSAGE_MAPPING_NAMES, *_ROLE_BY_COLUMN])
    for name, column_role in _ROLE_BY_COLUMN.items():
        hint = hint.replace(f"{name!r}", f"{column_role!r}")
    return hint


def _find_role_conflicts(mapped_roles: set[str]) -> list[str]:
    return [
        " + ".join((*rule.required, *(f"[{role}]" for role in rule.optional)))
        for rule in FORM_RULES
        if mapped_roles & rule.roles
    ]


def make_message_names(mapping: Mapping[str, str]) -> MessageNames | None:
    """Return the names inside messages of a mapping; None if it has none."""
    keys = {key: mapping[key] for key in NAMED_KEYS if mapping.get(key)}
    roles = {
        value: role for name, role in NAMED_ROLES.items() for value in _split_values(mapping.get(name, "")) if value
    }
    return MessageNames(keys, roles) if keys or roles else None


def find_name_problems(mapping: Mapping[str, str]) -> list[str]:
    """List the problems of the names inside messages, one sentence each."""
    names = {role: value for role, value in mapping.items() if role in MESSAGE_MAPPING_NAMES}
    problems = [
        f"map.{role}: names no {'key' if role in NAMED_KEYS else 'value'} of messages; write one, or leave it out"
        for role, value in names.items()
        if not all(_split_values(value))
    ]
    for group in (NAMED_KEYS, tuple(NAMED_ROLES)):
        pairs = [(value, role) for role in group for value in _split_values(names.get(role, "")) if value]
        first_role = dict(reversed(pairs))
        problems += [
            f"map.{role}: {value!r} is already the name of {first_role[value]}; write each name once"
            for value, role in pairs
            if first_role[value] != role
        ]
    return problems


def _split_values(text: str) -> list[str]:
    return [value.strip() for value in text.split(_VALUE_SEPARATOR)]


def guess_message_names(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """Guess the mapping that reads messages of unknown keys or roles.

    Returns:
        The mapping, empty unless exactly one key can be the role and one the content; and the values of the role
        for which no role is known.
    """
    keys = {key: value for message in messages for key, value in message.items() if isinstance(value, str)}
    role_key = _find_key(keys, _ROLE_KEYS)
    content_key = _find_key(keys, _CONTENT_KEYS)
    if role_key is None or content_key is None:
        return {}, []
    mapping = {
        role: key
        for role, key, known_keys in (("role", role_key, ("role", "from")), ("content", content_key, _CONTENT_KEYS[:2]))
        if key not in known_keys
    }
    values_by_role: dict[str, list[str]] = {}
    for value in dict.fromkeys(message.get(role_key) for message in messages):
        if isinstance(value, str):
            values_by_role.setdefault(ROLE_GUESSES.get(value.lower(), ""), []).append(value)
    unknown_values = values_by_role.pop("", [])
    for role, values in values_by_role.items():
        if values != [NAMED_ROLES[role]]:
            mapping[role] = _VALUE_SEPARATOR.join(values)
    return mapping, unknown_values


def _find_key(keys: Iterable[str], known_keys: Sequence[str]) -> str | None:
    """Return the key that is or resembles a known one; None if none or several do."""
    names = list(keys)
    for known_key in known_keys[:2]:
        if known_key in names:
            return known_key
    similar_keys = [name for name in names if name.lower() in known_keys]
    return similar_keys[0] if len(similar_keys) == 1 else None


@functools.lru_cache(maxsize=1024)
def _parse_path(column: str) -> tuple[str | int | None, ...]:
    """Return the steps of a path such as ``answers.text[0]``; () for a plain name.

    The step ``[]``, which is None, takes all elements of a list.
    """
    if not _PATH_PATTERN.fullmatch(column):
        return ()
    return tuple(name or (int(index) if index else None) for name, index in _STEP_PATTERN.findall(column))


def is_column_path(column: str) -> bool:
    """Return whether a column is a path, unless it is the exact name of one."""
    return bool(_parse_path(column))


def get_column_value(row: Row, column: str) -> Any:
    """Return the value of a column or path, or None; an exact name beats a path.

    A path through all elements of a list gives their texts as lines.
    """
    if column in row or not (steps := _parse_path(column)):
        return row.get(column)
    return _follow_path(row, steps)


def _follow_path(value: Any, steps: Sequence[str | int | None]) -> Any:
    for number, step in enumerate(steps):
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, Mapping) else None
        elif not isinstance(value, list | tuple):
            return None
        elif step is None:
            found = [_follow_path(item, steps[number + 1 :]) for item in value]
            texts = [text for text in found if isinstance(text, str)]
            return _TEXT_SEPARATOR.join(texts) if len(texts) == len(found) else None
        elif -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def make_column_lookup(columns: tuple[str, ...]) -> ColumnLookup:
    """Return a function that maps a row to its first non-empty value of these columns."""
    if not columns:
        return lambda _row: None
    if any(_parse_path(column) for column in columns):
        return lambda row: _first_non_empty(get_column_value(row, column) for column in columns)
    if len(columns) == 1:
        (column,) = columns
        return lambda row: row.get(column)
    names = frozenset(columns)

    def first(row: Row) -> Any:
        return None if names.isdisjoint(row) else _first_non_empty(map(row.get, columns))

    return first


def _first_non_empty(values: Iterable[Any]) -> Any:
    return next((value for value in values if is_non_empty(value)), None)


def is_non_empty(value: Any) -> bool:
    """Return whether a column has a value: null, ``""`` and ``[]`` are empty."""
    return value is not None and not (isinstance(value, str | list) and not value)


def parse_label(value: Any) -> bool | None:
    """Parse a label: true or 1, also as text, is good; None if it is no label."""
    if isinstance(value, str):
        return _LABEL_VALUES.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None


def top_level_columns(columns: Iterable[str]) -> frozenset[str]:
    """Return the top-level names of columns; a row without any of them has none."""
    return frozenset(name for column in columns for name in (column, *map(str, _parse_path(column)[:1])))


def format_columns(columns: Iterable[str]) -> str:
    """Format column names as ``'a', 'b' and 3 more``."""
    return format_list([repr(name) for name in columns], _MAX_LISTED_COLUMNS)


def missing_column_error(row: Row, role: str, column: str) -> UnusableRecordError:
    """Return the error for a record whose column is missing or null."""
    if column in row:
        return UnusableRecordError(f"column {column!r} is null; fill in the {role} or remove the record")
    if not row:
        return UnusableRecordError(f"no column {column!r}: the record is empty")
    if (head := (_parse_path(column) or (column,))[0]) in row:
        return UnusableRecordError(
            f"no value at {column!r}: column {head!r} holds {describe_json_type(row[str(head)])} without it; fill it "
            f"in or name another column with --map {role}=..."
        )
    hint = suggest(column, row) or f"; name the one that holds the {role} with --map {role}=..."
    return UnusableRecordError(f"no column {column!r}: the record has {format_columns(row)}{hint}")
