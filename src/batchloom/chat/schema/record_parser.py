"""Parsers of records: texts, conversations, preferences, media and token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.chat.schema.prompt_answer import (
    ConversationContext,
    RoleColumn,
    make_prompt_reader,
    make_turns,
    not_text_error,
    parse_json_messages,
    require_answer,
    require_text,
)
from batchloom.chat.schema.record_columns import (
    Row,
    get_column_value,
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
from batchloom.chat.schema.record_media import (
    MediaExtractor,
    has_placeholder,
    is_extracted_medium,
    make_media_reader,
    parse_medium,
)
from batchloom.chat.schema.schemas import TURN_COLUMNS, Schema
from batchloom.chat.schema.turns import Turns, read_turns
from batchloom.core.conversation import (
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
)
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumKind
from batchloom.core.wording import describe_json_type, format_count

_LEADING_ROLES = ("system", "developer")
# Separates consecutive texts of a list, which are paragraphs of a page.
_PARAGRAPH_SEPARATOR = "\n\n"
_IGNORED_LABEL = -100


@final
@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """A document that needs no tokenizer.

    Attributes:
        ids: token ids, int64, shape [tokens].
        trained: mask of the trained tokens, bool, shape [tokens]; None if the record has no such column.
    """

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_] | None


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


def make_interleaved_reader(schema: Schema) -> Callable[[Row], InterleavedText]:
    """Return a reader of texts with media.

    Three layouts are read: a string with placeholders (``<image>``) and media columns, a list of typed parts, or
    parallel lists of texts and media; exactly one has a value at each index (OBELICS). In a string without
    placeholders all media come first.

    The reader raises UnusableRecordError, with the position in the record, for a placeholder without a medium, a
    medium without a placeholder or without text, and an invalid medium.
    """
    column = RoleColumn.from_schema(schema, "text")
    name = column.names[0]

    def read(row: Row) -> InterleavedText:
        value = column.get(row)
        if isinstance(value, list) and not any(isinstance(item, Mapping) for item in value):
            return _merge_parallel_lists(schema, row, value, name)
        extractor = MediaExtractor(schema, row)
        if isinstance(value, str) and not has_placeholder(value):
            parts: list[Any] = [*extractor.extract_leading(), {"type": "text", "text": value}]
        elif isinstance(value, str | list):
            parts = extractor.extract_content(value, name)
        elif value is None and (media_count := len(extractor.extract_leading())):
            raise UnusableRecordError(
                f"holds {_format_media_count(media_count)} and no text in column {name!r}; write its text there, or "
                "leave the record out"
            )
        else:
            raise not_text_error(row, column, value)
        extractor.check_all_used()
        return _merge_parts(parts, extractor.media, name)

    return read


def _format_media_count(media: int) -> str:
    return "a medium" if media == 1 else f"{media:,} media"


def _merge_parts(parts: Sequence[Any], media: list[Medium], name: str) -> InterleavedText:
    """Convert parts to texts and media."""
    texts, ordered = [""], []
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
            names = [
                *([name] if is_non_empty(text) else []),
                *(column for _, column, _ in filled_lists),
            ]
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
    return TokenRow(ids[keep], None if trained is None else trained[keep])


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
    values: NDArray[np.int64],
    name: str,
    ids: NDArray[np.int64],
    columns: dict[str, tuple[str, ...]],
) -> NDArray[np.int64]:
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
    start, stop = int(present[0]), int(present[-1]) + 1
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
