"""Readers of prompts, answers, and their context: system prompt and tools."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from batchloom.chat.schema.record_columns import (
    ColumnLookup,
    Row,
    get_column_value,
    is_non_empty,
    make_column_lookup,
    missing_column_error,
    top_level_columns,
)
from batchloom.chat.schema.record_keys import list_messages
from batchloom.chat.schema.schemas import Schema
from batchloom.chat.schema.turns import Turns, is_empty_text, read_tools, read_turns
from batchloom.core.conversation import Conversation
from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import BYTES_REMEDY, describe_json_type

_MESSAGES_PATTERN = re.compile(r"\s*\[\s*\{")
NO_TURNS: Turns = ([], [])
_MEDIA_ROLES = frozenset({"images", "image", "videos", "video", "audios", "audio"})


@final
@dataclass(frozen=True, slots=True)
class RoleColumn:
    """Columns of one role and their lookup; empty for a role that the schema lacks."""

    role: str
    names: tuple[str, ...]
    get: ColumnLookup

    @classmethod
    def from_schema(cls, schema: Schema, role: str) -> "RoleColumn":
        """Return the columns of a schema for this role."""
        names = schema.columns.get(role, ())
        return cls(role, names, make_column_lookup(names))

    def name(self, row: Row, value: Any) -> str:
        """Return the name of the column that holds this value of the record."""
        return next((n for n in self.names if get_column_value(row, n) is value), self.names[0])


def make_prompt_reader(schema: Schema) -> Callable[[Row], Turns]:
    """Return a reader of the turns before the answer: history, prompt and context."""
    prompt, context = (
        RoleColumn.from_schema(schema, "prompt"),
        RoleColumn.from_schema(schema, "context"),
    )
    history = RoleColumn.from_schema(schema, "history")
    get_prompt, get_context, get_history = prompt.get, context.get, history.get
    extra_columns = top_level_columns((*context.names, *history.names))

    def asked(row: Row) -> Turns:
        value = get_prompt(row)
        turns = make_turns(row, prompt, value, "user")
        if extra_columns.isdisjoint(row):
            return turns
        context_value = get_context(row)
        if is_non_empty(context_value):
            if not isinstance(context_value, str):
                raise not_text_error(row, context, context_value)
            if not isinstance(value, str):
                raise UnusableRecordError(
                    f"column {context.name(row, context_value)!r} cannot join a prompt that is a list of messages; "
                    "leave it out with --map context="
                )
            if not is_empty_text(context_value):
                turns = [{"role": "user", "content": f"{value}\n{context_value}"}], []
        history_value = get_history(row)
        if not is_non_empty(history_value):
            return turns
        return concat_turns((_parse_history(history_value, history.name(row, history_value)), []), turns)

    return asked


def _parse_history(value: Any, name: str) -> list[dict[str, Any]]:
    """Parse LLaMA-Factory's ``history``, a list of [prompt, response]."""
    turns = []
    for number, exchange in enumerate(value if isinstance(value, list) else [value]):
        if not (
            isinstance(exchange, list | tuple)
            and len(exchange) == 2
            and all(isinstance(text, str) and not is_empty_text(text) for text in exchange)
        ):
            raise UnusableRecordError(
                f"{name}[{number}] is not a list of two texts, a prompt and its response; "
                "leave the column out with --map history="
            )
        turns += [
            {"role": "user", "content": exchange[0]},
            {"role": "assistant", "content": exchange[1]},
        ]
    return turns


def parse_messages(value: Any) -> Any:
    """Parse JSON text of messages, as in CSV and Parquet; keep other values."""
    if not isinstance(value, str) or not _MESSAGES_PATTERN.match(value):
        return value
    messages = list_messages(value)
    well_formed = messages and all(
        isinstance(message.get("role", message.get("from")), str) and {"content", "value"} & message.keys()
        for message in messages
    )
    return messages if well_formed else value


def parse_json_messages(row: Row, required_columns: tuple[str, ...], optional_column: str = "") -> Row:
    """Parse JSON text of messages in a record if all required columns hold it.

    A single column may be a text that happens to be JSON. The optional column is parsed along with them.
    """
    values = {name: get_column_value(row, name) for name in required_columns}
    parsed = {name: parse_messages(value) for name, value in values.items()}
    if any(not isinstance(parsed[name], list) for name in required_columns) or parsed == values:
        return row
    if optional_column:
        parsed[optional_column] = parse_messages(get_column_value(row, optional_column))
    return {**row, **parsed}


def make_turns(row: Row, column: RoleColumn, value: Any, role: str) -> Turns:
    """Return a text as one turn of ``role``; a message or list of messages unchanged."""
    if isinstance(value, str):
        if is_empty_text(value):
            require_text(row, column, value)
        return [{"role": role, "content": value}], []
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return read_turns(value, column.name(row, value))
    raise not_text_error(row, column, value)


def require_text(row: Row, column: RoleColumn, value: str) -> str:
    """Return the text; raise if it is empty."""
    if is_empty_text(value):
        consequence = "the prompt would be empty" if column.role == "prompt" else "there would be nothing to train"
        raise UnusableRecordError(
            f"column {column.name(row, value)!r} is empty: {consequence}; fill it in or remove the record"
        )
    return value


def not_text_error(row: Row, column: RoleColumn, value: Any) -> UnusableRecordError:
    """Return the error for a column that is missing or does not hold text."""
    if value is None:
        return missing_column_error(row, column.role, column.names[0])
    remedy = BYTES_REMEDY if isinstance(value, bytes) else "write it as a string"
    return UnusableRecordError(
        f"column {column.name(row, value)!r} holds {describe_json_type(value)}, not text; "
        f"{remedy} or name another column with --map {column.role}=..."
    )


def require_answer(turns: Turns, name: str) -> None:
    """Raise if no turn is the assistant's."""
    for message in reversed(turns[0]):
        if message["role"] == "assistant":
            return
    raise UnusableRecordError(f"column {name!r} has no assistant turn: there would be nothing to train")


@final
@dataclass(frozen=True, slots=True)
class ConversationContext:
    """System and tools columns that surround the turns of a conversation."""

    system: RoleColumn
    tools: RoleColumn
    heads: frozenset[str]

    @classmethod
    def from_schema(cls, schema: Schema) -> "ConversationContext":
        system, tools = (
            RoleColumn.from_schema(schema, "system"),
            RoleColumn.from_schema(schema, "tools"),
        )
        return cls(system, tools, _MEDIA_ROLES | top_level_columns((*system.names, *tools.names)))

    def conversation(
        self, row: Row, before: Turns, after: Turns = NO_TURNS, *, completion: bool = False
    ) -> Conversation:
        """Return system, ``before`` and ``after``; a completion begins at ``after``."""
        messages, trained = concat_turns(before, after) if after[0] else before
        start = len(before[0])
        tools = None
        if not self.heads.isdisjoint(row):
            _check_no_media(row)
            extended_messages = self._prepend_system(row, messages)
            if extended_messages is not messages:
                messages, start = extended_messages, start + 1
                trained = [None, *trained] if trained else trained
            if (value := self.tools.get(row)) is not None:
                tools = read_tools(value, self.tools.name(row, value))
        return Conversation(messages, tools, trained, start if completion else None)

    def _prepend_system(self, row: Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages after the system column's; the same list if it adds nothing."""
        system = self.system.get(row)
        if not is_non_empty(system):
            return messages
        if not isinstance(system, str):
            raise not_text_error(row, self.system, system)
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": system}, *messages]
        if messages[0]["content"] == system:
            return messages
        name = self.system.name(row, system)
        raise UnusableRecordError(
            f"column {name!r} and the {messages[0]['role']} turn of the conversation differ; "
            "leave the column out with --map system="
        )


def concat_turns(before: Turns, after: Turns) -> Turns:
    (first, first_flags), (second, second_flags) = before, after
    if not (first_flags or second_flags):
        return first + second, []
    return first + second, [
        *(first_flags or [None] * len(first)),
        *(second_flags or [None] * len(second)),
    ]


def _check_no_media(row: Row) -> None:
    for name in sorted(_MEDIA_ROLES & row.keys()):
        if is_non_empty(row[name]):
            raise UnusableRecordError(
                f"column {name!r} is not empty: images and audio need --processor and are not supported in "
                "preferences; without that column only the text is trained"
            )
