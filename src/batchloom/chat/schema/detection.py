"""Detection of a source's schema from its first records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchloom.chat.schema.column_mapping import find_mapping_problems, match_mapping_columns
from batchloom.chat.schema.record_columns import (
    Row,
    format_columns,
    get_column_value,
    is_non_empty,
    parse_label,
)
from batchloom.chat.schema.record_keys import check_first_records, drop_keys
from batchloom.chat.schema.record_media import is_medium_part
from batchloom.chat.schema.schemas import (
    FORM_RULES,
    INTERLEAVED_RULE,
    PROMPT_COLUMNS,
    TURN_COLUMNS,
    FormRule,
    Schema,
    SchemaForm,
)
from batchloom.chat.schema.suggestions import unrecognised_schema_error
from batchloom.chat.schema.turns import is_turns
from batchloom.core.errors import SchemaError
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.core.settings import raise_problems, suggest

RoleColumns = dict[str, tuple[str, ...]]
# Columns in order, each with the trait of its value that detection uses.
RecordShape = tuple[tuple[str, str | None], ...]


def detect_schema(
    records: Sequence[Row],
    mapping: Mapping[str, str] | None = None,
    *,
    media: bool = False,
    ignore: Iterable[str] = (),
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

    Raises:
        SettingsError: roles that are unknown or cannot be combined.
        SchemaError: no form fits, a mapped column is in no record, or a column has a meaning
            in another library that is not supported.
    """
    mapping, ignored = dict(mapping or {}), frozenset(ignore)
    raise_problems(find_mapping_problems(mapping))
    if not records:
        raise SchemaError("no schema fits: there are no records; give an input that has some")
    if ignored:
        records = [drop_keys(row, ignored) for row in records]
    mapping = match_mapping_columns(mapping, (name for row in records for name in row))
    _check_mapped_columns(records, mapping)
    left_out = frozenset(
        name
        for rule in FORM_RULES
        for role, names in rule.optional.items()
        if mapping.get(role) == ""
        for name in names
    )
    schema = replace(_find_best_schema(records, mapping, media=media), ignored=ignored, left_out=left_out)
    check_first_records(records, schema)
    return schema


def _find_best_schema(records: Sequence[Row], mapping: Mapping[str, str], *, media: bool) -> Schema:
    """Return the first schema that fits half of the records, else the best fit."""
    mapped_roles = {role for role, column in mapping.items() if column}
    best: tuple[int, Schema] | None = None
    for rule in (*FORM_RULES[:-1], INTERLEAVED_RULE, FORM_RULES[-1]) if media else FORM_RULES:
        if not mapped_roles <= rule.roles or any(mapping.get(role) == "" for role in rule.required):
            continue
        fitting, schema = _fit_form(rule, records, mapping)
        if schema is not None and rule is INTERLEAVED_RULE and not _has_any_media(schema, records):
            continue
        if schema is not None and 2 * fitting >= len(records):
            return schema
        if schema is not None and fitting > (best[0] if best else 0):
            best = fitting, schema
    if best is None:
        raise unrecognised_schema_error(records, mapping)
    return best[1]


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


def _check_mapped_columns(records: Sequence[Row], mapping: Mapping[str, str]) -> None:
    problems = []
    columns = dict.fromkeys(name for row in records for name in row)
    for role, column in mapping.items():
        if column and all(get_column_value(row, column) is None for row in records):
            problems.append(f"--map {role}={column}: no column {column!r}{suggest(column, columns)}")
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
    single = _has_single_answers(records, columns) if rule.form == "pair" else False
    used = {names[0] for names in columns.values()}
    for role, names in rule.optional.items():
        candidate_names = (*PROMPT_COLUMNS, *TURN_COLUMNS) if role == "prompt" and single else names
        if optional_columns := _choose_optional_columns(rule.form, role, candidate_names, records, mapping, used):
            columns[role] = optional_columns
    if not fitting:
        return 0, None
    late = _find_late_columns(rule, columns, records, mapping)
    mapped = any(mapping.get(role) for role in rule.required)
    return fitting, Schema(rule.form, columns, _describe_schema(rule, columns, records), late, mapped)


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
    form: SchemaForm,
    role: str,
    names: Sequence[str],
    records: Sequence[Row],
    mapping: Mapping[str, str],
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
        if role == "label" and column and not _holds_mostly_labels(column, records):
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


_ALL_OR_NONE_ROLES = ("prompt", "label", "labels", "loss_mask", "attention_mask")


def _holds_mostly_labels(column: str, records: Sequence[Row]) -> bool:
    values = [v for row in records if (v := get_column_value(row, column)) is not None]
    return 2 * sum(parse_label(value) is not None for value in values) >= len(values)


def _is_speech_value(value: Any) -> bool:
    return isinstance(value, str | dict) or (isinstance(value, list) and is_turns(value))


def _is_number_series(value: Any) -> bool:
    # Parquet readers return numpy arrays.
    return isinstance(value, list | tuple) or hasattr(value, "__array__")


_ROLE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "messages": is_turns,
    "text": lambda value: isinstance(value, str),
    "label": lambda value: parse_label(value) is not None,
    **dict.fromkeys(("input_ids", "labels", "loss_mask", "attention_mask"), _is_number_series),
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
    if role == "messages" and _is_single_message(row.get("chosen")) and _is_single_message(row.get("rejected")):
        # In LLaMA-Factory's ranking sets the turns are the prompt, and the answers have their own columns.
        return False
    if form == "interleaved":
        return _is_text_or_parts(value)
    if column in TURN_COLUMNS:
        return is_turns(value)
    return _ROLE_CHECKS.get(role, _is_speech_value)(value)


def _is_single_message(value: Any) -> bool:
    return isinstance(value, dict)


def _has_single_answers(records: Sequence[Row], columns: RoleColumns) -> bool:
    chosen_column = columns["chosen"][0]
    return any(_is_single_message(get_column_value(row, chosen_column)) for row in records)


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


def _describe_result(rule: FormRule, columns: RoleColumns, records: Sequence[Row]) -> str:
    if rule.form == "text":
        return "plain text"
    if rule.form == "interleaved":
        return "text with media"
    if rule.form == "tokens":
        return "token ids"
    if rule.form == "pair":
        return "preference pairs" + ("" if "prompt" in columns else ", the prompt in both")
    first = "messages" if rule.form == "messages" else "prompt"
    first_value = next((v for row in records if (v := get_column_value(row, columns[first][0])) is not None), None)
    turns = "2 turns" if first == "prompt" and isinstance(first_value, str) else "all turns"
    if isinstance(first_value, list) and first_value and isinstance(first_value[0], dict) and "from" in first_value[0]:
        turns += " (from/value)"
    return f"{turns} and a preference label" if "label" in columns else turns
