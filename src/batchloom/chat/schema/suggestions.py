"""What is said of records that fit no schema: their columns, the nearest known, a ``--map``."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Any

import orjson

from batchloom.chat.schema.column_mapping import as_found
from batchloom.chat.schema.record_columns import Row, label_of, listed, says_something, value_at
from batchloom.chat.schema.record_keys import describe_unreadable
from batchloom.chat.schema.schemas import FORMS, PROMPT, RESPONSE, Form, FormRule
from batchloom.chat.schema.turns import is_turns
from batchloom.core.errors import SchemaError
from batchloom.core.wording import BYTES_REMEDY, kind_of

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
# Words for the better and the worse answer of a preference, in the names of two columns that are alike otherwise.
_SIDES = (
    *(("chosen", "rejected"), ("accepted", "rejected"), ("preferred", "rejected")),
    *(("preferred", "dispreferred"), ("positive", "negative"), ("pos", "neg")),
    *(("winner", "loser"), ("winning", "losing"), ("win", "lose")),
    *(("better", "worse"), ("good", "bad")),
)
# Words of columns that change what is to be trained: answers, judgements, and what stands around a prompt.
_MEANINGFUL = {
    *_WORDS["response"] - {"target", "translation", "summary"},
    *(word for pair in _SIDES for word in pair),
    *("choice", "option", "candidate", "alternative", "distractor", "incorrect", "wrong"),
    *("label", "preference", "rank", "ranking", "correct"),
    *("history", "context", "previous", "past", "system", "tool", "function"),
    *("dialog", "dialogue", "conversation", "message", "turn"),
}
# Words of columns that say something about a record, and are neither trained nor a prompt.
_ABOUT = {
    *("id", "uid", "uuid", "idx", "index", "hash", "url", "uri", "lang", "language", "split"),
    *("date", "time", "timestamp", "score", "license", "num", "count", "length"),
}
_RULES: dict[Form, FormRule] = {rule.form: rule for rule in FORMS}


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
    if unsupported := describe_unreadable(rows):
        parts.append(unsupported)
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
    # A person who has chosen already is not overruled.
    guess = {} if mapping else _guess(columns)
    left_out = _left_out(guess, columns, rows)
    if left_out:
        guess = {}
        parts.append(f"no --map is proposed, for it would leave out {listed(left_out)}")
    # As --map takes them: without the white space at the ends of names.
    typed = as_found({role: name.strip() for role, name in guess.items()}, columns)
    together = any(all(value_at(row, name) is not None for name in typed.values()) for row in rows)
    if guess and together and not any("," in column for column in guess.values()):
        suggestion = ",".join(f"{role}={column}" for role, column in guess.items())
        parts.append(f"if that is what they are, name the columns: --map {shlex.quote(suggestion)}")
        return SchemaError("; ".join(parts), list(columns), suggestion)
    parts.append(
        "name the columns with --map prompt=...,response=..., --map chosen=...,rejected=... or --map text=..."
    )
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


def _guess(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping that would read these columns, empty without a likely one."""
    for good, bad in _SIDES:
        if pair := _pair(columns, good, bad):
            return pair
    for rejected in ("rejected_response", "rejected_messages"):
        if rejected in columns:
            speech = [
                name for name, value in columns.items() if name != rejected and _is_speech(value)
            ]
            answer = _likeliest("response", RESPONSE, speech)
            prompt = _likeliest("prompt", PROMPT, [name for name in speech if name != answer])
            if answer and prompt:
                pair = {"chosen": answer, "rejected": rejected, "prompt": prompt}
                return {**pair, **_others("pair", columns, set(pair.values()))}
    for name, value in columns.items():
        if _is_messages(value):
            return {"messages": name, **_others("messages", columns, {name})}
    texts = {name: name for name, value in columns.items() if isinstance(value, str)}
    # A list may hold the answer; where one holds several, they would be lost.
    texts |= {
        name: f"{name}[0]"
        for name, value in columns.items()
        if isinstance(value, list) and value and isinstance(value[0], str)
    }
    texts = {name: path for name, path in texts.items() if not _words(name) & _ABOUT}
    if not texts:
        # Records that are wrapped in an object.
        texts = {
            path: path
            for name, value in columns.items()
            if isinstance(value, dict)
            for key, inner in value.items()
            if isinstance(inner, str)
            and not _words(str(key)) & _ABOUT
            and value_at(columns, path := f"{name}.{key}") is inner
        }
    prompt = _likeliest("prompt", PROMPT, list(texts))
    response = _likeliest("response", RESPONSE, [name for name in texts if name != prompt])
    rest = [name for name in texts if name not in (prompt, response)]
    if response and not prompt and len(rest) == 1:
        prompt = rest[0]
    if prompt and not response and len(rest) == 1:
        response = rest[0]
    if prompt and response:
        others = _others("instruction", columns, {prompt, response})
        return {"prompt": texts[prompt], "response": texts[response], **others}
    text = _likeliest("text", ("text", "content"), list(texts)) or (
        next(iter(texts)) if len(texts) == 1 and prompt is None and response is None else None
    )
    return {"text": texts[text]} if text else {}


def _pair(columns: Mapping[str, Any], good: str, bad: str) -> dict[str, str]:
    """Return the mapping of a pair whose names differ in two words, else an empty one."""
    names = {name.lower(): name for name in columns if isinstance(name, str)}
    for name in columns:
        if good not in _words(name):
            continue
        other = names.get(re.sub(rf"(?<![a-z]){good}|{good}(?![a-z])", bad, name.lower()))
        if other is None or other == name or not _is_speech(columns[name], columns[other]):
            continue
        pair, used = {"chosen": name, "rejected": other}, {name, other}
        answer = columns[name]
        turns = [answer] if isinstance(answer, dict) else answer
        whole = isinstance(turns, list) and any(_role(turn) in ("user", "human") for turn in turns)
        speech = [
            one
            for one, value in columns.items()
            if one not in used
            and _is_speech(value)
            and not _words(one) & (_ABOUT | {good, bad, "system", "tool"})
        ]
        # Whole conversations hold the prompt.
        prompt = None if whole else _likeliest("prompt", PROMPT, speech)
        if not whole and prompt is None and len(speech) == 1:
            (prompt,) = speech
        if prompt is not None:
            pair["prompt"] = prompt
        return {**pair, **_others("pair", columns, {*used, *([prompt] if prompt else [])})}
    return {}


def _others(form: Form, columns: Mapping[str, Any], used: AbstractSet[str]) -> dict[str, str]:
    """Return optional roles whose columns have a known name in other capitals."""
    found = {}
    for role, names in _RULES[form].optional.items():
        named = [name for name in columns if name not in used and name.lower() in names]
        if role != "prompt" and named and not set(named) & set(names):
            found[role] = named[0]
    return found


def _left_out(
    guess: Mapping[str, str], columns: Mapping[str, Any], rows: Sequence[Row]
) -> list[str]:
    """Return the columns that matter for training and that a guess would not use."""
    if not guess:
        return []
    rule = next(rule for rule in FORMS if guess.keys() <= rule.roles)
    known = {
        name
        for role, names in rule.optional.items()
        for name in names
        if role != "label" or label_of(columns.get(name)) is not None
    }
    left_out = []
    for name, value in columns.items():
        inner = {f"{name}.{key}": one for key, one in value.items()} if _is_plain(value) else {}
        for path, one in (inner or {name: value}).items():
            if path in guess.values() or path in known or not says_something(one):
                continue
            if f"{path}[0]" in guess.values():
                if any(len(value_at(row, path) or ()) > 1 for row in rows):
                    left_out.append(f"{path}[1]")
            elif _is_meaningful(path, one):
                left_out.append(path)
    return left_out


def _is_meaningful(name: str, value: Any) -> bool:
    """Return whether a column matters for training: it holds turns, or is named so."""
    words = _words(name)
    return _is_messages(value) or bool(words & _MEANINGFUL and not words & _ABOUT)


def _is_plain(value: Any) -> bool:
    """Return whether a value is an object of columns, not a message."""
    return isinstance(value, dict) and not _role(value)


def _role(turn: Any) -> Any:
    return (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None


def _is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, or JSON text of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return False
    return isinstance(value, list) and bool(value) and is_turns(value) and bool(_role(value[0]))


def _is_speech(*values: Any) -> bool:
    """Return whether all values are texts, messages or lists of messages."""
    # Only a column of messages may hold them as JSON text.
    return all(
        not _is_messages(one) if isinstance(one, str) else _role(one) or _is_messages(one)
        for one in values
    )


def _words(name: str) -> set[str]:
    """Return the words in a column's name, in lower case, with and without a last s."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}


def _likeliest(role: str, names: Sequence[str], columns: list[str]) -> str | None:
    """The column most like this role, None where none is like it."""

    def likeness(column: str) -> int:
        if column in names:
            return 4
        if column.lower() in names:
            return 3
        if difflib.get_close_matches(column.lower(), names, n=1, cutoff=0.75):
            return 2
        return 1 if _words(column) & _WORDS[role] else 0

    best = max(columns, key=likeness, default=None)
    return best if best is not None and likeness(best) else None
