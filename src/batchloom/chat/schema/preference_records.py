"""Preferences: a chosen and a rejected answer to one prompt."""

from collections.abc import Callable

from batchloom.chat.schema.prompt_answer import (
    ConversationContext,
    RoleColumn,
    make_prompt_reader,
    make_turns,
    parse_json_messages,
    require_answer,
    require_text,
)
from batchloom.chat.schema.record_columns import Row
from batchloom.chat.schema.schemas import TURN_COLUMNS, Schema
from batchloom.chat.schema.turns import Turns, read_turns
from batchloom.core.conversation import PreferencePair
from batchloom.core.errors import UnusableRecordError

_LEADING_ROLES = ("system", "developer")


def make_pair_reader(schema: Schema) -> Callable[[Row], PreferencePair]:
    """Return a function that converts a record to its preference pair.

    Without a prompt column the common leading turns are the prompt. Two texts stay two texts, because
    nothing marks the end of the prompt in them. An answer is a text, a message, a list of messages,
    or the complete conversation with the prompt.
    """
    chosen_column, rejected_column = (
        RoleColumn.from_schema(schema, "chosen"),
        RoleColumn.from_schema(schema, "rejected"),
    )
    read_prompt = make_prompt_reader(schema) if "prompt" in schema.columns else None
    context = ConversationContext.from_schema(schema)
    sides = chosen_column.names[0], rejected_column.names[0]
    prompt_name = next(iter(schema.columns.get("prompt", ())), "")
    # A column of turns may hold JSON text while the other side is plain text.
    turns_only = chosen_column.names[0] in TURN_COLUMNS

    def read(row: Row) -> PreferencePair:
        row = parse_json_messages(row, sides, prompt_name)
        good, bad = chosen_column.get(row), rejected_column.get(row)
        if good == bad and good is not None:
            raise UnusableRecordError(
                f"columns {chosen_column.names[0]!r} and {rejected_column.names[0]!r} are equal: there is no preference"
            )
        texts = isinstance(good, str) and isinstance(bad, str) and not turns_only
        if read_prompt is None and texts:
            pair = require_text(row, chosen_column, good), require_text(row, rejected_column, bad)
            if good.lstrip()[0] != bad.lstrip()[0]:
                raise _missing_prompt_error(chosen_column.names[0], rejected_column.names[0])
            return PreferencePair(*pair)
        prompt = read_prompt(row) if read_prompt is not None else None
        if turns_only and good is not None:
            best = read_turns(good, chosen_column.names[0])
        else:
            best = make_turns(row, chosen_column, good, "assistant")
        turns = best, make_turns(row, rejected_column, bad, "assistant")
        if prompt is None and isinstance(bad, str) and len(best[0]) > 1:
            # As in ms-swift, a rejected text replaces the last turn of the conversation.
            prompt, answer = _split_last_turn(best)
            turns = answer, turns[1]
        if prompt is None:
            prompt, turns = _split_common_prompt(turns, chosen_column.names[0], rejected_column.names[0])
        ends = [
            _split_answer(prompt, end, column.names[0])
            for end, column in zip(turns, (chosen_column, rejected_column), strict=True)
        ]
        return PreferencePair(*(context.conversation(row, *end, completion=True) for end in ends))

    return read


def _split_last_turn(turns: Turns) -> tuple[Turns, Turns]:
    """Split a conversation into its prompt and its last turn."""
    messages, flags = turns
    return (messages[:-1], flags[:-1]), (messages[-1:], flags[-1:])


def _split_common_prompt(
    turns: tuple[Turns, Turns], chosen_name: str, rejected_name: str
) -> tuple[Turns, tuple[Turns, Turns]]:
    """Split two conversations into their common leading turns and their endings."""
    (good, good_flags), (bad, bad_flags) = turns
    common_length = 0
    while common_length < min(len(good), len(bad)) and good[common_length] == bad[common_length]:
        common_length += 1
    if not any(message["role"] == "user" for message in good[:common_length]):
        raise _missing_prompt_error(chosen_name, rejected_name)
    return (
        (good[:common_length], good_flags[:common_length]),
        (
            (good[common_length:], good_flags[common_length:]),
            (bad[common_length:], bad_flags[common_length:]),
        ),
    )


def _missing_prompt_error(chosen_name: str, rejected_name: str) -> UnusableRecordError:
    return UnusableRecordError(
        f"columns {chosen_name!r} and {rejected_name!r} do not begin with the same prompt; "
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
