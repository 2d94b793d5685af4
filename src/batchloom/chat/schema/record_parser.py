"""Parsers of records: texts, conversations, preferences, prompts and token ids."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.chat.schema.record_keys import (
    TURN_ROLES,
    check_keys,
    decode_items,
    drop_keys,
    list_messages,
    remove_nulls,
    rename_messages,
    unsupported_columns,
)
from batchloom.chat.schema.record_media import (
    MediaExtractor,
    is_extracted_medium,
    parse_medium,
    reorder_media,
)
from batchloom.chat.schema.schemas import (
    COLUMN_ROLES,
    FORM_RULES,
    MEDIA_COLUMNS,
    PROMPTS_REMEDY,
    TURN_COLUMNS,
    Row,
    Schema,
    SchemaForm,
    format_columns,
    get_column_value,
    is_non_empty,
    make_column_lookup,
    missing_column_error,
    parse_label,
    top_level_columns,
)
from batchloom.chat.schema.turns import (
    ASKING_ROLES,
    Turns,
    is_empty_text,
    read_segment_weight,
    read_tools,
    read_turns,
)
from batchloom.chat.templates.template_arguments import read_template_arguments
from batchloom.core.document import (
    CarryingPrompt,
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
    SegmentedText,
    WeightedText,
)
from batchloom.core.errors import UnusableRecordError
from batchloom.core.loss_weights import (
    MAX_LOSS_WEIGHT,
    LossFlags,
    parse_loss_weight,
)
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumKind
from batchloom.core.wording import BYTES_REMEDY, describe_json_type, format_count

# Roles that no form needs.
_OPTIONAL_ROLES = frozenset(role for rule in FORM_RULES for role in rule.optional) - frozenset(
    role for rule in FORM_RULES for role in rule.required
)
_MESSAGES_PATTERN = re.compile(r"\s*\[\s*\{")
_OBJECT_PATTERN = re.compile(r"\s*\{\s*\"")
_MEDIA_COLUMNS = frozenset(name for names in MEDIA_COLUMNS.values() for name in names)
_LEADING_ROLES = ("system", "developer")
# The name under which a prompt carries its messages.
_PROMPT_FIELD = "prompt"
# Separates consecutive texts of a list, which are paragraphs of a page.
_PARAGRAPH_SEPARATOR = "\n\n"
_IGNORED_LABEL = -100
_NO_TURNS: Turns = ([], [])
Number = TypeVar("Number", np.int64, np.float64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """A document that needs no tokenizer.

    Attributes:
        ids: token ids, int64, shape [tokens].
        flags: loss flags of the tokens.
    """

    ids: NDArray[np.int64]
    flags: LossFlags


Document = (
    str
    | InterleavedText
    | SegmentedText
    | Conversation
    | PreferencePair[Conversation | str]
    | LabelledConversation
    | CarryingPrompt
    | TokenRow
)
ParsedRecord = Document | WeightedText
RecordReader = Callable[[Row], ParsedRecord]
ConversationReader = Callable[[Row], Conversation]


def make_record_reader(
    schema: Schema,
    *,
    media: bool = False,
    has_text_numbers: bool = False,
    has_inserted_nulls: bool = False,
    default_system: str | None = None,
) -> RecordReader:
    """Return the record parser of a schema.

    The parser keeps all turns, and every value unchanged: numbers are never converted to text. It
    raises UnusableRecordError, with the position in the record and a remedy, for a record without
    prompt or answer, with values that are not text, with unknown roles, or with
    media that are disabled, misplaced or invalid.

    Args:
        schema: schema of the records.
        media: whether conversations may hold images, audio and video.
        has_text_numbers: whether the source writes numbers as text, as CSV does.
        has_inserted_nulls: whether the source adds null values to messages and tools, as Arrow does.
        default_system: system prompt of conversations that have none; None adds none.
    """
    return SchemaReader(
        schema,
        media=media,
        has_text_numbers=has_text_numbers,
        has_inserted_nulls=has_inserted_nulls,
        default_system=default_system,
    ).read


@final
class RoleColumn:
    """Columns of one role and their lookup; empty for a role that the schema lacks."""

    def __init__(self, schema: Schema, role: str) -> None:
        self.role = role
        self.names = schema.columns.get(role, ())
        self.get = make_column_lookup(self.names)

    def name(self, row: Row, value: Any) -> str:
        """Return the name of the column that holds this value of the record."""
        return next((n for n in self.names if get_column_value(row, n) is value), self.names[0])


@final
class SchemaReader:
    """Reader of the records of one schema."""

    def __init__(
        self,
        schema: Schema,
        *,
        media: bool,
        has_text_numbers: bool = False,
        has_inserted_nulls: bool = False,
        default_system: str | None = None,
    ) -> None:
        self._schema = schema
        self._media = media
        self._has_text_numbers = has_text_numbers
        self._default_system = default_system
        self._columns = {role: RoleColumn(schema, role) for role in COLUMN_ROLES}
        # Without any of these columns, a record needs fewer steps.
        self._prompt_columns = self._list_top_level_columns("context", "history")
        self._outer_columns = _MEDIA_COLUMNS | self._list_top_level_columns(
            "system", "tools", "template_args", "rejected_images"
        )
        self._late = {name: role for role, names in schema.late.items() for name in names}
        self._unsupported = unsupported_columns(schema)
        self._refused_columns = frozenset((*self._late, *self._unsupported))
        self._turn_columns = [name for role in TURN_ROLES for name in schema.columns.get(role, ())]
        self._nested_columns = top_level_columns(self._turn_columns) | self._list_top_level_columns("tools")
        self._has_inserted_nulls = has_inserted_nulls
        read_conversation = self._read_labelled if "label" in schema.columns else self._read_conversation
        readers: dict[SchemaForm, RecordReader] = {
            "text": self._read_text,
            "interleaved": self._read_interleaved,
            "segments": lambda row: read_segments(row, schema.columns["segments"][0]),
            "tokens": lambda row: read_token_row(row, schema.columns),
            "pair": self._read_media_pair if media else self._read_pair,
            "prompt": self._read_carrying_prompt,
        }
        self._read_form = readers.get(schema.form, read_conversation)
        self._turn_readers: dict[SchemaForm, ConversationReader] = {
            "messages": self._read_messages,
            "prompt-completion": self._read_completion,
            "instruction": self._read_instruction,
        }

    def _list_top_level_columns(self, *roles: str) -> frozenset[str]:
        return top_level_columns(name for role in roles for name in self._columns[role].names)

    def read(self, row: Row) -> ParsedRecord:
        """Parse a record; see :func:`make_record_reader`."""
        for name in self._nested_columns.intersection(row):
            value = remove_nulls(row[name]) if self._has_inserted_nulls else row[name]
            # Nulls in JSON were written by someone.
            value = decode_items(value)
            if value is not row[name]:
                row = {**row, name: value}
        if self._schema.ignored:
            row = drop_keys(row, self._schema.ignored, (*self._turn_columns, *self._columns["segments"].names))
        if self._schema.names is not None:
            row = rename_messages(row, self._schema.names, self._turn_columns)
        if not self._refused_columns.isdisjoint(row):
            self._check_form(row)
            check_keys(row, self._unsupported)
            _check_no_late_columns(row, self._late)
        record = self._read_form(row)
        weight = self._columns["weight"].get(row)
        return _weigh_record(record, self._parse_weight(row, weight)) if is_non_empty(weight) else record

    def _check_form(self, row: Row) -> None:
        """Refuse a record that has no column of the schema, for which no option helps."""
        read = top_level_columns(name for names in self._schema.columns.values() for name in names)
        if read.isdisjoint(row):
            raise UnusableRecordError(
                f"the record has {format_columns(row)}, and the first records were {self._schema.description}: give "
                "the records of each form a file of their own"
            )

    def _parse_weight(self, row: Row, value: Any) -> float:
        if self._has_text_numbers and isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        name = self._columns["weight"].name(row, value)
        return parse_loss_weight(value, f"column {name!r}", "; leave any other column out with --map weight=")

    def _read_text(self, row: Row) -> str:
        column = self._columns["text"]
        value = column.get(row)
        if isinstance(value, str):
            return value
        raise not_text_error(row, column, value)

    def _read_conversation(self, row: Row) -> Conversation:
        read_turns = self._turn_readers[self._schema.form]
        if not self._media:
            return read_turns(row)
        extractor = MediaExtractor(self._schema, row)
        conversation = read_turns(extractor.extract_row())
        extractor.check_all_used()
        return reorder_media(conversation, extractor.media)

    def _read_messages(self, row: Row) -> Conversation:
        column = self._columns["messages"]
        value = column.get(row)
        name = column.names[0]
        if value is None:
            raise missing_column_error(row, "messages", name)
        turns = read_turns(value, name)
        require_answer(turns, name)
        return self._build_conversation(row, turns)

    def _read_instruction(self, row: Row) -> Conversation:
        has_prompt = bool(self._columns["prompt"].names)
        response = self._columns["response"]
        prompt = self._read_prompt(row) if has_prompt else _NO_TURNS
        answer = make_turns(row, response, response.get(row), "assistant")
        require_answer(answer, response.names[0])
        return self._build_conversation(row, prompt, answer, completion=not has_prompt)

    def _read_completion(self, row: Row) -> Conversation:
        prompt_column = self._columns["prompt"]
        completion = self._columns["completion"]
        row = parse_json_messages(row, (prompt_column.names[0], completion.names[0]))
        prompt = make_turns(row, prompt_column, prompt_column.get(row), "user")
        answer = make_turns(row, completion, completion.get(row), "assistant")
        require_answer(answer, completion.names[0])
        return self._build_conversation(row, prompt, answer, completion=True)

    def _read_prompt(self, row: Row) -> Turns:
        """Return the turns before the answer: history, prompt and context."""
        prompt_column = self._columns["prompt"]
        context_column = self._columns["context"]
        prompt = prompt_column.get(row)
        if prompt_column.names[0] in TURN_COLUMNS:
            prompt = parse_messages(prompt)
        if self._prompt_columns.isdisjoint(row):
            return make_turns(row, prompt_column, prompt, "user")
        context = context_column.get(row)
        if isinstance(context, str) and prompt in (None, "") and not is_empty_text(context):
            # Alpaca's instruction may be empty if the input is the prompt.
            prompt = context
            context = None
        turns = make_turns(row, prompt_column, prompt, "user")
        if is_non_empty(context):
            if not isinstance(context, str):
                raise not_text_error(row, context_column, context)
            if not isinstance(prompt, str):
                raise UnusableRecordError(
                    f"column {context_column.name(row, context)!r} cannot join a prompt that is a list of messages; "
                    "leave it out with --map context="
                )
            if not is_empty_text(context):
                turns = [{"role": "user", "content": f"{prompt}\n{context}"}], []
        history_column = self._columns["history"]
        history = history_column.get(row)
        if not is_non_empty(history):
            return turns
        return concat_turns((_parse_history(history, history_column.name(row, history)), []), turns)

    def _build_conversation(
        self, row: Row, before: Turns, after: Turns = _NO_TURNS, *, completion: bool = False
    ) -> Conversation:
        """Return system, ``before`` and ``after``; a completion begins at ``after``."""
        messages, trained = concat_turns(before, after) if after[0] else before
        start = len(before[0])
        tools = None
        arguments = None
        has_outer_columns = not self._outer_columns.isdisjoint(row)
        if has_outer_columns or self._default_system:
            extended_messages = self._prepend_system(row, messages)
            if extended_messages is not messages:
                messages = extended_messages
                start += 1
                trained = [None, *trained] if trained else trained
        if has_outer_columns:
            _check_no_media(row, self._schema)
            column = self._columns["tools"]
            if (value := column.get(row)) is not None:
                tools = read_tools(value, column.name(row, value))
            column = self._columns["template_args"]
            if (value := column.get(row)) is not None:
                arguments = read_template_arguments(value, column.name(row, value))
        return Conversation(messages, tools, trained, start if completion else None, template_args=arguments)

    def _prepend_system(self, row: Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages after a system turn; the same list if none is added."""
        column = self._columns["system"]
        system = column.get(row)
        if not is_non_empty(system):
            if self._default_system is None or messages[0]["role"] in _LEADING_ROLES:
                return messages
            return [{"role": "system", "content": self._default_system}, *messages]
        if not isinstance(system, str):
            raise not_text_error(row, column, system)
        if messages[0]["role"] not in _LEADING_ROLES:
            return [{"role": "system", "content": system}, *messages]
        if messages[0]["content"] == system:
            return messages
        name = column.name(row, system)
        raise UnusableRecordError(
            f"column {name!r} and the {messages[0]['role']} turn of the conversation differ; "
            "leave the column out with --map system="
        )

    def _read_labelled(self, row: Row) -> LabelledConversation:
        column = self._columns["label"]
        label = column.get(row)
        name = column.names[0]
        if label is None:
            raise missing_column_error(row, "label", name)
        good = parse_label(label)
        if good is None:
            label_text = repr(label) if isinstance(label, int | float | str) else describe_json_type(label)
            raise UnusableRecordError(
                f"column {name!r} holds {label_text:.40}, not true (good) or false (bad); if it is not a "
                "preference label, leave it out with --map label="
            )
        conversation = self._read_conversation(row)
        if conversation.completion is None:
            # The label rates the last turn.
            last = len(conversation.messages) - 1
            role = conversation.messages[last]["role"]
            if role != "assistant":
                raise UnusableRecordError(
                    f"the conversation ends with a {role} turn, but a label belongs to the answer at the end; remove "
                    "the turns after that answer"
                )
            conversation = replace(conversation, completion=last)
        return LabelledConversation(conversation, good)

    def _read_media_pair(self, row: Row) -> PreferencePair[Conversation | str]:
        """Return the preference pair of a record, each side with its own media."""
        pair = self._read_placed_pair(row)
        column = self._columns["rejected_images"]
        rejected_images = column.get(row)
        if not is_non_empty(rejected_images):
            return pair
        names = self._schema.columns.get("images", ())
        if not names:
            raise UnusableRecordError(f"column {column.names[0]!r} is not empty, but --map images= leaves images out")
        # As in ms-swift, they replace the images of the prompt, too.
        other_images = {**dict.fromkeys(names), names[0]: rejected_images}
        return PreferencePair(pair.chosen, self._read_placed_pair({**row, **other_images}).rejected)

    def _read_placed_pair(self, row: Row) -> PreferencePair[Conversation | str]:
        extractor = MediaExtractor(self._schema, row)
        pair = self._read_pair(extractor.extract_row())
        extractor.check_all_used()
        sides = [
            reorder_media(side, extractor.media) if isinstance(side, Conversation) else side
            for side in (pair.chosen, pair.rejected)
        ]
        return PreferencePair(*sides)

    def _read_pair(self, row: Row) -> PreferencePair[Conversation | str]:
        """Return the preference pair of a record.

        Without a prompt column the common leading turns are the prompt. Two texts stay two texts, because
        nothing marks the end of the prompt in them. An answer is a text, a message, a list of messages,
        or the complete conversation with the prompt.
        """
        chosen = self._columns["chosen"]
        rejected = self._columns["rejected"]
        names = chosen.names[0], rejected.names[0]
        prompt_names = self._columns["prompt"].names
        row = parse_json_messages(row, names, next(iter(prompt_names), ""))
        good = chosen.get(row)
        bad = rejected.get(row)
        if good == bad and good is not None:
            raise UnusableRecordError(f"columns {names[0]!r} and {names[1]!r} are equal: there is no preference")
        # A column of turns may hold JSON text while the other side is plain text.
        turns_only = names[0] in TURN_COLUMNS
        if not prompt_names and isinstance(good, str) and isinstance(bad, str) and not turns_only:
            pair = require_text(row, chosen, good), require_text(row, rejected, bad)
            for name, text in zip(names, pair, strict=True):
                _refuse_object_text(text, name)
            if good.lstrip()[0] != bad.lstrip()[0]:
                raise _missing_prompt_error(names)
            return PreferencePair(*pair)
        prompt = self._read_prompt(row) if prompt_names else None
        if turns_only and good is not None:
            best = read_turns(good, names[0])
        else:
            best = make_turns(row, chosen, good, "assistant")
        turns = best, make_turns(row, rejected, bad, "assistant")
        if prompt is None and len(best[0]) > 1 and (isinstance(bad, str) or turns_only) and not _has_user(turns[1]):
            # As in ms-swift, a rejected answer replaces all turns after the last question.
            prompt, good_end = _split_after_last_user(best, names)
            turns = good_end, turns[1]
        if prompt is None:
            prompt, turns = _split_common_prompt(turns, names)
        ends = [_split_answer(prompt, end, name) for end, name in zip(turns, names, strict=True)]
        return PreferencePair(*(self._build_conversation(row, *end, completion=True) for end in ends))

    def _read_carrying_prompt(self, row: Row) -> CarryingPrompt:
        """Return the turns before the last answer, and the carried columns."""
        column = self._columns["prompt"]
        if column.names:
            turns = self._read_prompt(parse_json_messages(row, (column.names[0],)))
        else:
            column = self._columns["messages"]
            value = column.get(row)
            if value is None:
                raise missing_column_error(row, "messages", column.names[0])
            turns = _cut_answer(read_turns(value, column.names[0]))
        role = turns[0][-1]["role"] if turns[0] else "none"
        if role not in ASKING_ROLES:
            raise UnusableRecordError(
                f"the prompt in column {column.names[0]!r} ends with a turn of the role {role}: a prompt ends with a "
                "turn of the user, or with the result of a tool"
            )
        conversation = self._build_conversation(row, (turns[0], []), completion=True)
        fields = {name: _get_carried(row, column_name) for name, column_name in self._schema.carried}
        return CarryingPrompt(conversation, _encode_fields({_PROMPT_FIELD: conversation.messages, **fields}))

    def _read_interleaved(self, row: Row) -> InterleavedText:
        """Return a text with media.

        Three layouts are read: a string with placeholders (``<image>``) and media columns, a list of typed parts, or
        parallel lists of texts and media; exactly one has a value at each index (OBELICS). In a string without
        placeholders all media come first.
        """
        column = self._columns["text"]
        value = column.get(row)
        name = column.names[0]
        if isinstance(value, list) and not any(isinstance(item, Mapping) for item in value):
            return _merge_parallel_lists(self._schema, row, value, name)
        extractor = MediaExtractor(self._schema, row)
        if isinstance(value, str) and not extractor.has_placeholder(value):
            parts: list[Any] = [*extractor.extract_leading(), {"type": "text", "text": value}]
        elif isinstance(value, str | list):
            parts = extractor.extract_content(value, name)
        elif value is None and (count := len(extractor.extract_leading())):
            media = "a medium" if count == 1 else f"{count:,} media"
            raise UnusableRecordError(
                f"holds {media} and no text in column {name!r}; write its text there, or leave the record out"
            )
        else:
            raise not_text_error(row, column, value)
        extractor.check_all_used()
        return _merge_parts(parts, extractor.media, name)


def _cut_answer(turns: Turns) -> Turns:
    """Return the turns without an answer at their end."""
    messages, flags = turns
    stop = len(messages)
    while stop and messages[stop - 1]["role"] == "assistant":
        stop -= 1
    return messages[:stop], flags[:stop]


def _get_carried(row: Row, column: str) -> Any:
    """Return the value of a carried column, which may be null but not missing."""
    value = get_column_value(row, column)
    if value is None and column not in row:
        raise missing_column_error(row, "value", column)
    return value


def _encode_fields(fields: Mapping[str, Any]) -> bytes:
    """Return the fields of a document as JSON; the values keep their types."""
    return b"{%s}" % b",".join(_encode_field(name, value) for name, value in fields.items())


def _encode_field(name: str, value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_list, separators=(",", ":"))
        return json.dumps(name).encode() + b":" + text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableRecordError(
            f"column {name!r} holds {describe_json_type(value)} that JSON cannot hold ({error}); write texts, finite "
            "numbers, true, false, lists or objects"
        ) from None


def _as_list(value: object) -> Any:
    """Convert the arrays that table readers return."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON type")


def _check_no_late_columns(row: Row, roles: Mapping[str, str]) -> None:
    """Refuse columns that change the meaning of a record and are new to the source."""
    for name, role in roles.items():
        if is_non_empty(row.get(name)):
            raise UnusableRecordError(
                f"column {name!r} holds {describe_json_type(row[name])} where the first records have no "
                f"value: put such records into a separate file, or leave the column out with --map {role}="
            )


def _parse_history(value: Any, name: str) -> list[dict[str, Any]]:
    """Parse ``history``: [prompt, response] lists, or JSON text of them."""
    turns = []
    if isinstance(value, str):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
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
        turns += [{"role": "user", "content": exchange[0]}, {"role": "assistant", "content": exchange[1]}]
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


def _refuse_object_text(text: str, column: str) -> None:
    """Refuse JSON text of an object with messages, which would be trained as it is."""
    if not _OBJECT_PATTERN.match(text):
        return
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(text)
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            raise UnusableRecordError(
                f"column {column!r} holds the JSON text of an object with {', '.join(map(str, value))}: write its "
                f"messages in column {column!r}, and its tools in a column of their own"
            )


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
        remedy = f"; {PROMPTS_REMEDY}" if column.role in ("response", "completion") else ""
        raise UnusableRecordError(
            f"column {column.name(row, value)!r} is empty: {consequence}; fill it in or remove the record{remedy}"
        )
    return value


def not_text_error(row: Row, column: RoleColumn, value: Any) -> UnusableRecordError:
    """Return the error for a column that is missing or does not hold text."""
    if value is None:
        return missing_column_error(row, column.role, column.names[0])
    remedy = BYTES_REMEDY if isinstance(value, bytes) else "write it as a string"
    other = (
        f"leave it out with --map {column.role}="
        if column.role in _OPTIONAL_ROLES
        else f"name another column with --map {column.role}=..."
    )
    return UnusableRecordError(
        f"column {column.name(row, value)!r} holds {describe_json_type(value)}, not text; {remedy} or {other}"
    )


def require_answer(turns: Turns, name: str) -> None:
    """Raise if no turn is the assistant's."""
    for message in reversed(turns[0]):
        if message["role"] == "assistant":
            return
    raise UnusableRecordError(f"column {name!r} has no answer to train on; {PROMPTS_REMEDY}")


def concat_turns(before: Turns, after: Turns) -> Turns:
    (first, first_flags), (second, second_flags) = before, after
    if not (first_flags or second_flags):
        return first + second, []
    return first + second, [*(first_flags or [None] * len(first)), *(second_flags or [None] * len(second))]


_NO_PROCESSOR = "images and audio need --processor; without that column only the text is trained"
_MEDIA_REFUSALS: dict[str, str] = {
    "prompt": "prompts are rendered without images and audio; carry them for the trainer with --carry {0}, or leave "
    "them out with --ignore {0}",
}


def _check_no_media(row: Row, schema: Schema) -> None:
    names = {*_MEDIA_COLUMNS, *schema.columns.get("rejected_images", ())}.difference(dict(schema.carried).values())
    for name in sorted(names & row.keys()):
        if is_non_empty(row[name]):
            reason = _MEDIA_REFUSALS.get(schema.kind, _NO_PROCESSOR).format(name)
            raise UnusableRecordError(f"column {name!r} is not empty: {reason}")


def _has_user(turns: Turns) -> bool:
    return any(message["role"] == "user" for message in turns[0])


def _split_after_last_user(turns: Turns, names: tuple[str, str]) -> tuple[Turns, Turns]:
    """Split a conversation after its last question."""
    messages, flags = turns
    start = len(messages)
    while start and messages[start - 1]["role"] != "user":
        start -= 1
    if not start:
        raise _missing_prompt_error(names)
    return (messages[:start], flags[:start]), (messages[start:], flags[start:])


def _split_common_prompt(turns: tuple[Turns, Turns], names: tuple[str, str]) -> tuple[Turns, tuple[Turns, Turns]]:
    """Split two conversations into their common leading turns and their endings."""
    (good, good_flags), (bad, bad_flags) = turns
    common_length = 0
    while common_length < min(len(good), len(bad)) and good[common_length] == bad[common_length]:
        common_length += 1
    if not _has_user((good[:common_length], [])):
        raise _missing_prompt_error(names)
    return (
        (good[:common_length], good_flags[:common_length]),
        ((good[common_length:], good_flags[common_length:]), (bad[common_length:], bad_flags[common_length:])),
    )


def _missing_prompt_error(names: tuple[str, str]) -> UnusableRecordError:
    return UnusableRecordError(
        f"columns {names[0]!r} and {names[1]!r} do not begin with the same prompt; "
        "name the column that holds it with --map prompt=..."
    )


def _split_answer(prompt: Turns, end: Turns, name: str) -> tuple[Turns, Turns]:
    """Return prompt and answer, removing the prompt from an answer that repeats it."""
    require_answer(end, name)
    (prompt_messages, _), (messages, flags) = prompt, end
    first = messages[0]["role"]
    # A complete conversation may begin with a system turn that the prompt column lacks.
    for stop in (len(prompt_messages), len(prompt_messages) + 1 if first in _LEADING_ROLES else 0):
        if 0 < stop < len(messages) and messages[stop - len(prompt_messages) : stop] == prompt_messages:
            return (messages[:stop], flags[:stop]), (messages[stop:], flags[stop:])
    if first in (*_LEADING_ROLES, "user") and any(message["role"] == "user" for message in prompt_messages):
        raise UnusableRecordError(
            f"column {name!r} begins with a {first} turn and not with the prompt; "
            "where it holds whole conversations leave the prompt out with --map prompt="
        )
    return prompt, end


def _merge_parts(parts: Sequence[Any], media: list[Medium], name: str) -> InterleavedText:
    texts = [""]
    ordered = []
    for part in parts:
        if is_extracted_medium(part):
            ordered.append(media[part["medium"]])
            texts.append("")
        elif isinstance(part, str):
            texts[-1] += part
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts[-1] += part["text"]
        else:
            description = (
                f"a part of type {part.get('type')!r:.40}" if isinstance(part, dict) else describe_json_type(part)
            )
            raise UnusableRecordError(
                f"column {name!r} holds {description}, which is neither text nor a medium; leave it out"
            )
    return InterleavedText(texts, ordered)


def _merge_parallel_lists(schema: Schema, row: Row, texts: Sequence[Any], name: str) -> InterleavedText:
    """Merge parallel lists; at most one of them has a value at each index."""
    media_lists = _read_media_lists(schema, row, name, len(texts))
    merged_text = InterleavedText([""])
    follows_text = False
    for index, text in enumerate(texts):
        filled_lists = [media_list for media_list in media_lists if is_non_empty(media_list[2][index])]
        if len(filled_lists) + is_non_empty(text) > 1:
            names = [*([name] if is_non_empty(text) else []), *(column for _, column, _ in filled_lists)]
            raise UnusableRecordError(
                f"index {index} has a value in each of {' and '.join(names)}: write null in all lists but one"
            )
        if filled_lists:
            kind, column, values = filled_lists[0]
            merged_text.media.append(parse_medium(kind, values[index], f"{column}[{index}]"))
            merged_text.texts.append("")
        elif is_non_empty(text):
            if not isinstance(text, str):
                raise UnusableRecordError(f"{name}[{index}] holds {describe_json_type(text)}, not text")
            merged_text.texts[-1] += _PARAGRAPH_SEPARATOR + text if follows_text else text
        follows_text = not filled_lists and (follows_text or is_non_empty(text))
    return merged_text


def _read_media_lists(
    schema: Schema, row: Row, name: str, text_count: int
) -> list[tuple[MediumKind, str, Sequence[Any]]]:
    """Return the media lists of a record, each as long as its list of texts."""
    media_lists: list[tuple[MediumKind, str, Sequence[Any]]] = []
    for kind in MEDIUM_KINDS:
        for column in schema.columns.get(f"{kind}s", ()):
            value = row.get(column)
            if not is_non_empty(value):
                continue
            if not isinstance(value, list | tuple) or len(value) != text_count:
                description = (
                    format_count(len(value), "item") if isinstance(value, list | tuple) else describe_json_type(value)
                )
                raise UnusableRecordError(
                    f"column {name!r} has {format_count(text_count, 'item')} and column {column!r} {description}: "
                    "parallel lists must have the same length, with null where another list has the value"
                )
            media_lists.append((kind, column, value))
    return media_lists


def _weigh_record(record: ParsedRecord, weight: float) -> ParsedRecord:
    """Return a record with a weight of its loss."""
    if weight == 1:
        return record
    if isinstance(record, str):
        return WeightedText(record, weight)
    if isinstance(record, TokenRow):
        return TokenRow(record.ids, record.flags.scale(weight))
    if isinstance(record, Conversation | InterleavedText | SegmentedText):
        return replace(record, weight=weight)
    raise AssertionError(f"{type(record).__name__} has no weight")


def read_segments(row: Row, name: str) -> SegmentedText:
    """Read axolotl's segments: texts that are each trained or not, or weighted."""
    value = get_column_value(row, name)
    if value is None:
        raise missing_column_error(row, "segments", name)
    if not isinstance(value, list) or not value:
        raise UnusableRecordError(f"column {name!r} holds {describe_json_type(value)}, not a list of segments")
    weights: list[float] = []
    for number, segment in enumerate(value):
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            raise UnusableRecordError(f'{name}[{number}] is no segment: write {{"text": "...", "label": true}}')
        if segment.get("label") is None:
            raise UnusableRecordError(f"{name}[{number}] has no label; it can be true (trained) or false")
        weights.append(read_segment_weight(segment, f"{name}[{number}]"))
    texts = [segment["text"] for segment in value]
    return SegmentedText(texts, list(map(bool, weights)) if {0, 1}.issuperset(weights) else weights)


def read_token_row(row: Row, columns: dict[str, tuple[str, ...]]) -> TokenRow:
    """Read unpadded ids and the training mask of ``labels`` and ``loss_mask``.

    ``labels`` are aligned with ``input_ids`` as in Hugging Face: each is -100 or the id itself.
    A token is trained if both columns say so. Zeros of ``attention_mask`` mark padding, which is
    removed and may only precede or follow the tokens.
    """
    name = columns["input_ids"][0]
    ids = _read_integers(row, "input_ids", name)
    if len(ids) and (worst := int(ids.argmin())) >= 0 and ids[worst] < 0:
        raise UnusableRecordError(f"{name}[{worst}] is {ids[worst]}: a token id is 0 or more")
    keep = slice(None)
    if "attention_mask" in columns:
        keep = _find_unpadded_range(_read_mask(row, "attention_mask", columns, ids), columns["attention_mask"][0])
    trained: NDArray[np.bool_] | None = None
    if "labels" in columns:
        trained = _read_label_mask(row, columns, ids, keep)
    if "loss_mask" in columns:
        mask = _read_mask(row, "loss_mask", columns, ids)
        trained = mask if trained is None else trained & mask
    if "loss_weights" in columns:
        weights = _read_weights(row, columns, ids)[keep]
        trained_weights = weights if trained is None else np.where(trained[keep], weights, 0)
        return TokenRow(ids[keep], LossFlags.from_weights(trained_weights))
    ids = ids[keep]
    return TokenRow(ids, LossFlags.all_trained(ids.size) if trained is None else LossFlags.from_codes(trained[keep]))


def _read_weights(row: Row, columns: dict[str, tuple[str, ...]], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Read one loss weight per token."""
    name = columns["loss_weights"][0]
    value: Any = get_column_value(row, name)
    if value is None:
        raise missing_column_error(row, "loss_weights", name)
    if not isinstance(value, list | tuple | np.ndarray):
        raise UnusableRecordError(f"column {name!r} holds {describe_json_type(value)}, not a list of numbers")
    values = value.tolist() if isinstance(value, np.ndarray) else value
    # numpy reads true as 1, and a comparison with NaN is False.
    weights = np.array(values if {int, float}.issuperset(map(type, values)) else [math.nan], np.float64)
    if not ((weights >= 0) & (weights <= MAX_LOSS_WEIGHT)).all():
        weights = np.array([parse_loss_weight(item, f"{name}[{number}]") for number, item in enumerate(values)])
    return _check_same_length(weights, name, ids, columns)


def _read_label_mask(
    row: Row, columns: dict[str, tuple[str, ...]], ids: NDArray[np.int64], keep: slice
) -> NDArray[np.bool_]:
    name = columns["labels"][0]
    labels = _check_same_length(_read_integers(row, "labels", name), name, ids, columns)
    trained: NDArray[np.bool_] = labels != _IGNORED_LABEL
    wrong = np.flatnonzero((trained & (labels != ids))[keep])
    if len(wrong):
        index = int(wrong[0]) + (keep.start or 0)
        raise UnusableRecordError(
            f"{name}[{index}] is {labels[index]} where {columns['input_ids'][0]}[{index}] is {ids[index]}; a label "
            "is -100 or the id at the same position (models shift labels themselves)"
        )
    return trained


def _read_mask(row: Row, role: str, columns: dict[str, tuple[str, ...]], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    name = columns[role][0]
    values = _check_same_length(_read_integers(row, role, name), name, ids, columns)
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        raise UnusableRecordError(f"{name}[{wrong[0]}] is {values[wrong[0]]}; a mask holds 0 and 1")
    return values.astype(np.bool_)


def _check_same_length(
    values: NDArray[Number], name: str, ids: NDArray[np.int64], columns: dict[str, tuple[str, ...]]
) -> NDArray[Number]:
    if len(values) != len(ids):
        ids_column = columns["input_ids"][0]
        raise UnusableRecordError(
            f"column {name!r} holds {len(values)} numbers and {ids_column!r} {len(ids)}; both must have the same length"
        )
    return values


def _find_unpadded_range(mask: NDArray[np.bool_], name: str) -> slice:
    present = np.flatnonzero(mask)
    if not len(present):
        return slice(0, 0)
    start = int(present[0])
    stop = int(present[-1]) + 1
    if stop - start != len(present):
        hole = start + int(np.flatnonzero(~mask[start:stop])[0])
        raise UnusableRecordError(f"{name}[{hole}] is 0 between tokens; padding must be before or after all tokens")
    return slice(start, stop)


def _read_integers(row: Row, role: str, name: str) -> NDArray[np.int64]:
    value: Any = get_column_value(row, name)
    if value is None:
        raise missing_column_error(row, role, name)
    if not isinstance(value, list | tuple | np.ndarray):
        raise UnusableRecordError(f"column {name!r} holds {describe_json_type(value)}, not a list of numbers")
    try:
        array = np.asarray(value)
    except ValueError:  # Nested lists of different lengths.
        array = np.zeros((0, 0))
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in ("iub" if role.endswith("mask") else "iu"):
        raise UnusableRecordError(_describe_not_integers(value, name))
    return array.astype(np.int64)


def _describe_not_integers(value: Any, name: str) -> str:
    for number, item in enumerate(value):
        if not isinstance(item, int | np.integer) or isinstance(item, bool):
            description = repr(item) if isinstance(item, float | str) else describe_json_type(item)
            return f"{name}[{number}] is {description}, not a whole number"
    return f"column {name!r} holds numbers beyond 64 bits"
