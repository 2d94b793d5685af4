"""Which schema the records of a source have, told from the first of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchloom.chat.schema.column_mapping import as_found, mapping_problems
from batchloom.chat.schema.record_columns import Row, label_of, listed, says_something, value_at
from batchloom.chat.schema.record_keys import check_first_records, drop_keys
from batchloom.chat.schema.record_media import is_part_of_medium
from batchloom.chat.schema.schemas import FORMS, INTERLEAVED, PROMPT, TURNS, Form, FormRule, Schema
from batchloom.chat.schema.suggestions import unrecognised
from batchloom.chat.schema.turns import is_turns
from batchloom.core.errors import SchemaError
from batchloom.core.medium import KINDS
from batchloom.core.settings import nearest, raise_problems

Columns = dict[str, tuple[str, ...]]
# Columns in order, each with what is told of its values.
Shape = tuple[tuple[str, str | None], ...]


def detect_schema(
    records: Sequence[Row],
    mapping: Mapping[str, str] | None = None,
    *,
    media: bool = False,
    ignore: Iterable[str] = (),
) -> Schema:
    """The schema of a source, from its first records.

    Forms are tried in the order of ``FORMS``, and the first whose columns at least half of the
    records have is taken, else the one that most have. So a rendered ``text`` beside instruction
    and output (as in Alpaca) is not read: the conversation is rendered anew with the template at
    hand. ``--map text=text`` asks for the text itself.

    Args:
        records: the first records of the source, as dicts.
        mapping: role to column; the column may be a path (``answers.text[0]``), and an empty one
            leaves the role out. Roles it names are read from there, the others are still detected.
        media: whether images and audio are read; then texts may hold some, too.
        ignore: columns and message keys that are treated as absent.

    Raises:
        SettingsError: roles that are unknown or do not go together.
        SchemaError: no form fits, a column of the mapping is in no record, or a column has a meaning
            in another library that is not supported.
    """
    mapping, ignored = dict(mapping or {}), frozenset(ignore)
    raise_problems(mapping_problems(mapping))
    if not records:
        raise SchemaError("no schema fits: there are no records; give an input that has some")
    if ignored:
        records = [drop_keys(row, ignored) for row in records]
    mapping = as_found(mapping, (name for row in records for name in row))
    _refuse_absent(records, mapping)
    left_out = frozenset(
        name
        for rule in FORMS
        for role, names in rule.optional.items()
        if mapping.get(role) == ""
        for name in names
    )
    schema = replace(_best(records, mapping, media=media), ignored=ignored, left_out=left_out)
    check_first_records(records, schema)
    return schema


def _best(records: Sequence[Row], mapping: Mapping[str, str], *, media: bool) -> Schema:
    """Return the first schema that fits at least half of the records, else the one that fits most."""
    named = {role for role, column in mapping.items() if column}
    best: tuple[int, Schema] | None = None
    for rule in (*FORMS[:-1], INTERLEAVED, FORMS[-1]) if media else FORMS:
        if not named <= rule.roles or any(mapping.get(role) == "" for role in rule.required):
            continue
        fitting, schema = _fit(rule, records, mapping)
        if schema is not None and rule is INTERLEAVED and not _any_media(schema, records):
            continue
        if schema is not None and 2 * fitting >= len(records):
            return schema
        if schema is not None and fitting > (best[0] if best else 0):
            best = fitting, schema
    if best is None:
        raise unrecognised(records, mapping)
    return best[1]


def shape_of(records: Sequence[Row]) -> Shape | None:
    """All that detection looks at in records of plain values that are alike: of one shape, one schema.

    Returns None where records differ, or hold lists or objects: those have to be looked at.
    """
    shape: Shape | None = None
    for row in records:
        found = tuple((name, _trait(value)) for name, value in row.items())
        if (shape or found) != found or any(trait is None for _, trait in found):
            return None
        shape = found
    return shape


def _trait(value: Any) -> str | None:
    """What detection can tell of a plain value; None where it looks further into it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        if not value:
            return "empty"
        if is_turns(value):
            return "turns"
        return "label" if label_of(value) is not None else "text"
    if isinstance(value, bool | int | float):
        return "number" if label_of(value) is None else "number of a label"
    return None


def _refuse_absent(records: Sequence[Row], mapping: Mapping[str, str]) -> None:
    problems = []
    columns = dict.fromkeys(name for row in records for name in row)
    for role, column in mapping.items():
        if column and all(value_at(row, column) is None for row in records):
            problems.append(
                f"--map {role}={column}: no column {column!r}{nearest(column, columns)}"
            )
    if problems:
        sentence = (
            f"{'; '.join(problems)}; the records have {listed(columns)}: name columns that every input has, give "
            "inputs with other columns apart, or each with a mapping of its own in a YAML manifest"
        )
        raise SchemaError(sentence, list(columns))


def _fit(
    rule: FormRule, records: Sequence[Row], mapping: Mapping[str, str]
) -> tuple[int, Schema | None]:
    """How many records have what the form needs, and the schema; None where none has."""
    columns: Columns = {}
    for role, names in rule.required.items():
        column = _pick(rule.form, role, names, records, mapping)
        if column is None:
            return 0, None
        columns[role] = (column,)
    fitting = sum(
        all(_holds(rule.form, role, row, columns[role][0], mapping) for role in rule.required)
        for row in records
    )
    single = _single_answers(records, columns) if rule.form == "pair" else False
    used = {names[0] for names in columns.values()}
    for role, names in rule.optional.items():
        known = (*PROMPT, *TURNS) if role == "prompt" and single else names
        if found := _optional(rule.form, role, known, records, mapping, used):
            columns[role] = found
    if not fitting:
        return 0, None
    late = _late(rule, columns, records, mapping)
    mapped = any(mapping.get(role) for role in rule.required)
    return fitting, Schema(rule.form, columns, _description(rule, columns, records), late, mapped)


def _any_media(schema: Schema, records: Sequence[Row]) -> bool:
    """Whether any record names a medium beside its text, or in it."""
    beside = [name for kind in KINDS for name in schema.columns.get(f"{kind}s", ())]
    column = schema.columns["text"][0]
    for row in records:
        value = value_at(row, column)
        if isinstance(value, list) and any(map(is_part_of_medium, value)):
            return True
        if any(says_something(value_at(row, name)) for name in beside):
            return True
    return False


def _pick(
    form: Form,
    role: str,
    names: Sequence[str],
    records: Sequence[Row],
    mapping: Mapping[str, str],
) -> str | None:
    """The column of a role: the first name at least half of the records have, else the commonest."""
    if role in mapping:
        return mapping[role] or None
    counts = {
        name: sum(_holds(form, role, row, name, mapping) for row in records) for name in names
    }
    for name, count in counts.items():
        if 2 * count >= len(records):
            return name
    most = max(counts, key=lambda name: counts[name], default=None)
    return most if most is not None and counts[most] else None


def _optional(
    form: Form,
    role: str,
    names: Sequence[str],
    records: Sequence[Row],
    mapping: Mapping[str, str],
    used: set[str],
) -> tuple[str, ...]:
    """The columns of a role a form may have.

    Where records without it would mean something else (a label, labels, the prompt of a pair), it is
    one column and every record must have it. The others are looked for in each record, also when the
    first ones lack them: an ``input`` or ``system`` that comes late must not be lost.
    """
    if mapping.get(role):
        return (mapping[role],)
    free = tuple(name for name in names if name not in used)
    if role in mapping or not free:
        return ()
    if role in _CERTAIN:
        column = _pick(form, role, free, records, mapping)
        if role == "label" and column and not _mostly_labels(column, records):
            # The classes of some other task, which happen to begin at 0.
            return ()
        return (column,) if column else ()
    return free


def _late(
    rule: FormRule, columns: Columns, records: Sequence[Row], mapping: Mapping[str, str]
) -> Columns:
    """The columns of roles every record or none must have, which none of the first records has."""
    used = {name for names in columns.values() for name in names}
    free = {
        role: tuple(
            name
            for name in rule.optional[role]
            if name not in used and not any(says_something(value_at(row, name)) for row in records)
        )
        for role in _CERTAIN
        if role in rule.optional and role not in columns and role not in mapping
    }
    return {role: names for role, names in free.items() if names}


_CERTAIN = ("prompt", "label", "labels", "loss_mask", "attention_mask")


def _mostly_labels(column: str, records: Sequence[Row]) -> bool:
    values = [v for row in records if (v := value_at(row, column)) is not None]
    return 2 * sum(label_of(value) is not None for value in values) >= len(values)


def _speech(value: Any) -> bool:
    return isinstance(value, str | dict) or (isinstance(value, list) and is_turns(value))


def _series(value: Any) -> bool:
    # numpy's arrays too, as Parquet readers give them.
    return isinstance(value, list | tuple) or hasattr(value, "__array__")


_LOOKS: dict[str, Callable[[Any], bool]] = {
    "messages": is_turns,
    "text": lambda value: isinstance(value, str),
    "label": lambda value: label_of(value) is not None,
    **dict.fromkeys(("input_ids", "labels", "loss_mask", "attention_mask"), _series),
}


def _pieces(value: Any) -> bool:
    """Whether a value is a text, or a list of texts, nulls and typed parts."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and bool(value)
        and all(
            one is None or isinstance(one, str) or (isinstance(one, dict) and "type" in one)
            for one in value
        )
    )


def _holds(form: Form, role: str, row: Row, column: str, mapping: Mapping[str, str]) -> bool:
    """Whether the column holds something of this role; one a person named is taken at their word."""
    value = value_at(row, column)
    if value is None or role in mapping:
        return value is not None
    if role == "messages" and _one_message(row.get("chosen")) and _one_message(row.get("rejected")):
        # LLaMA-Factory's ranking sets: the turns are the prompt, the answers stand beside them.
        return False
    if form == "interleaved":
        return _pieces(value)
    if column in TURNS:
        return is_turns(value)
    return _LOOKS.get(role, _speech)(value)


def _one_message(value: Any) -> bool:
    return isinstance(value, dict)


def _single_answers(records: Sequence[Row], columns: Columns) -> bool:
    chosen = columns["chosen"][0]
    return any(_one_message(value_at(row, chosen)) for row in records)


def _description(rule: FormRule, columns: Columns, records: Sequence[Row]) -> str:
    roles = [role for role in ("prompt", *rule.required) if role in columns]
    read = "/".join(columns[role][0] for role in dict.fromkeys(roles))
    extra = [
        name
        for role in rule.optional
        if role in columns and role not in ("prompt", "label")
        for name in columns[role]
        if any(says_something(value_at(row, name)) for row in records)
    ]
    return f"{read} -> {_result(rule, columns, records)}" + (
        f", with {' and '.join(extra)}" if extra else ""
    )


def _result(rule: FormRule, columns: Columns, records: Sequence[Row]) -> str:
    if rule.form == "text":
        return "plain text"
    if rule.form == "interleaved":
        return "text with media"
    if rule.form == "tokens":
        return "token ids"
    if rule.form == "pair":
        return "preference pairs" + ("" if "prompt" in columns else ", the prompt in both")
    first = "messages" if rule.form == "messages" else "prompt"
    shown = next(
        (v for row in records if (v := value_at(row, columns[first][0])) is not None), None
    )
    turns = "2 turns" if first == "prompt" and isinstance(shown, str) else "all turns"
    if isinstance(shown, list) and shown and isinstance(shown[0], dict) and "from" in shown[0]:
        turns += " (from/value)"
    return f"{turns} and a preference label" if "label" in columns else turns
