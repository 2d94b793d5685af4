"""Conversion of records to the text, conversation, preference or ids they hold."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from batchloom.chat.schema.interleaved_records import make_interleaved_reader
from batchloom.chat.schema.preference_records import make_pair_reader
from batchloom.chat.schema.prompt_answer import (
    ConversationContext,
    RoleColumn,
    make_prompt_reader,
    make_turns,
    not_text_error,
    parse_json_messages,
    require_answer,
)
from batchloom.chat.schema.record_columns import (
    Row,
    is_non_empty,
    missing_column_error,
    parse_label,
)
from batchloom.chat.schema.record_keys import (
    TURN_ROLES,
    UnsupportedKey,
    check_columns,
    drop_keys,
    unsupported_columns,
)
from batchloom.chat.schema.record_media import make_media_reader
from batchloom.chat.schema.schemas import Schema
from batchloom.chat.schema.token_rows import TokenRow, read_token_row
from batchloom.chat.schema.turns import read_turns
from batchloom.core.conversation import (
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
)
from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import describe_json_type

ParsedRecord = str | InterleavedText | Conversation | PreferencePair | LabelledConversation | TokenRow
RecordReader = Callable[[Row], ParsedRecord]


def make_record_reader(schema: Schema, *, media: bool = False) -> RecordReader:
    """Return the record parser of a schema.

    The parser keeps all turns, and every value unchanged: numbers are never converted to text. It
    raises UnusableRecordError, with the position in the record and a remedy, for a record without
    prompt or answer, with values that are not text, with unknown roles, or with
    media that are disabled, misplaced or invalid.

    Args:
        schema: schema of the records.
        media: whether conversations may hold images, audio and video.
    """
    read_record = _make_reader(schema, media=media)
    if schema.late:
        read_record = _wrap_refuse_late(read_record, schema.late)
    if unsupported := unsupported_columns(schema):
        read_record = _wrap_refuse_unsupported(read_record, unsupported)
    return _wrap_drop_ignored(read_record, schema) if schema.ignored else read_record


def _make_reader(schema: Schema, *, media: bool) -> RecordReader:
    if schema.form == "text":
        return _make_text_reader(RoleColumn.from_schema(schema, "text"))
    if schema.form == "interleaved":
        return make_interleaved_reader(schema)
    if schema.form == "tokens":
        return lambda row: read_token_row(row, schema.columns)
    if schema.form == "pair":
        return make_pair_reader(schema)
    if schema.form == "messages":
        read_conversation = _make_messages_reader(schema)
    elif schema.form == "prompt-completion":
        read_conversation = _make_completion_reader(schema)
    else:
        read_conversation = _make_instruction_reader(schema)
    if media:
        read_conversation = make_media_reader(schema, read_conversation)
    return _make_labelled_reader(schema, read_conversation) if "label" in schema.columns else read_conversation


def _wrap_refuse_late(read_record: RecordReader, late: Mapping[str, tuple[str, ...]]) -> RecordReader:
    roles = {name: role for role, names in late.items() for name in names}
    names = frozenset(roles)

    def unless_late(row: Row) -> ParsedRecord:
        if not names.isdisjoint(row):
            for name in names.intersection(row):
                if is_non_empty(row[name]):
                    raise UnusableRecordError(
                        f"column {name!r} holds {describe_json_type(row[name])} where the first records have no "
                        "value: put such records into a separate file, or leave the column out with --map "
                        f"{roles[name]}="
                    )
        return read_record(row)

    return unless_late


def _wrap_refuse_unsupported(read_record: RecordReader, unsupported: Mapping[str, UnsupportedKey]) -> RecordReader:
    names = frozenset(unsupported)

    def unless_unsupported(row: Row) -> ParsedRecord:
        if not names.isdisjoint(row):
            check_columns(row, unsupported)
        return read_record(row)

    return unless_unsupported


def _wrap_drop_ignored(read_record: RecordReader, schema: Schema) -> RecordReader:
    columns = [name for role in TURN_ROLES for name in schema.columns.get(role, ())]
    return lambda row: read_record(drop_keys(row, schema.ignored, columns))


def _make_text_reader(column: RoleColumn) -> RecordReader:
    get = column.get

    def read(row: Row) -> str:
        value = get(row)
        if isinstance(value, str):
            return value
        raise not_text_error(row, column, value)

    return read


def _make_messages_reader(schema: Schema) -> Callable[[Row], Conversation]:
    column = RoleColumn.from_schema(schema, "messages")
    get, name, context = column.get, column.names[0], ConversationContext.from_schema(schema)

    def read(row: Row) -> Conversation:
        value = get(row)
        if value is None:
            raise missing_column_error(row, column.role, name)
        turns = read_turns(value, name)
        require_answer(turns, name)
        return context.conversation(row, turns)

    return read


def _make_instruction_reader(schema: Schema) -> Callable[[Row], Conversation]:
    read_prompt, response = make_prompt_reader(schema), RoleColumn.from_schema(schema, "response")
    get_answer, name, context = (
        response.get,
        response.names[0],
        ConversationContext.from_schema(schema),
    )

    def read(row: Row) -> Conversation:
        prompt = read_prompt(row)
        answer_turns = make_turns(row, response, get_answer(row), "assistant")
        require_answer(answer_turns, name)
        return context.conversation(row, prompt, answer_turns)

    return read


def _make_completion_reader(schema: Schema) -> Callable[[Row], Conversation]:
    prompt, completion = (
        RoleColumn.from_schema(schema, "prompt"),
        RoleColumn.from_schema(schema, "completion"),
    )
    name, context = completion.names[0], ConversationContext.from_schema(schema)

    def read(row: Row) -> Conversation:
        row = parse_json_messages(row, (prompt.names[0], name))
        prompt_turns = make_turns(row, prompt, prompt.get(row), "user")
        answer_turns = make_turns(row, completion, completion.get(row), "assistant")
        require_answer(answer_turns, name)
        return context.conversation(row, prompt_turns, answer_turns, completion=True)

    return read


def _make_labelled_reader(schema: Schema, read_conversation: Callable[[Row], Conversation]) -> RecordReader:
    column = RoleColumn.from_schema(schema, "label")

    def labelled(row: Row) -> LabelledConversation:
        label = column.get(row)
        if label is None:
            raise missing_column_error(row, "label", column.names[0])
        good = parse_label(label)
        if good is None:
            label_text = repr(label) if isinstance(label, int | float | str) else describe_json_type(label)
            raise UnusableRecordError(
                f"column {column.names[0]!r} holds {label_text:.40}, not true (good) or false (bad); if it is not a "
                "preference label, leave it out with --map label="
            )
        return LabelledConversation(_mark_labelled_answer(read_conversation(row)), good)

    return labelled


def _mark_labelled_answer(conversation: Conversation) -> Conversation:
    """Set ``completion`` to the last turn, which the label rates, if it is not set."""
    if conversation.completion is not None:
        return conversation
    last = len(conversation.messages) - 1
    if conversation.messages[last]["role"] != "assistant":
        raise UnusableRecordError(
            f"the conversation ends with a {conversation.messages[last]['role']} turn, but a label belongs to the "
            "answer at the end; remove the turns after that answer"
        )
    return replace(conversation, completion=last)
