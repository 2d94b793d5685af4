"""What is said of records that fit no schema: their columns, the nearest known, a ``--map``."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from batchloom.chat.columns import Row, listed, value_at
from batchloom.chat.mapping import as_found
from batchloom.chat.record_keys import describe_unreadable
from batchloom.chat.schema import FORMS, PROMPT, RESPONSE
from batchloom.chat.turns import is_turns
from batchloom.core.errors import SchemaError
from batchloom.core.values import BYTES_REMEDY, kind_of

_KNOWN = tuple(
    dict.fromkeys(name for rule in FORMS for names in rule.required.values() for name in names)
)
# Words in the name of a column that tell its role, where the name itself is not known.
_WORDS = {
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


def unrecognised(rows: Sequence[Row], mapping: Mapping[str, str]) -> SchemaError:
    """The error for records that fit no form."""
    columns = _columns(rows)
    if not columns:
        return SchemaError("no schema fits: the first records are empty; give records with columns")
    shown = (
        listed(columns)
        if all(isinstance(v, str) for v in columns.values())
        else _with_kinds(columns)
    )
    parts = [f"no schema fits: the records have {shown}"]
    if foreign := describe_unreadable(rows):
        return SchemaError(f"{parts[0]}; {foreign}", list(columns))
    raw = [name for name, value in columns.items() if isinstance(value, bytes)]
    if any(name in _KNOWN for name in raw):
        parts.append(f"if {listed(raw)} is text, {BYTES_REMEDY}")
        return SchemaError("; ".join(parts), list(columns))
    prompt, response = _known(columns, PROMPT), _known(columns, RESPONSE)
    if prompt and not response:
        parts.append(
            f"{prompt!r} is known as a prompt, but there is no {_either(RESPONSE)} to answer it"
        )
    elif response and not prompt:
        parts.append(
            f"{response!r} is known as a response, but there is no {_either(PROMPT)} before it"
        )
    elif near := _nearest(columns):
        parts.append("nearest known: " + ", ".join(f"{n!r} is near {known!r}" for n, known in near))
    else:
        parts.append(f"known are {', '.join(_KNOWN)}")
    guess = _guess(columns, mapping)
    # As --map takes them: without the white space at the ends of names.
    typed = as_found({role: name.strip() for role, name in guess.items()}, columns)
    together = any(all(value_at(row, name) is not None for name in typed.values()) for row in rows)
    if guess and together and not any("," in column for column in guess.values()):
        suggestion = ",".join(f"{role}={column}" for role, column in guess.items())
        parts.append(f"if that is what they are, name the columns: --map {shlex.quote(suggestion)}")
        return SchemaError("; ".join(parts), list(columns), suggestion)
    parts.append("name the columns with --map prompt=...,response=... or --map text=...")
    return SchemaError("; ".join(parts), list(columns))


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Every column of the records with its first value that is not null."""
    columns: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            if columns.get(name) is None:
                columns[name] = value
    return columns


def _with_kinds(columns: Mapping[str, Any]) -> str:
    names = list(columns.items())
    shown = [
        repr(name) if isinstance(value, str) else f"{name!r} ({kind_of(value)})"
        for name, value in names[:12]
    ]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(shown) + more


def _known(columns: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(columns.get(name), str)), None)


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _nearest(columns: Mapping[str, Any]) -> list[tuple[str, str]]:
    near = []
    for name in columns:
        close = difflib.get_close_matches(name.lower(), _KNOWN, n=1, cutoff=0.75)
        if close and close[0] != name:
            near.append((name, close[0]))
    return near


def _guess(columns: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, str]:
    """A mapping that would make a record of these columns, empty where nothing speaks for one."""
    if mapping:
        # A person has chosen already; a guess would overrule them.
        return {}
    for name, value in columns.items():
        if (
            isinstance(value, list)
            and value
            and is_turns(value)
            and {"role", "from"} & value[0].keys()
        ):
            return {"messages": name}
    texts = {name: name for name, value in columns.items() if isinstance(value, str)}
    # A list of texts may hold the answers; its first is one.
    texts |= {
        name: f"{name}[0]"
        for name, value in columns.items()
        if isinstance(value, list) and value and isinstance(value[0], str)
    }
    if not texts:
        # Records that are wrapped in an object.
        texts = {
            path: path
            for name, value in columns.items()
            if isinstance(value, dict)
            for key, inner in value.items()
            if isinstance(inner, str) and value_at(columns, path := f"{name}.{key}") is inner
        }
    prompt = _likeliest("prompt", PROMPT, list(texts))
    response = _likeliest("response", RESPONSE, [name for name in texts if name != prompt])
    rest = [name for name in texts if name not in (prompt, response)]
    if response and not prompt and len(rest) == 1:
        prompt = rest[0]
    if prompt and not response and len(rest) == 1:
        response = rest[0]
    if prompt and response:
        return {"prompt": texts[prompt], "response": texts[response]}
    text = _likeliest("text", ("text", "content"), list(texts)) or (
        next(iter(texts)) if len(texts) == 1 and prompt is None and response is None else None
    )
    return {"text": texts[text]} if text else {}


def _likeliest(role: str, names: Sequence[str], columns: list[str]) -> str | None:
    """The column most like this role, None where none is like it."""

    def likeness(column: str) -> int:
        words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", column)]
        if column in names:
            return 4
        if column.lower() in names:
            return 3
        if difflib.get_close_matches(column.lower(), names, n=1, cutoff=0.75):
            return 2
        return 1 if {word.removesuffix("s") for word in words} & _WORDS[role] else 0

    best = max(columns, key=likeness, default=None)
    return best if best is not None and likeness(best) else None
