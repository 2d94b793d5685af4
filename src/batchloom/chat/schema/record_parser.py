"""From a record to the text, conversation, preference or token ids that its schema says it is."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from batchloom.chat.schema.interleaved_records import interleaved_reader
from batchloom.chat.schema.preference_records import pair_reader
from batchloom.chat.schema.prompt_answer import (
    Column,
    Frame,
    asked_reader,
    demand_answer,
    not_text,
    parse_json_messages,
    spoken,
)
from batchloom.chat.schema.record_columns import Row, absent, label_of, says_something
from batchloom.chat.schema.record_keys import (
    TURN_ROLES,
    UnsupportedKey,
    check_columns,
    drop_keys,
    unsupported_columns,
)
from batchloom.chat.schema.record_media import with_media
from batchloom.chat.schema.schemas import Schema
from batchloom.chat.schema.token_rows import TokenRow, read_token_row
from batchloom.chat.schema.turns import read_turns
from batchloom.core.conversation import Conversation, Interleaved, Labelled, Pair
from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import kind_of

Record = str | Interleaved | Conversation | Pair | Labelled | TokenRow
Read = Callable[[Row], Record]


def record_reader(schema: Schema, *, media: bool = False) -> Read:
    """A function from a record of this schema to what it holds, made once a source.

    Args:
        schema: of the records.
        media: whether conversations may hold images, audio and video.

    All turns are kept, and every value as it is: a number is never turned into text. The function
    raises UnusableRecordError, with the place in the record and a remedy, for a record without
    prompt or answer, with values of other types than text, with roles nobody knows, or with
    media that are not asked for, do not stand where they belong or are none.
    """
    read = _reader(schema, media=media)
    if schema.late:
        read = _refusing_late(read, schema.late)
    if unsupported := unsupported_columns(schema):
        read = _refusing_unsupported(read, unsupported)
    return _dropping_ignored(read, schema) if schema.ignored else read


def _reader(schema: Schema, *, media: bool) -> Read:
    if schema.form == "text":
        return _text_reader(Column.of(schema, "text"))
    if schema.form == "interleaved":
        return interleaved_reader(schema)
    if schema.form == "tokens":
        return lambda row: read_token_row(row, schema.columns)
    if schema.form == "pair":
        return pair_reader(schema)
    if schema.form == "messages":
        read = _messages_reader(schema)
    elif schema.form == "prompt-completion":
        read = _completion_reader(schema)
    else:
        read = _instruction_reader(schema)
    if media:
        read = with_media(schema, read)
    return _labelled_reader(schema, read) if "label" in schema.columns else read


def _refusing_late(read: Read, late: Mapping[str, tuple[str, ...]]) -> Read:
    roles = {name: role for role, names in late.items() for name in names}
    names = frozenset(roles)

    def unless_late(row: Row) -> Record:
        if not names.isdisjoint(row):
            for name in names.intersection(row):
                if says_something(row[name]):
                    raise UnusableRecordError(
                        f"column {name!r} holds {kind_of(row[name])} where the first records have nothing: keep such "
                        f"records in a file of their own, or leave the column out with --map {roles[name]}="
                    )
        return read(row)

    return unless_late


def _refusing_unsupported(read: Read, unsupported: Mapping[str, UnsupportedKey]) -> Read:
    names = frozenset(unsupported)

    def unless_unsupported(row: Row) -> Record:
        if not names.isdisjoint(row):
            check_columns(row, unsupported)
        return read(row)

    return unless_unsupported


def _dropping_ignored(read: Read, schema: Schema) -> Read:
    columns = [name for role in TURN_ROLES for name in schema.columns.get(role, ())]
    return lambda row: read(drop_keys(row, schema.ignored, columns))


def _text_reader(column: Column) -> Read:
    get = column.get

    def read(row: Row) -> str:
        value = get(row)
        if isinstance(value, str):
            return value
        raise not_text(row, column, value)

    return read


def _messages_reader(schema: Schema) -> Callable[[Row], Conversation]:
    column = Column.of(schema, "messages")
    get, name, frame = column.get, column.names[0], Frame.of(schema)

    def read(row: Row) -> Conversation:
        value = get(row)
        if value is None:
            raise absent(row, column.role, name)
        turns = read_turns(value, name)
        demand_answer(turns, name)
        return frame.conversation(row, turns)

    return read


def _instruction_reader(schema: Schema) -> Callable[[Row], Conversation]:
    asked, response = asked_reader(schema), Column.of(schema, "response")
    answer, name, frame = response.get, response.names[0], Frame.of(schema)

    def read(row: Row) -> Conversation:
        prompt = asked(row)
        answered = spoken(row, response, answer(row), "assistant")
        demand_answer(answered, name)
        return frame.conversation(row, prompt, answered)

    return read


def _completion_reader(schema: Schema) -> Callable[[Row], Conversation]:
    prompt, completion = Column.of(schema, "prompt"), Column.of(schema, "completion")
    name, frame = completion.names[0], Frame.of(schema)

    def read(row: Row) -> Conversation:
        row = parse_json_messages(row, (prompt.names[0], name))
        asked = spoken(row, prompt, prompt.get(row), "user")
        answered = spoken(row, completion, completion.get(row), "assistant")
        demand_answer(answered, name)
        return frame.conversation(row, asked, answered, completion=True)

    return read


def _labelled_reader(schema: Schema, read: Callable[[Row], Conversation]) -> Read:
    column = Column.of(schema, "label")

    def labelled(row: Row) -> Labelled:
        label = column.get(row)
        if label is None:
            raise absent(row, "label", column.names[0])
        good = label_of(label)
        if good is None:
            shown = repr(label) if isinstance(label, int | float | str) else kind_of(label)
            raise UnusableRecordError(
                f"column {column.names[0]!r} holds {shown:.40}, not true (good) or false (bad); where it is something "
                "else than a preference leave it out with --map label="
            )
        return Labelled(_judged(read(row)), good)

    return labelled


def _judged(conversation: Conversation) -> Conversation:
    """The conversation with the answer that a label is of: its completion, else its last turn."""
    if conversation.completion is not None:
        return conversation
    last = len(conversation.messages) - 1
    if conversation.messages[last]["role"] != "assistant":
        raise UnusableRecordError(
            f"the conversation ends with a {conversation.messages[last]['role']} turn: a label is of the answer "
            "that it ends with; remove what comes behind it"
        )
    return replace(conversation, completion=last)
