"""Key tables: which columns and message keys are read, metadata, or unsupported.

A column or key that changes training in other libraries must not be ignored silently. Each kind of
record has one table. A key is *used* (it has a role in ``schemas.FORM_RULES``), *metadata* (ids, sources,
dates, scores: never reported), *unsupported* (another library gives it a meaning that batchloom does
not support: an error) or unknown (reported as unused).

``TRAIN_FLAGS`` lists the train flags of other libraries. A *switch* says whether a turn is trained. A *weight* does,
too, and weights its loss. A *factor* weights a turn that is trained anyway, without its stop token. *Ranges* are
characters of the content.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from batchloom.chat.schema.schemas import (
    FORM_RULES,
    INTERLEAVED_RULE,
    OPENAI_PROMPT,
    PROMPT_RULES,
    MessageNames,
    Row,
    Schema,
    SchemaKind,
    format_columns,
    get_column_value,
    is_non_empty,
    top_level_columns,
)
from batchloom.chat.templates.template_arguments import read_template_arguments
from batchloom.core.document import JsonObject
from batchloom.core.errors import SchemaError, UnusableRecordError


def _is_one(value: Any) -> bool:
    """Return whether a weight is 1, also as text."""
    try:
        return isinstance(value, str | int | float) and float(value) == 1
    except ValueError:
        return False


def _counts_up(value: Any) -> bool:
    """Return whether ``position_ids`` of a row describe one document."""
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return list(value) == list(range(len(value)))
    return True


class UnsupportedKey(NamedTuple):
    """A key that changes training in another library and is not supported."""

    library: str
    # Its effect there, as the end of "it ...".
    effect: str
    # Alternative to ``--ignore``.
    remedy: str
    # Returns whether a value has no effect and is accepted.
    is_neutral: Callable[[Any], bool] = lambda _value: False
    # Whether the key makes another kind of record, so that a ``--map`` that names the kind overrides it.
    of_form: bool = False


class KeyTable(NamedTuple):
    """Keys of one kind of record, or of messages, by their treatment."""

    used: frozenset[str]
    metadata: frozenset[str]
    unsupported: Mapping[str, UnsupportedKey]


_METADATA = frozenset(
    (
        "id",
        "_id",
        "idx",
        "index",
        "uid",
        "uuid",
        "guid",
        "hash",
        "md5",
        "sha256",
        "doc_id",
        "document_id",
        "sample_id",
        "example_id",
        "task_id",
        "question_id",
        "row_id",
        "prompt_id",
        "conversation_id",
        "conv_id",
        "conversation_hash",
        "__index_level_0__",
        "source",
        "data_source",
        "dataset",
        "dataset_name",
        "_dataset_name",
        "origin",
        "subset",
        "split",
        "config",
        "license",
        "version",
        "dump",
        "warc_path",
        "meta",
        "metadata",
        "extra_info",
        "url",
        "uri",
        "path",
        "file",
        "filename",
        "file_name",
        "file_path",
        "repo",
        "repo_name",
        "date",
        "time",
        "timestamp",
        "created",
        "created_at",
        "added",
        "language_score",
        "quality_score",
        "score_chosen",
        "score_rejected",
        "token_count",
        "num_tokens",
        "n_tokens",
        "num_turns",
        "parallel_tool_calls",
        "channel",
    )
)

_LOSS_SCALE = UnsupportedKey("ms-swift", "weights the loss", "write it into the messages", is_neutral=_is_one)
_PAIR_REMEDY = "prepare the pairs with --map chosen=...,rejected=..., or the conversations with --map messages=..."
_PAIR_KEY = UnsupportedKey(
    "TRL and LLaMA-Factory",
    "makes the record a preference",
    _PAIR_REMEDY,
    is_neutral=lambda value: not isinstance(value, str | list | dict),
    of_form=True,
)
_SWIFT_PAIR_KEY = _PAIR_KEY._replace(library="ms-swift")
_KTO_TAG = UnsupportedKey("LLaMA-Factory", "labels the answer good or bad", "name it with --map label=kto_tag")
# Texts of a label that judge an answer. Other texts are classes of some other task.
_JUDGEMENTS = frozenset(("good", "bad", "chosen", "rejected", "accepted", "desirable", "undesirable"))
_TEXT_LABEL = UnsupportedKey(
    "TRL",
    "labels the answer good or bad",
    "write true or false",
    is_neutral=lambda value: not (isinstance(value, str) and value.strip().lower() in _JUDGEMENTS),
)
_GROUNDING = UnsupportedKey(
    "ms-swift", "replaces <ref-object> and <bbox> in the contents", "write the values into the contents"
)
_REJECTED_IMAGES = UnsupportedKey(
    "ms-swift",
    "holds the images of the rejected answer",
    "write the rejected answer as rejected_messages",
)
_CONTRAST = UnsupportedKey("ms-swift", "marks the record for embedding models or rerankers", "train it with ms-swift")
_MARGIN = UnsupportedKey("TRL", "sets the margin of the pair in reward models", "train the reward model with TRL")
_MASK = UnsupportedKey(
    "NeMo",
    "names the speaker whose turns are not trained",
    'mark turns with "train": true or false',
    is_neutral=lambda value: isinstance(value, str) and value.lower() in ("user", "human"),
)
_SEGMENTS = UnsupportedKey(
    "axolotl",
    "holds texts that are each marked as trained or not",
    "train them instead of the conversation with --map segments=segments",
    of_form=True,
)
_FUNCTIONS = UnsupportedKey(
    "OpenAI (before tools)", "lists the functions a model may call", "write tools and tool_calls"
)
_TOOLS = UnsupportedKey("transformers and TRL", "lists the tools a model may call", "name it with --map tools=tools")
_HISTORY = UnsupportedKey(
    "LLaMA-Factory and ms-swift",
    "holds earlier turns",
    "write all turns as messages, or the prompt as an instruction",
    is_neutral=lambda value: not isinstance(value, list),
)
_SAMPLE_WEIGHT = UnsupportedKey(
    "Fireworks", "weights the record", "drop the column, or prepare conversations", is_neutral=_is_one
)

_ANY_CONVERSATION = {
    "loss_scale": _LOSS_SCALE,
    "functions": _FUNCTIONS,
    "mask": _MASK,
    "segments": _SEGMENTS,
    "objects": _GROUNDING,
    "tools": _TOOLS,
    "history": _HISTORY,
    "kto_tag": _KTO_TAG,
    "positive_messages": _CONTRAST,
    "negative_messages": _CONTRAST,
}
_ROW_OF_SEVERAL = UnsupportedKey(
    "TRL",
    "marks a row that holds several documents",
    "write one document per row",
    is_neutral=lambda value: not isinstance(value, list | tuple) or len(value) < 2,
)
_TOKENS_TRAINED = "says which tokens are trained"


def _used_columns(*kinds: SchemaKind) -> frozenset[str]:
    """Return the known column names of the forms that can become one of these kinds."""
    return frozenset(
        name
        for rule in (*FORM_RULES, *PROMPT_RULES, INTERLEAVED_RULE)
        if kinds and not rule.kinds.isdisjoint(kinds)
        for names in (*rule.required.values(), *rule.optional.values())
        for name in names
    )


COLUMN_TABLES: dict[SchemaKind, KeyTable] = {
    "text": KeyTable(_used_columns("text"), _METADATA, {}),
    "interleaved": KeyTable(_used_columns("interleaved"), _METADATA, {}),
    "segments": KeyTable(_used_columns("segments"), _METADATA, {}),
    "conversation": KeyTable(
        _used_columns("conversation"),
        _METADATA,
        {
            **_ANY_CONVERSATION,
            "label": _TEXT_LABEL,
            "chosen": _PAIR_KEY,
            "rejected": _PAIR_KEY,
            "rejected_response": _SWIFT_PAIR_KEY,
            "rejected_messages": _SWIFT_PAIR_KEY,
            "rejected_images": _REJECTED_IMAGES,
        },
    ),
    "preference": KeyTable(
        _used_columns("preference"),
        _METADATA,
        {
            **_ANY_CONVERSATION,
            "weight": _SAMPLE_WEIGHT,
            "margin": _MARGIN,
            "rejected_images": _REJECTED_IMAGES,  # Of labelled answers; pairs have a role for it
            "rejected_response": _SWIFT_PAIR_KEY,
            "rejected_messages": _SWIFT_PAIR_KEY,
        },
    ),
    "prompt": KeyTable(
        _used_columns("prompt"),
        _METADATA,
        {name: _ANY_CONVERSATION[name] for name in ("functions", "objects", "tools", "history")},
    ),
    "tokens": KeyTable(
        _used_columns("tokens"),
        _METADATA,
        {
            "completion_mask": UnsupportedKey(
                "TRL", _TOKENS_TRAINED, "name it with --map input_ids=input_ids,loss_mask=completion_mask"
            ),
            "assistant_masks": UnsupportedKey(
                "transformers and TRL",
                _TOKENS_TRAINED,
                "name it with --map input_ids=input_ids,loss_mask=assistant_masks",
            ),
            "seq_lengths": _ROW_OF_SEVERAL._replace(
                is_neutral=lambda value: not isinstance(value, list | tuple) or len(value) < 2
            ),
            "position_ids": _ROW_OF_SEVERAL._replace(library="transformers", is_neutral=_counts_up),
        },
    ),
}


class FlagRule(NamedTuple):
    """Meaning of a flag."""

    library: str
    kind: Literal["switch", "inverted switch", "weight", "factor", "ranges"]
    # Whether the flag of another turn can only exclude it, because the library trains only assistant turns.
    is_assistant_only: bool = False
    # Whether parts of a content may have it, too.
    is_for_parts: bool = True


TRAIN_FLAGS: dict[str, FlagRule] = {
    "train": FlagRule("axolotl and batchloom", "switch"),
    "training": FlagRule("axolotl", "switch"),
    "loss": FlagRule("ms-swift", "switch", is_assistant_only=True),
    "masked": FlagRule("torchtune", "inverted switch", is_for_parts=False),
    "weight": FlagRule("OpenAI and Mistral", "weight", is_assistant_only=True),
    "loss_weight": FlagRule("LLaMA-Factory", "weight"),
    "loss_scale": FlagRule("ms-swift", "factor", is_assistant_only=True),
    "train_detail": FlagRule("axolotl", "ranges", is_for_parts=False),
}
PART_FLAGS = frozenset(name for name, rule in TRAIN_FLAGS.items() if rule.is_for_parts)
SEGMENT_FLAGS = {
    "label": FlagRule("axolotl", "switch"),
    **{name: rule for name, rule in TRAIN_FLAGS.items() if rule.kind != "ranges"},
}
MESSAGE_KEYS = KeyTable(
    frozenset(
        (
            "role",
            "content",
            "from",
            "value",
            "name",
            "tool_calls",
            "tool_call_id",
            *("reasoning_content", "thinking", "reasoning", *TRAIN_FLAGS),
            # Items of OpenAI's Responses.
            "type",
            "call_id",
            "output",
            "arguments",
            "summary",
            "encrypted_content",
            "phase",
            "status",
        )
    ),
    _METADATA | {"model", "author", "parent_id", "message_id", "turn", "turn_id", "refusal", "cache_control"},
    {
        "function_call": UnsupportedKey("OpenAI (before tools)", "calls a function", "write tool_calls"),
    },
)
SEGMENT_KEYS = KeyTable(frozenset(("text", *SEGMENT_FLAGS)), _METADATA, {})
PART_KEYS: dict[str, UnsupportedKey] = {
    **{
        name: UnsupportedKey(
            TRAIN_FLAGS[name].library, "says whether a part of a message is trained", "flag the message instead"
        )
        for name in sorted(PART_FLAGS)
    },
    **dict.fromkeys(
        ("min_pixels", "max_pixels", "resized_height", "resized_width"),
        UnsupportedKey("qwen-vl-utils", "sets the size of one image", "set it for all in the processor"),
    ),
}
# Flags of text parts are read, except in contents with media.
TEXT_PART_KEYS = {name: entry for name, entry in PART_KEYS.items() if name not in PART_FLAGS}


def check_keys(keys: Mapping[str, Any], unsupported: Mapping[str, UnsupportedKey], field_path: str = "") -> None:
    """Refuse unsupported keys of a record, or of a message or part at ``field_path``."""
    if unsupported.keys().isdisjoint(keys):
        return
    # Table order makes the error of a record the same in every process.
    for name, entry in unsupported.items():
        if name in keys and has_effect(keys[name], entry):
            subject = f"{field_path}.{name}" if field_path else f"column {name!r}"
            raise UnusableRecordError(describe_unsupported(f"{subject} is", entry, [name]))


def has_effect(value: object, entry: UnsupportedKey) -> bool:
    """Return whether a value of an unsupported key would change training."""
    if isinstance(value, dict):
        # Tables add every field of an object to every record, with null where the record has none.
        value = {key: item for key, item in value.items() if item is not None}
    return is_non_empty(value) and value != {} and not entry.is_neutral(value)


def describe_unsupported(subject: str, entry: UnsupportedKey, names: Sequence[str]) -> str:
    """Describe unsupported keys with their library, effect and remedy."""
    return (
        f"{subject} not supported ({entry.library}: {entry.effect}): {entry.remedy}, or train without it with "
        f"--ignore {','.join(names)}"
    )


def _list_read_columns(schema: Schema) -> frozenset[str]:
    roles = (name for names in schema.columns.values() for name in names)
    return top_level_columns((*roles, *(column for _, column in schema.carried)))


def unsupported_columns(schema: Schema) -> dict[str, UnsupportedKey]:
    """Return the columns that records of a schema must not hold.

    Excludes columns of other forms if a mapping names the form, and columns of roles that the mapping
    disables.
    """
    used = _list_read_columns(schema) | schema.left_out
    return {
        name: entry
        for name, entry in COLUMN_TABLES[schema.kind].unsupported.items()
        if name not in used and not (schema.mapped and entry.of_form)
    }


def check_first_records(records: Sequence[Row], schema: Schema) -> None:
    """Refuse a source whose first records hold unsupported columns; list them all."""
    names_of: dict[UnsupportedKey, list[str]] = {}
    for name, entry in unsupported_columns(schema).items():
        if any(has_effect(row.get(name), entry) for row in records):
            names_of.setdefault(entry, []).append(name)
    if not names_of:
        return
    problems = [
        describe_unsupported(
            f"column{'s' * (len(names) > 1)} {format_columns(names)} {'are' if len(names) > 1 else 'is'}", entry, names
        )
        for entry, names in names_of.items()
    ]
    raise SchemaError(
        "; ".join(problems),
        list(dict.fromkeys(name for row in records for name in row)),
        "chosen=chosen,rejected=rejected" if names_of.get(_PAIR_KEY) == ["chosen", "rejected"] else None,
    )


def unused_columns(records: Sequence[Row], schema: Schema) -> tuple[str, ...]:
    """Return the filled columns and segment keys that are neither read nor metadata."""
    table = COLUMN_TABLES[schema.kind]
    recognized_columns = _list_read_columns(schema) | table.metadata
    unused = dict.fromkeys(
        name
        for row in records
        for name, value in row.items()
        if name not in recognized_columns
        and name not in schema.ignored
        and (has_effect(value, table.unsupported[name]) if name in table.unsupported else is_non_empty(value))
    )
    if schema.columns.get("prompt") == (OPENAI_PROMPT,):
        # OpenAI's pairs hold the prompt in an object.
        known_keys = {"messages", "tools"} | table.metadata
        unused |= dict.fromkeys(
            name
            for row in records
            for key, value in (row["input"] if isinstance(row.get("input"), dict) else {}).items()
            if key not in known_keys and (name := f"input.{key}") not in schema.ignored and is_non_empty(value)
        )
    segments = [
        f"{column}[].{key}"
        for column in schema.columns.get("segments", ())
        for key in _find_unused_keys(records, column, SEGMENT_KEYS, schema)
    ]
    return (*unused, *segments)


def unused_message_keys(records: Sequence[Row], schema: Schema) -> tuple[str, ...]:
    """Return the keys of messages that are neither read nor known as metadata.

    Chat templates receive all keys, so callers that know the template remove those that it reads.
    """
    names = [] if schema.names is None else schema.names.keys.values()
    unused: dict[str, None] = {}
    for column in (name for role in TURN_ROLES for name in schema.columns.get(role, ())):
        unused |= _find_unused_keys(records, column, MESSAGE_KEYS, schema)
    return tuple(key for key in unused if key not in names)


def _find_unused_keys(records: Sequence[Row], column: str, table: KeyTable, schema: Schema) -> dict[str, None]:
    """Return the filled keys of messages or segments that the table does not list."""
    recognized_keys = table.used | table.metadata | table.unsupported.keys() | _message_keys(schema.ignored)
    return dict.fromkeys(
        key
        for row in records
        for item in list_messages(get_column_value(row, column))
        for key, value in item.items()
        if key not in recognized_keys and is_non_empty(value)
    )


def list_template_arguments(records: Iterable[Row], schema: Schema) -> dict[str, str]:
    """Return the names of the template arguments of records, each with its column."""
    column_by_argument: dict[str, str] = {}
    for row in records:
        for column in schema.columns.get("template_args", ()):
            with contextlib.suppress(UnusableRecordError):
                arguments = read_template_arguments(get_column_value(row, column), column)
                column_by_argument = dict.fromkeys(arguments or (), column) | column_by_argument
    return column_by_argument


TURN_ROLES = ("messages", "prompt", "completion", "response", "chosen", "rejected")


def remove_nulls(value: Any) -> Any:
    """Return a nested value without keys of null values, as TRL does.

    Arrow gives all objects of a column the keys of each of them.
    """
    if isinstance(value, dict) and not isinstance(value, JsonObject):
        return {key: remove_nulls(item) for key, item in value.items() if item is not None}
    return [remove_nulls(item) for item in value] if isinstance(value, list) else value


def decode_items(value: Any) -> Any:
    """Return a list of objects in JSON as the objects; any other value unchanged.

    Hugging Face datasets write messages and tools so, whose objects differ from row to row.
    """
    if not (isinstance(value, list) and value and all(isinstance(item, str) and item[:1] == "{" for item in value)):
        return value
    try:
        return [orjson.loads(item) for item in value]
    except orjson.JSONDecodeError:
        return value


def list_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages of a column: a list, a single one, or JSON text of a list."""
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return []
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            # The record parser reports the error.
            return []
    if isinstance(value, dict):
        return [value]
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def drop_keys(row: Row, ignored: frozenset[str], columns: Iterable[str] = ()) -> dict[str, Any]:
    """Return a copy of a record without the ignored columns and message keys.

    ``messages[].key`` in ``ignored`` matches keys of messages and their parts only, and ``segments[].key`` likewise;
    ``columns`` may hold messages or segments.
    """
    filtered_row = {name: value for name, value in row.items() if name not in ignored}
    ignored = _message_keys(ignored)
    for column in columns:
        value = get_column_value(filtered_row, column)
        messages = list_messages(value)
        if not any(ignored & keys.keys() for message in messages for keys in (message, *_list_parts(message))):
            continue
        if isinstance(value, dict):
            filtered_row[column] = _remove_keys(value, ignored)
        else:
            # Values that are not messages stay, and the record parser refuses them.
            turns = orjson.loads(value) if isinstance(value, str) else value
            filtered_row[column] = [_remove_keys(turn, ignored) if isinstance(turn, dict) else turn for turn in turns]
    return filtered_row


def rename_messages(row: Row, names: MessageNames, columns: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a record whose messages have the keys and roles of templates.

    Values of the columns that are not messages stay, and the record parser refuses them.
    """
    renamed_row = dict(row)
    for column in columns:
        value = get_column_value(row, column)
        messages = list_messages(value)
        if isinstance(value, dict):
            renamed_row[column] = names.rename(value, column)
        # A prompt or answer may be a text that happens to be JSON.
        elif messages and (isinstance(value, list) or all(map(names.occur_in, messages))):
            turns = orjson.loads(value) if isinstance(value, str) else value
            renamed_row[column] = [
                names.rename(turn, f"{column}[{number}]") if isinstance(turn, dict) else turn
                for number, turn in enumerate(turns)
            ]
    return renamed_row


def _message_keys(ignored: frozenset[str]) -> frozenset[str]:
    """Return the ignored names as keys, without a prefix such as ``messages[].``."""
    return frozenset(name.rpartition("[].")[2] for name in ignored)


def _list_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the typed parts of a message's content."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _remove_keys(message: Mapping[str, Any], ignored: frozenset[str]) -> dict[str, Any]:
    filtered_message = {key: value for key, value in message.items() if key not in ignored}
    if isinstance(filtered_message.get("content"), list):
        filtered_message["content"] = [
            {key: value for key, value in part.items() if key not in ignored} if isinstance(part, dict) else part
            for part in filtered_message["content"]
        ]
    return filtered_message


def describe_unreadable(records: Sequence[Row]) -> str:
    """Describe unsupported columns in records that fit no form; "" if there are none."""
    unsupported = {name: entry for table in COLUMN_TABLES.values() for name, entry in table.unsupported.items()}
    sentences = [
        f"column {name!r} is not supported ({entry.library}: {entry.effect}): {entry.remedy}"
        for name, entry in unsupported.items()
        if not entry.of_form and any(has_effect(row.get(name), entry) for row in records)
    ]
    return "; ".join(sentences)
