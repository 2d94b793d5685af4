"""Error text for records that fit no schema: nearest columns and a ``--map``."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Any

import orjson

from batchloom.chat.schema.column_mapping import match_mapping_columns
from batchloom.chat.schema.record_columns import (
    Row,
    format_columns,
    get_column_value,
    is_non_empty,
    parse_label,
)
from batchloom.chat.schema.record_keys import describe_unreadable
from batchloom.chat.schema.schemas import (
    FORM_RULES,
    PROMPT_COLUMNS,
    RESPONSE_COLUMNS,
    FormRule,
    SchemaForm,
)
from batchloom.chat.schema.turns import is_turns
from batchloom.core.errors import SchemaError
from batchloom.core.wording import BYTES_REMEDY, describe_json_type

_KNOWN_COLUMNS = tuple(dict.fromkeys(name for rule in FORM_RULES for names in rule.required.values() for name in names))
# Words in an unknown column name that indicate its role.
_ROLE_WORDS = {
    "prompt": {
        *("prompt", "instruction", "question", "query", "input", "problem", "request"),
        *("source", "article", "utterance"),
    },
    "response": {
        *("response", "output", "answer", "completion", "solution", "reply", "target"),
        *("summary", "translation"),
    },
    "text": {"text", "body", "document", "content", "story", "passage", "raw", "code"},
}
# Word pairs for the better and the worse answer, in two column names that are otherwise equal.
_PREFERENCE_WORDS = (
    *(("chosen", "rejected"), ("accepted", "rejected"), ("preferred", "rejected")),
    *(("preferred", "dispreferred"), ("positive", "negative"), ("pos", "neg")),
    *(("winner", "loser"), ("winning", "losing"), ("win", "lose")),
    *(("better", "worse"), ("good", "bad")),
)
# Words of columns that affect training: answers, judgements, and the context of a prompt.
_TRAINING_WORDS = {
    *_ROLE_WORDS["response"] - {"target", "translation", "summary"},
    *(word for pair in _PREFERENCE_WORDS for word in pair),
    *("choice", "option", "candidate", "alternative", "distractor", "incorrect", "wrong"),
    *("label", "preference", "rank", "ranking", "correct"),
    *("history", "context", "previous", "past", "system", "tool", "function"),
    *("dialog", "dialogue", "conversation", "message", "turn"),
}
# Words of columns that describe a record and are neither trained nor a prompt.
_METADATA_WORDS = {
    *("id", "uid", "uuid", "idx", "index", "hash", "url", "uri", "lang", "language", "split"),
    *("date", "time", "timestamp", "score", "license", "num", "count", "length"),
}
_RULES_BY_FORM: dict[SchemaForm, FormRule] = {rule.form: rule for rule in FORM_RULES}


def unrecognised_schema_error(rows: Sequence[Row], mapping: Mapping[str, str]) -> SchemaError:
    """Return the error for records that fit no form."""
    columns = _find_first_values(rows)
    if not columns:
        return SchemaError("no schema fits: the first records are empty; give records with columns")
    column_list = (
        format_columns(columns)
        if all(isinstance(v, str) for v in columns.values())
        else _describe_column_types(columns)
    )
    parts = [f"no schema fits: the records have {column_list}"]
    if unsupported := describe_unreadable(rows):
        parts.append(unsupported)
    byte_columns = [name for name, value in columns.items() if isinstance(value, bytes)]
    if any(name in _KNOWN_COLUMNS for name in byte_columns):
        parts.append(f"if {format_columns(byte_columns)} is text, {BYTES_REMEDY}")
        return SchemaError("; ".join(parts), list(columns))
    prompt, response = (
        _find_known_column(columns, PROMPT_COLUMNS),
        _find_known_column(columns, RESPONSE_COLUMNS),
    )
    if prompt and not response:
        parts.append(
            f"{prompt!r} is a known prompt column, but there is no {_format_alternatives(RESPONSE_COLUMNS)} with the "
            "response"
        )
    elif response and not prompt:
        parts.append(
            f"{response!r} is a known response column, but there is no {_format_alternatives(PROMPT_COLUMNS)} with "
            "the prompt"
        )
    elif near_columns := _rank_near_forms(columns):
        parts.append(
            "nearest known columns: " + ", ".join(f"{n!r} is near {known_column!r}" for n, known_column in near_columns)
        )
    else:
        parts.append(f"known columns are {', '.join(_KNOWN_COLUMNS)}")
    # A mapping given by the user is not overridden.
    guess = {} if mapping else _guess_mapping(columns)
    left_out = _find_unused_columns(guess, columns, rows)
    if left_out:
        guess = {}
        parts.append(f"no --map is suggested because it would leave out {format_columns(left_out)}")
    # --map strips white space from the ends of names.
    resolved_mapping = match_mapping_columns({role: name.strip() for role, name in guess.items()}, columns)
    has_all_columns = any(
        all(get_column_value(row, name) is not None for name in resolved_mapping.values()) for row in rows
    )
    if guess and has_all_columns and not any("," in column for column in guess.values()):
        suggestion = ",".join(f"{role}={column}" for role, column in guess.items())
        parts.append(f"if that is correct, name the columns: --map {shlex.quote(suggestion)}")
        return SchemaError("; ".join(parts), list(columns), suggestion)
    parts.append("name the columns with --map prompt=...,response=..., --map chosen=...,rejected=... or --map text=...")
    return SchemaError("; ".join(parts), list(columns))


def _find_first_values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return every column of the records with its first non-null value."""
    columns: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            if columns.get(name) is None:
                columns[name] = value
    return columns


def _describe_column_types(columns: Mapping[str, Any]) -> str:
    names = list(columns.items())
    descriptions = [
        repr(name) if isinstance(value, str) else f"{name!r} ({describe_json_type(value)})"
        for name, value in names[:12]
    ]
    suffix = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(descriptions) + suffix


def _find_known_column(columns: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(columns.get(name), str)), None)


def _format_alternatives(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _rank_near_forms(columns: Mapping[str, Any]) -> list[tuple[str, str]]:
    near = []
    for name in columns:
        close = difflib.get_close_matches(name.lower(), _KNOWN_COLUMNS, n=1, cutoff=0.75)
        if close and close[0] != name:
            near.append((name, close[0]))
    return near


def _guess_mapping(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return a likely mapping of these columns, else an empty one."""
    for good, bad in _PREFERENCE_WORDS:
        if pair := _guess_pair_mapping(columns, good, bad):
            return pair
    for rejected in ("rejected_response", "rejected_messages"):
        if rejected in columns:
            speech = [name for name, value in columns.items() if name != rejected and _is_speech(value)]
            answer = _find_closest_column("response", RESPONSE_COLUMNS, speech)
            prompt = _find_closest_column("prompt", PROMPT_COLUMNS, [name for name in speech if name != answer])
            if answer and prompt:
                pair = {"chosen": answer, "rejected": rejected, "prompt": prompt}
                return {**pair, **_find_optional_roles("pair", columns, set(pair.values()))}
    for name, value in columns.items():
        if _is_messages(value):
            return {"messages": name, **_find_optional_roles("messages", columns, {name})}
    texts = {name: name for name, value in columns.items() if isinstance(value, str)}
    # A list may hold the answer. Several answers in a list would be lost.
    texts |= {
        name: f"{name}[0]"
        for name, value in columns.items()
        if isinstance(value, list) and value and isinstance(value[0], str)
    }
    texts = {name: path for name, path in texts.items() if not _split_column_name(name) & _METADATA_WORDS}
    if not texts:
        # The records may be wrapped in an object.
        texts = {
            path: path
            for name, value in columns.items()
            if isinstance(value, dict)
            for key, inner in value.items()
            if isinstance(inner, str)
            and not _split_column_name(str(key)) & _METADATA_WORDS
            and get_column_value(columns, path := f"{name}.{key}") is inner
        }
    prompt = _find_closest_column("prompt", PROMPT_COLUMNS, list(texts))
    response = _find_closest_column("response", RESPONSE_COLUMNS, [name for name in texts if name != prompt])
    remaining_columns = [name for name in texts if name not in (prompt, response)]
    if response and not prompt and len(remaining_columns) == 1:
        prompt = remaining_columns[0]
    if prompt and not response and len(remaining_columns) == 1:
        response = remaining_columns[0]
    if prompt and response:
        optional_roles = _find_optional_roles("instruction", columns, {prompt, response})
        return {"prompt": texts[prompt], "response": texts[response], **optional_roles}
    text = _find_closest_column("text", ("text", "content"), list(texts)) or (
        next(iter(texts)) if len(texts) == 1 and prompt is None and response is None else None
    )
    return {"text": texts[text]} if text else {}


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
        pair, used = {"chosen": name, "rejected": rejected_column}, {name, rejected_column}
        answer = columns[name]
        turns = [answer] if isinstance(answer, dict) else answer
        is_conversation = isinstance(turns, list) and any(_get_turn_role(turn) in ("user", "human") for turn in turns)
        speech = [
            column
            for column, value in columns.items()
            if column not in used
            and _is_speech(value)
            and not _split_column_name(column) & (_METADATA_WORDS | {good, bad, "system", "tool"})
        ]
        # Complete conversations hold the prompt.
        prompt = None if is_conversation else _find_closest_column("prompt", PROMPT_COLUMNS, speech)
        if not is_conversation and prompt is None and len(speech) == 1:
            (prompt,) = speech
        if prompt is not None:
            pair["prompt"] = prompt
        return {
            **pair,
            **_find_optional_roles("pair", columns, {*used, *([prompt] if prompt else [])}),
        }
    return {}


def _find_optional_roles(form: SchemaForm, columns: Mapping[str, Any], used: AbstractSet[str]) -> dict[str, str]:
    """Return optional roles whose column has a known name in another case."""
    optional_roles = {}
    for role, names in _RULES_BY_FORM[form].optional.items():
        matches = [name for name in columns if name not in used and name.lower() in names]
        if role != "prompt" and matches and not set(matches) & set(names):
            optional_roles[role] = matches[0]
    return optional_roles


def _find_unused_columns(guess: Mapping[str, str], columns: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the columns that matter for training and that a guess would not use."""
    if not guess:
        return []
    rule = next(rule for rule in FORM_RULES if guess.keys() <= rule.roles)
    optional_columns = {
        name
        for role, names in rule.optional.items()
        for name in names
        if role != "label" or parse_label(columns.get(name)) is not None
    }
    left_out = []
    for name, value in columns.items():
        inner = {f"{name}.{key}": item for key, item in value.items()} if _is_plain(value) else {}
        for path, item in (inner or {name: value}).items():
            if path in guess.values() or path in optional_columns or not is_non_empty(item):
                continue
            if f"{path}[0]" in guess.values():
                if any(len(get_column_value(row, path) or ()) > 1 for row in rows):
                    left_out.append(f"{path}[1]")
            elif _is_meaningful(path, item):
                left_out.append(path)
    return left_out


def _is_meaningful(name: str, value: Any) -> bool:
    """Return whether a column affects training, by its turns or its name."""
    words = _split_column_name(name)
    return _is_messages(value) or bool(words & _TRAINING_WORDS and not words & _METADATA_WORDS)


def _is_plain(value: Any) -> bool:
    """Return whether a value is an object of columns, not a message."""
    return isinstance(value, dict) and not _get_turn_role(value)


def _get_turn_role(turn: Any) -> Any:
    return (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None


def _is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, or JSON text of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return False
    return isinstance(value, list) and bool(value) and is_turns(value) and bool(_get_turn_role(value[0]))


def _is_speech(*values: Any) -> bool:
    """Return whether all values are texts, messages or lists of messages."""
    # Only a column of messages may hold them as JSON text.
    return all(
        not _is_messages(value) if isinstance(value, str) else _get_turn_role(value) or _is_messages(value)
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
