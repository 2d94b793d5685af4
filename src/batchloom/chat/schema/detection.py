"""Detection of a source's schema, and errors that suggest a ``--map``."""

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import replace
from typing import Any

import orjson

from batchloom.chat.schema.agent_traces import SESSION_REMEDY, is_session_event, is_trace_message
from batchloom.chat.schema.record_keys import (
    TURN_ROLES,
    check_first_records,
    decode_items,
    describe_unreadable,
    drop_keys,
    list_messages,
)
from batchloom.chat.schema.record_media import is_medium_part
from batchloom.chat.schema.schemas import (
    ANSWER_RULE,
    CHOSEN_COLUMNS,
    FORM_RULES,
    INTERLEAVED_RULE,
    LAST_PROMPT_COLUMN,
    MESSAGE_MAPPING_NAMES,
    NAMED_KEYS,
    NAMED_ROLES,
    PROMPT_COLUMNS,
    PROMPT_RULES,
    PROMPTS_REMEDY,
    RESPONSE_COLUMNS,
    TURN_COLUMNS,
    FormRule,
    Row,
    Schema,
    SchemaForm,
    find_mapping_problems,
    format_columns,
    get_column_value,
    guess_message_names,
    is_non_empty,
    make_message_names,
    match_mapping_columns,
    parse_label,
)
from batchloom.chat.schema.turns import ASKING_ROLES, get_role, get_sender, has_readable_names, is_turns
from batchloom.core.document import MESSAGE_ROLES
from batchloom.core.errors import SchemaError
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.core.settings import raise_problems, suggest
from batchloom.core.wording import BYTES_REMEDY, describe_json_type, format_list

RoleColumns = dict[str, tuple[str, ...]]
# Columns in order, each with the trait of its value that detection uses.
RecordShape = tuple[tuple[str, str | None], ...]
# Names that only one library uses, which the list of known columns in errors leaves out.
_RARE_COLUMNS = frozenset(
    (
        *(*CHOSEN_COLUMNS[1:], "conversation", "query", "segments"),
        "input.messages",
        "preferred_output",
        "non_preferred_output",
    )
)
_KNOWN_COLUMNS = tuple(
    dict.fromkeys(
        name for rule in FORM_RULES for names in rule.required.values() for name in names if name not in _RARE_COLUMNS
    )
)
# Words in an unknown column name that indicate its role.
_ROLE_WORDS = {
    "prompt": {
        "prompt",
        "instruction",
        "question",
        "query",
        "input",
        "problem",
        "request",
        "source",
        "article",
        "utterance",
    },
    "response": {
        "response",
        "output",
        "answer",
        "completion",
        "solution",
        "reply",
        "target",
        "summary",
        "translation",
    },
    "text": {"text", "body", "document", "content", "story", "passage", "raw", "code"},
}
_TEXT_NAMES = ("text", "content")
_MAX_PATHS = 5
# Word pairs for the better and the worse answer, in two column names that are otherwise equal.
_PREFERENCE_WORDS = (
    ("chosen", "rejected"),
    ("accepted", "rejected"),
    ("preferred", "rejected"),
    ("preferred", "dispreferred"),
    ("positive", "negative"),
    ("pos", "neg"),
    ("winner", "loser"),
    ("winning", "losing"),
    ("win", "lose"),
    ("better", "worse"),
    ("good", "bad"),
)
# Words of columns that affect training: answers, judgements, and the context of a prompt.
_TRAINING_WORDS = {
    *_ROLE_WORDS["response"] - {"target", "translation", "summary"},
    *(word for pair in _PREFERENCE_WORDS for word in pair),
    "choice",
    "option",
    "candidate",
    "alternative",
    "distractor",
    "incorrect",
    "wrong",
    "label",
    "preference",
    "rank",
    "ranking",
    "correct",
    "history",
    "context",
    "previous",
    "past",
    "system",
    "tool",
    "function",
    "dialog",
    "dialogue",
    "conversation",
    "message",
    "turn",
}
# Words of columns that describe a record and are neither trained nor a prompt.
_METADATA_WORDS = {
    "id",
    "uid",
    "uuid",
    "idx",
    "index",
    "hash",
    "url",
    "uri",
    "lang",
    "language",
    "split",
    "date",
    "time",
    "timestamp",
    "score",
    "license",
    "num",
    "count",
    "length",
}
# Roles without which a record would mean something else.
_ALL_OR_NONE_ROLES = ("prompt", "label", "labels", "loss_mask", "loss_weights", "attention_mask")
# Columns of messages and tools.
_NESTED_NAMES = frozenset(
    name
    for rule in (*FORM_RULES, *PROMPT_RULES)
    for role, names in (*rule.required.items(), *rule.optional.items())
    if role in (*TURN_ROLES, "tools")
    for name in names
)
_RULES_BY_FORM: dict[SchemaForm, FormRule] = {rule.form: rule for rule in FORM_RULES}


def detect_schema(
    records: Sequence[Row],
    mapping: Mapping[str, str] | None = None,
    *,
    media: bool = False,
    ignore: Iterable[str] = (),
    carry: Mapping[str, str] | None = None,
) -> Schema:
    """Detect the schema of a source from its first records.

    Forms are tried in the order of ``FORM_RULES``. The first form that fits at least half of the
    records wins, else the one that fits most. A rendered ``text`` next to instruction and output (as
    in Alpaca) is therefore not read: the conversation is rendered with the current template.
    ``--map text=text`` selects the text instead.

    Args:
        records: the first records of the source, as dicts.
        mapping: column of each role; a column may be a path (``answers.text[0]``), and an empty one
            disables the role. Roles that it does not name are still detected.
        media: whether images and audio are read; if so, texts may hold media, too.
        ignore: columns and message keys that are treated as absent.
        carry: if given, only prompts are read, and each carries these columns, by the name they get.

    Raises:
        SettingsError: roles that are unknown or cannot be combined.
        SchemaError: no form fits, a mapped column is in no record, or a column has a meaning
            in another library that is not supported.
    """
    mapping = dict(mapping or {})
    ignored = frozenset(ignore)
    raise_problems(find_mapping_problems(mapping))
    if not records:
        raise SchemaError("no schema fits: there are no records; give an input that has some")
    nested_names = _NESTED_NAMES.union(mapping.values())
    records = [
        {name: decode_items(value) if name in nested_names else value for name, value in row.items()} for row in records
    ]
    if ignored:
        records = [drop_keys(row, ignored) for row in records]
    mapping = match_mapping_columns(mapping, (name for row in records for name in row))
    _check_named_columns(records, mapping, {} if carry is None else carry)
    left_out = frozenset(
        name
        for rule in FORM_RULES
        for role, names in rule.optional.items()
        if mapping.get(role) == ""
        for name in names
    )
    if carry is not None:
        rules: Sequence[FormRule] = PROMPT_RULES
    elif media:
        rules = (*FORM_RULES[:-1], INTERLEAVED_RULE, FORM_RULES[-1])
    else:
        rules = FORM_RULES
    if mapping.get("response") and carry is None:
        rules = (*rules, ANSWER_RULE)
    schema = replace(
        _find_best_schema(records, mapping, rules),
        ignored=ignored,
        left_out=left_out,
        carried=tuple((carry or {}).items()),
        names=make_message_names(mapping),
    )
    try:
        check_first_records(records, schema)
    except SchemaError as error:
        if error.suggestion and not _fits_mapping(records, {"chosen": "chosen", "rejected": "rejected"}):
            error.suggestion = None
        raise
    _check_message_names(records, schema, mapping)
    if not mapping:
        _refuse_single_messages(records, schema)
    return schema


def _refuse_single_messages(records: Sequence[Row], schema: Schema) -> None:
    """Refuse rows that are one message each, whose conversations cannot be told apart."""
    roles = [row.get("role") for row in records]
    if schema.form == "text" and all(isinstance(role, str) and role in MESSAGE_ROLES for role in roles):
        column = schema.columns["text"][0]
        raise SchemaError(
            "each row is one message of a conversation; write a row for each conversation, as with jq -c "
            f"'{{messages: .}}' for a list of messages, or read each as a text: --map text={column}",
            list(records[0]),
        )


def _check_message_names(records: Sequence[Row], schema: Schema, mapping: Mapping[str, str]) -> None:
    """Refuse messages of unknown keys or roles, with the mapping that reads them."""
    messages = [
        message
        for role in TURN_ROLES
        for column in schema.columns.get(role, ())
        for value in (get_column_value(row, column) for row in records)
        # A prompt or answer may be a text that happens to be JSON.
        if role == "messages" or not isinstance(value, str)
        for message in list_messages(value)
    ]
    if not messages:
        return
    keys = dict.fromkeys(key for message in messages for key in message)
    names = schema.names
    problems = [
        f"--map {role}={mapping[role]}: no message has {mapping[role]!r}{suggest(mapping[role], map(str, keys))}"
        for role in NAMED_KEYS
        if mapping.get(role) and mapping[role] not in keys
    ]
    if problems:
        raise SchemaError(f"{'; '.join(problems)}; the messages have {format_columns(keys)}", list(keys))
    renamed = [message if names is None else names.rename(message, "") for message in messages]
    if any(has_readable_names(message) for message in renamed):
        return
    guess, unknown_values = guess_message_names(messages)
    # A mapping given by the user is extended, not overridden.
    suggestion = {**{role: column for role, column in mapping.items() if role not in MESSAGE_MAPPING_NAMES}, **guess}
    if schema.form == "messages":
        suggestion = {"messages": schema.columns["messages"][0], **suggestion}
    text = ",".join(f"{role}={name}" for role, name in suggestion.items())
    parts = [f"the messages have {format_columns(keys)}, and no known role and content"]
    complete = bool(guess) and not unknown_values and not names
    if complete:
        parts.append(f"if that is correct, name them: --map {shlex.quote(text)}")
    elif guess or unknown_values:
        values = format_list([repr(value) for value in unknown_values], 12)
        parts.append(
            f"name the roles of {values}: --map {text + ',' if text else ''}user=...,assistant=... (roles are "
            f"{', '.join(NAMED_ROLES)})"
        )
    else:
        parts.append("name their keys: --map role=...,content=...")
    raise SchemaError("; ".join(parts), list(keys), text if complete else None)


def _find_best_schema(records: Sequence[Row], mapping: Mapping[str, str], rules: Sequence[FormRule]) -> Schema:
    """Return the first schema that fits half of the records, else the best fit."""
    mapped_roles = {role for role, column in mapping.items() if column and role not in MESSAGE_MAPPING_NAMES}
    best: tuple[int, Schema] | None = None
    for rule in rules:
        if not mapped_roles <= rule.roles or any(mapping.get(role) == "" for role in rule.required):
            continue
        fitting, schema = _fit_form(rule, records, mapping)
        if schema is not None and rule is INTERLEAVED_RULE and not _has_any_media(schema, records):
            continue
        if schema is not None and 2 * fitting >= len(records):
            return schema
        if schema is not None and fitting > (best[0] if best else 0):
            best = fitting, schema
    if best is None and rules is PROMPT_RULES:
        raise _missing_prompt_error(records)
    if best is None:
        raise unrecognised_schema_error(records, mapping)
    return best[1]


def _missing_prompt_error(records: Sequence[Row]) -> SchemaError:
    columns = list(dict.fromkeys(name for row in records for name in row))
    names = [name for rule in PROMPT_RULES for column_names in rule.required.values() for name in column_names]
    return SchemaError(
        f"no prompt: the records have {format_columns(columns)} and none of {format_columns(names)}; name the column "
        "that holds the prompt with --map prompt=...",
        columns,
    )


def compute_record_shape(records: Sequence[Row]) -> RecordShape | None:
    """Return all that detection uses of flat records: equal shapes have equal schemas.

    Returns None if records differ, or hold lists or objects, which detection must inspect.
    """
    shape: RecordShape | None = None
    for row in records:
        row_shape = tuple((name, _get_value_trait(value)) for name, value in row.items())
        if (shape or row_shape) != row_shape or any(trait is None for _, trait in row_shape):
            return None
        shape = row_shape
    return shape


def _get_value_trait(value: Any) -> str | None:
    """Return the trait of a plain value; None for lists and objects."""
    if value is None:
        return "null"
    if isinstance(value, str):
        if not value:
            return "empty"
        if is_turns(value):
            return "turns"
        return "label" if parse_label(value) is not None else "text"
    if isinstance(value, bool | int | float):
        return "number" if parse_label(value) is None else "number of a label"
    return None


def _check_named_columns(records: Sequence[Row], mapping: Mapping[str, str], carry: Mapping[str, str]) -> None:
    problems = []
    columns = dict.fromkeys(name for row in records for name in row)
    for role, column in mapping.items():
        if (
            column
            and role not in MESSAGE_MAPPING_NAMES
            and all(get_column_value(row, column) is None for row in records)
        ):
            hint = "; a value of the role inside messages is system_role=" if role == "system" else ""
            problems.append(f"--map {role}={column}: no column {column!r}{suggest(column, columns) or hint}")
    problems += [
        f"--carry {column}: no column {column!r}{suggest(column, columns)}"
        for column in carry.values()
        if all(column not in row and get_column_value(row, column) is None for row in records)
    ]
    if problems:
        sentence = (
            f"{'; '.join(problems)}; the records have {format_columns(columns)}: name columns that every input has, "
            "prepare inputs with other columns separately, or give each input its own mapping in a YAML manifest"
        )
        raise SchemaError(sentence, list(columns))


def _fit_form(rule: FormRule, records: Sequence[Row], mapping: Mapping[str, str]) -> tuple[int, Schema | None]:
    """Return the number of fitting records and the schema, None if no record fits."""
    columns: RoleColumns = {}
    for role, names in rule.required.items():
        column = _choose_column(rule.form, role, names, records, mapping)
        if column is None:
            return 0, None
        columns[role] = (column,)
    fitting = sum(
        all(_holds_role(rule.form, role, row, columns[role][0], mapping) for role in rule.required) for row in records
    )
    used = {names[0] for names in columns.values()}
    for role, names in rule.optional.items():
        candidate_names = names
        if rule.form == "pair" and role == "prompt":
            candidate_names = (*names, *_find_further_prompts(columns, records))
        if optional_columns := _choose_optional_columns(rule.form, role, candidate_names, records, mapping, used):
            columns[role] = optional_columns
            used.update(optional_columns)
    if not fitting:
        return 0, None
    if "label" in columns:
        # The loss of preferences has no weights; without its role, the column is refused.
        columns.pop("weight", None)
    late = _find_late_columns(rule, columns, records, mapping)
    mapped = any(mapping.get(role) for role in rule.required)
    return fitting, Schema(rule.form, columns, _describe_schema(rule, columns, records), late, mapped)


def _find_further_prompts(columns: RoleColumns, records: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns that are the prompt of these pairs if they have no other."""
    sides = columns["chosen"][0], columns["rejected"][0]
    is_ranking = any(_is_ranking(row, *sides) for row in records)
    has_input = any(
        isinstance(get_column_value(row, sides[0]), str | dict) and is_non_empty(row.get(LAST_PROMPT_COLUMN))
        for row in records
    )
    return (*(TURN_COLUMNS if is_ranking else ()), *([LAST_PROMPT_COLUMN] if has_input else ()))


def _is_ranking(row: Row, chosen: str, rejected: str) -> bool:
    """Return whether the turns of a record are the prompt of its two answers.

    So they are in LLaMA-Factory's ranking sets, where each answer is one message, and in axolotl's
    (chat_template.default), where the turns end before the answer.
    """
    answers = [get_column_value(row, name) for name in (chosen, rejected)]
    if all(isinstance(answer, dict) for answer in answers):
        return True
    turns = next((messages for name in TURN_COLUMNS if (messages := list_messages(row.get(name)))), [])
    return all(map(is_non_empty, answers)) and _asks(turns)


def _asks(turns: Sequence[Any]) -> bool:
    """Return whether the model answers the last of these turns."""
    return bool(turns) and get_role(turns[-1]) in ASKING_ROLES


def _has_any_media(schema: Schema, records: Sequence[Row]) -> bool:
    """Return whether any record has a medium in its text or in a media column."""
    media_columns = [name for kind in MEDIUM_KINDS for name in schema.columns.get(f"{kind}s", ())]
    column = schema.columns["text"][0]
    for row in records:
        value = get_column_value(row, column)
        if isinstance(value, list) and any(map(is_medium_part, value)):
            return True
        if any(is_non_empty(get_column_value(row, name)) for name in media_columns):
            return True
    return False


def _choose_column(
    form: SchemaForm, role: str, names: Sequence[str], records: Sequence[Row], mapping: Mapping[str, str]
) -> str | None:
    """Return the first name that half of the records have, else the commonest."""
    if role in mapping:
        return mapping[role] or None
    counts = {name: sum(_holds_role(form, role, row, name, mapping) for row in records) for name in names}
    for name, count in counts.items():
        if 2 * count >= len(records):
            return name
    most_common = max(counts, key=lambda name: counts[name], default=None)
    return most_common if most_common is not None and counts[most_common] else None


def _choose_optional_columns(
    form: SchemaForm,
    role: str,
    names: Sequence[str],
    records: Sequence[Row],
    mapping: Mapping[str, str],
    used: set[str],
) -> tuple[str, ...]:
    """Return the columns of an optional role.

    If a record without the role would mean something else (label, labels, the prompt of a pair), the role has
    one column, which every record must have. Other roles get every known name, even if the first records lack
    them, so that a late ``input`` or ``system`` is not dropped.
    """
    if mapping.get(role):
        return (mapping[role],)
    free = tuple(name for name in names if name not in used)
    if role in mapping or not free:
        return ()
    if role in _ALL_OR_NONE_ROLES:
        column = _choose_column(form, role, free, records, mapping)
        if role == "label" and column:
            values = [v for row in records if (v := get_column_value(row, column)) is not None]
            if 2 * sum(parse_label(value) is not None for value in values) < len(values):
                # These are the classes of some other task, which happen to begin at 0.
                return ()
        return (column,) if column else ()
    return free


def _find_late_columns(
    rule: FormRule, columns: RoleColumns, records: Sequence[Row], mapping: Mapping[str, str]
) -> RoleColumns:
    """Return columns of all-or-none roles that none of the first records has."""
    used = {name for names in columns.values() for name in names}
    free = {
        role: tuple(
            name
            for name in rule.optional[role]
            if name not in used and not any(is_non_empty(get_column_value(row, name)) for row in records)
        )
        for role in _ALL_OR_NONE_ROLES
        if role in rule.optional and role not in columns and role not in mapping
    }
    return {role: names for role, names in free.items() if names}


def _is_number_series(value: Any) -> bool:
    # Parquet readers return numpy arrays.
    return isinstance(value, list | tuple) or hasattr(value, "__array__")


def _is_segments(value: Any) -> bool:
    """Return whether a value is a list of segments of axolotl: a text and a label."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and {"text", "label"} <= item.keys() for item in value)
    )


_ROLE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "messages": is_turns,
    "text": lambda value: isinstance(value, str),
    "label": lambda value: parse_label(value) is not None,
    "segments": _is_segments,
    **dict.fromkeys(("input_ids", "labels", "loss_mask", "loss_weights", "attention_mask"), _is_number_series),
}


def _is_text_or_parts(value: Any) -> bool:
    """Return whether a value is a text, or a list of texts, nulls and typed parts."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and bool(value)
        and all(item is None or isinstance(item, str) or (isinstance(item, dict) and "type" in item) for item in value)
    )


def _holds_role(form: SchemaForm, role: str, row: Row, column: str, mapping: Mapping[str, str]) -> bool:
    """Return whether the column fits this role; a mapped column needs only a value."""
    value = get_column_value(row, column)
    if value is None or role in mapping:
        return value is not None
    if role == "messages" and _is_ranking(row, "chosen", "rejected"):
        return False
    if form == "interleaved":
        return _is_text_or_parts(value)
    if column in TURN_COLUMNS and role != "prompt":
        return is_turns(value)
    if role in _ROLE_CHECKS:
        return _ROLE_CHECKS[role](value)
    return isinstance(value, str | dict) or (isinstance(value, list) and is_turns(value))


def _describe_schema(rule: FormRule, columns: RoleColumns, records: Sequence[Row]) -> str:
    roles = [role for role in ("prompt", *rule.required) if role in columns]
    column_label = "/".join(columns[role][0] for role in dict.fromkeys(roles))
    extra = [
        name
        for role in rule.optional
        if role in columns and role not in ("prompt", "label")
        for name in columns[role]
        if any(is_non_empty(get_column_value(row, name)) for row in records)
    ]
    return f"{column_label} -> {_describe_result(rule, columns, records)}" + (
        f", with {' and '.join(extra)}" if extra else ""
    )


_RESULTS: dict[SchemaForm, str] = {
    "text": "plain text",
    "interleaved": "text with media",
    "segments": "text segments",
    "tokens": "token ids",
    "prompt": "prompts",
}


def _describe_result(rule: FormRule, columns: RoleColumns, records: Sequence[Row]) -> str:
    if rule.form in _RESULTS:
        return _RESULTS[rule.form]
    if rule.form == "pair":
        return "preference pairs" + ("" if "prompt" in columns else ", the prompt in both")
    if rule is ANSWER_RULE:
        return "an answer without a prompt"
    first = "messages" if rule.form == "messages" else "prompt"
    first_value = next((v for row in records if (v := get_column_value(row, columns[first][0])) is not None), None)
    turns = "2 turns" if first == "prompt" and isinstance(first_value, str) else "all turns"
    if isinstance(first_value, list) and first_value and isinstance(first_value[0], dict) and "from" in first_value[0]:
        turns += " (from/value)"
    return f"{turns} and a preference label" if "label" in columns else turns


def unrecognised_schema_error(rows: Sequence[Row], mapping: Mapping[str, str]) -> SchemaError:
    """Return the error for records that fit no form."""
    columns: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            if columns.get(name) is None:
                columns[name] = value
    if not columns:
        return SchemaError("no schema fits: the first records are empty; give records with columns")
    parts = [f"no schema fits: the records have {_describe_column_types(columns)}"]
    if 2 * sum(map(is_session_event, rows)) >= len(rows):
        return SchemaError("; ".join([*parts, SESSION_REMEDY]), list(columns))
    if unsupported := describe_unreadable(rows):
        parts.append(unsupported)
    byte_columns = [name for name, value in columns.items() if isinstance(value, bytes)]
    if any(name in _KNOWN_COLUMNS for name in byte_columns):
        remedy = f"name it: --text-field {byte_columns[0]}" if len(byte_columns) == 1 else BYTES_REMEDY
        parts.append(f"if {format_columns(byte_columns)} is text, {remedy}")
        return SchemaError("; ".join(parts), list(columns))
    parts.append(_describe_known_columns(columns))
    # A mapping given by the user is not overridden.
    guess = {} if mapping or _list_columns_of_one_record(rows) else _guess_mapping(columns)
    prompt = _choose_column("prompt", "prompt", PROMPT_RULES[0].required["prompt"], rows, mapping)
    if prompt and guess.get("messages") == prompt and _asks(list_messages(columns[prompt])):
        guess = {}
    prompts_remedy = [PROMPTS_REMEDY] if prompt and "chosen" not in guess else []
    left_out = _find_unused_columns(guess, columns)
    if left_out:
        guess = {}
        parts.append(f"no --map is suggested because it would leave out {format_columns(left_out)}")
    # --map strips white space from the ends of names.
    resolved_mapping = match_mapping_columns(
        {role: name.strip() for role, name in guess.items() if role not in MESSAGE_MAPPING_NAMES}, columns
    )
    has_all_columns = any(
        all(get_column_value(row, name) is not None for name in resolved_mapping.values()) for row in rows
    )
    is_writable = not any("," in column for column in guess.values())
    if guess and has_all_columns and is_writable and _fits_mapping(rows, guess):
        suggestion = ",".join(f"{role}={column}" for role, column in guess.items())
        parts.append(f"if that is correct, name the columns: --map {shlex.quote(suggestion)}")
        return SchemaError("; ".join([*parts, *prompts_remedy]), list(columns), suggestion)
    parts += _describe_nested_texts(rows, columns, only_named=bool(left_out))
    parts.append("name the columns with --map prompt=...,response=..., --map chosen=...,rejected=... or --map text=...")
    return SchemaError("; ".join([*parts, *prompts_remedy]), list(columns))


def _describe_nested_texts(rows: Sequence[Row], columns: Mapping[str, Any], *, only_named: bool) -> list[str]:
    """Describe where strings are in lists and objects, and what reads them."""
    parts = []
    if lists := _list_columns_of_one_record(rows):
        name, value = lists[0]
        step = "[] | {text: .}" if isinstance(value[0], str) else "[]"
        parts.append(
            f"{name!r} is a list of {len(value):,} in one record: write a record for each, as with jq -c "
            f"{shlex.quote(f'.[{json.dumps(name)}]{step}')}"
        )
    named_paths, other_paths = _list_text_paths(columns)
    if paths := named_paths or ([] if only_named else other_paths):
        # Names that are near none say nothing about which of several is the text.
        example = shlex.quote(f"text={paths[0]}") if named_paths or len(paths) == 1 else "text=PATH"
        verb = "joins them to one text" if lists else "reads them as texts"
        parts.append(f"strings are in {format_list(paths, _MAX_PATHS)} (--map {example} {verb})")
    return parts


def _list_columns_of_one_record(rows: Sequence[Row]) -> list[tuple[str, list[Any]]]:
    """Return the lists of an only record, which may be the records themselves."""
    return [
        (name, value)
        for row in (rows if len(rows) == 1 else ())
        for name, value in row.items()
        if isinstance(value, list)
        and len(value) > 1
        and isinstance(value[0], (str, Mapping))
        and not _is_messages(value)
    ]


def _fits_mapping(rows: Sequence[Row], mapping: Mapping[str, str]) -> bool:
    """Return whether a mapping makes records readable."""
    try:
        detect_schema(rows, mapping)
    except SchemaError:
        return False
    return True


def _describe_column_types(columns: Mapping[str, Any]) -> str:
    descriptions = [
        repr(name) if isinstance(value, str) else f"{name!r} ({describe_json_type(value)})"
        for name, value in columns.items()
    ]
    return format_list(descriptions, 12)


def _describe_known_columns(columns: Mapping[str, Any]) -> str:
    """Describe which known columns the records have, or nearly have."""
    prompt, response = (
        next((name for name in names if isinstance(columns.get(name), str)), None)
        for names in (PROMPT_COLUMNS, RESPONSE_COLUMNS)
    )
    if bool(prompt) != bool(response):
        role, other, names = (
            ("prompt", "response", RESPONSE_COLUMNS) if prompt else ("response", "prompt", PROMPT_COLUMNS)
        )
        alone = "" if prompt else f" (--map response={response} reads answers without a prompt)"
        return (
            f"{prompt or response!r} is a known {role} column, but there is no {', '.join(names[:-1])} or {names[-1]} "
            f"with the {other}{alone}"
        )
    near = {name: difflib.get_close_matches(name.lower(), _KNOWN_COLUMNS, n=1, cutoff=0.75) for name in columns}
    near_names = [f"{name!r} is near {close[0]!r}" for name, close in near.items() if close and close[0] != name]
    if near_names:
        return f"nearest known columns: {', '.join(near_names)}"
    return f"known columns are {', '.join(_KNOWN_COLUMNS)}"


def _guess_mapping(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return a likely mapping of these columns, else an empty one."""
    for good, bad in _PREFERENCE_WORDS:
        if pair := _guess_pair_mapping(columns, good, bad):
            return pair
    if mapping := _guess_responses_mapping(columns) or _guess_messages_mapping(columns):
        return mapping
    texts = [
        name
        for name, value in columns.items()
        if isinstance(value, str) and not _split_column_name(name) & _METADATA_WORDS
    ]
    prompt = _find_closest_column("prompt", PROMPT_COLUMNS, texts)
    response = _find_closest_column("response", RESPONSE_COLUMNS, [name for name in texts if name != prompt])
    remaining_columns = [name for name in texts if name not in (prompt, response)]
    if response and not prompt and len(remaining_columns) == 1:
        prompt = remaining_columns[0]
    if prompt and not response and len(remaining_columns) == 1:
        response = remaining_columns[0]
    if prompt and response:
        optional_roles = _find_optional_roles("instruction", columns, {prompt, response})
        return {"prompt": prompt, "response": response, **optional_roles}
    text = _find_closest_column("text", _TEXT_NAMES, texts)
    if text is None and len(paths := _list_text_paths(columns)[0]) == 1:
        (text,) = paths
    return {"text": text} if text else {}


def _list_text_paths(columns: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the paths of strings in objects and lists: named like a text, others."""
    named: list[str] = []
    others: list[str] = []
    for name, value in columns.items():
        element, step = (value[0], "[]") if isinstance(value, list) and value else (value, "")
        if isinstance(element, str) and step:
            (named if _find_closest_column("text", _TEXT_NAMES, [name]) else others).append(f"{name}[]")
        elif isinstance(element, Mapping) and not _is_messages(value):
            keys = [key for key, inner in element.items() if isinstance(inner, str)]
            closest = _find_closest_column("text", _TEXT_NAMES, keys)
            for key in keys:
                (named if key == closest else others).append(f"{name}{step}.{key}")
    return named, others


def _guess_responses_mapping(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the mapping of requests of OpenAI's Responses, else an empty one."""
    output = columns.get("output")
    if not (isinstance(output, list) and any(map(is_trace_message, output)) and is_non_empty(columns.get("input"))):
        return {}
    others = {role: name for role, name in (("system", "instructions"), ("tools", "tools")) if name in columns}
    return {"prompt": "input", "response": "output", **others}


def _guess_messages_mapping(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the mapping of the first column of messages, else an empty one."""
    for name, value in columns.items():
        if _is_messages(value):
            names, unknown_values = guess_message_names(list_messages(value))
            inner_names = {} if unknown_values else names
            return {"messages": name, **_find_optional_roles("messages", columns, {name}), **inner_names}
    return {}


def _guess_pair_mapping(columns: Mapping[str, Any], good: str, bad: str) -> dict[str, str]:
    """Return the mapping of two columns that differ in these words, else an empty one."""
    names = {name.lower(): name for name in columns if isinstance(name, str)}
    for name in columns:
        if good not in _split_column_name(name):
            continue
        rejected_column = names.get(re.sub(rf"(?<![a-z]){good}|{good}(?![a-z])", bad, name.lower()))
        if (
            rejected_column is None
            or rejected_column == name
            or not _is_speech(columns[name], columns[rejected_column])
        ):
            continue
        pair = {"chosen": name, "rejected": rejected_column}
        answer = columns[name]
        turns = [answer] if isinstance(answer, dict) else answer
        is_conversation = isinstance(turns, list) and any(get_role(turn) == "user" for turn in turns)
        speech = [
            column
            for column, value in columns.items()
            if column not in pair.values()
            and _is_speech(value)
            and not _split_column_name(column) & (_METADATA_WORDS | {good, bad, "system", "tool"})
        ]
        # Complete conversations hold the prompt.
        prompt = None if is_conversation else _find_closest_column("prompt", PROMPT_COLUMNS, speech)
        if not is_conversation and prompt is None and len(speech) == 1:
            (prompt,) = speech
        if prompt is not None:
            pair["prompt"] = prompt
        return pair | _find_optional_roles("pair", columns, set(pair.values()))
    return {}


def _find_optional_roles(form: SchemaForm, columns: Mapping[str, Any], used: AbstractSet[str]) -> dict[str, str]:
    """Return optional roles whose column has a known name in another case."""
    optional_roles = {}
    for role, names in _RULES_BY_FORM[form].optional.items():
        matches = [name for name in columns if name not in used and name.lower() in names]
        if role != "prompt" and matches and not set(matches) & set(names):
            optional_roles[role] = matches[0]
    return optional_roles


def _find_unused_columns(guess: Mapping[str, str], columns: Mapping[str, Any]) -> list[str]:
    """Return the columns that matter for training and that a guess would not use."""
    if not guess:
        return []
    rule = next(rule for rule in FORM_RULES if guess.keys() - set(MESSAGE_MAPPING_NAMES) <= rule.roles)
    optional_columns = {
        name
        for role, names in rule.optional.items()
        for name in names
        if role != "label" or parse_label(columns.get(name)) is not None
    }
    left_out = []
    for name, value in columns.items():
        if name not in guess.values() and name not in optional_columns and is_non_empty(value):
            words = _split_column_name(name)
            if _is_messages(value) or (words & _TRAINING_WORDS and not words & _METADATA_WORDS):
                left_out.append(name)
    return left_out


def _is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, or JSON text of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return False
    if not isinstance(value, list) or not value or not is_turns(value):
        return False
    return bool(get_sender(value[0])) or bool(guess_message_names(value)[0])


def _is_speech(*values: Any) -> bool:
    """Return whether all values are texts, messages or lists of messages."""
    # Only a column of messages may hold them as JSON text.
    return all(
        not _is_messages(value) if isinstance(value, str) else get_sender(value) or _is_messages(value)
        for value in values
    )


def _split_column_name(name: str) -> set[str]:
    """Return the words of a column name in lower case, with and without a final s."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}


def _find_closest_column(role: str, names: Sequence[str], columns: list[str]) -> str | None:
    """Return the column most similar to this role; None if none is similar."""

    def likeness(column: str) -> int:
        if column in names:
            return 4
        if column.lower() in names:
            return 3
        if difflib.get_close_matches(column.lower(), names, n=1, cutoff=0.75):
            return 2
        return 1 if _split_column_name(column) & _ROLE_WORDS[role] else 0

    best = max(columns, key=likeness, default=None)
    return best if best is not None and likeness(best) else None
