"""Parsing of ``--map prompt=q,response=a``, the user's columns of the roles."""

import re
from collections.abc import Container, Iterable, Mapping

from batchloom.chat.schema.schemas import COLUMN_ROLES, FORM_RULES, INTERLEAVED_RULE
from batchloom.core.settings import raise_problems, suggest

_FIRST_PATH_STEP = re.compile(r"[^.\[\]]+")

# Column names that users write in place of a role.
_ROLE_BY_COLUMN = {
    name: role
    for rule in FORM_RULES
    for role, names in (*rule.required.items(), *rule.optional.items())
    for name in names
    if name not in COLUMN_ROLES
}


def parse_mapping(text: str) -> dict[str, str]:
    """Parse ``role=column,role=column`` to a dict.

    A column may be a path such as ``answers.text[0]``; an empty one (``context=``) disables the
    role. Columns whose names hold a comma must be passed to ``detect_schema`` as a dict.

    Raises:
        SettingsError: items that are not role=column, roles that are unknown, repeated, or cannot be
            combined; all problems at once.
    """
    problems: list[str] = []
    mapping: dict[str, str] = {}
    for item in text.split(","):
        role, equals, column = (part.strip() for part in item.partition("="))
        if not equals or not role:
            problems.append(f"map: {item.strip()!r} is not role=column")
        elif role in mapping:
            problems.append(f"map.{role}: named twice, as {mapping[role]!r} and {column!r}")
        else:
            mapping[role] = column
    raise_problems(problems + find_mapping_problems(mapping))
    return mapping


def match_mapping_columns(mapping: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Map to the exact column names where those begin or end with white space."""
    column_names = dict.fromkeys(names)
    name_by_stripped = {name.strip(): name for name in reversed(column_names) if isinstance(name, str)}
    return {role: _match_column(column, column_names, name_by_stripped) for role, column in mapping.items()}


def _match_column(column: str, column_names: Container[str], name_by_stripped: Mapping[str, str]) -> str:
    if column in column_names or column in name_by_stripped:
        return column if column in column_names else name_by_stripped[column]
    # The first step of a path such as answers.text[0] is a column.
    head = _FIRST_PATH_STEP.match(column)
    if head is None or head[0] in column_names:
        return column
    return name_by_stripped.get(head[0], head[0]) + column[head.end() :]


def find_mapping_problems(mapping: Mapping[str, str]) -> list[str]:
    """Return the problems of a mapping from roles to columns, one sentence each."""
    problems = [
        f"map.{role}: unknown role{_suggest_role(role)}; roles are {', '.join(COLUMN_ROLES)}"
        for role in mapping
        if role not in COLUMN_ROLES
    ]
    problems += [
        f"map.{role}: {column!r} is not the name of a column"
        for role, column in mapping.items()
        if not isinstance(column, str)
    ]
    mapped_roles = {role for role, column in mapping.items() if column}
    if not problems and not any(mapped_roles <= rule.roles for rule in (*FORM_RULES, INTERLEAVED_RULE)):
        problems.append(
            f"map: no record has {', '.join(sorted(mapped_roles))} together; valid combinations are "
            f"{'; or '.join(_find_role_conflicts(mapped_roles))}"
        )
    return problems


def _suggest_role(role: str) -> str:
    hint = suggest(role, [*COLUMN_ROLES, *_ROLE_BY_COLUMN])
    for name, column_role in _ROLE_BY_COLUMN.items():
        hint = hint.replace(f"{name!r}", f"{column_role!r}")
    return hint


def _find_role_conflicts(mapped_roles: set[str]) -> list[str]:
    return [
        " + ".join((*rule.required, *(f"[{role}]" for role in rule.optional)))
        for rule in FORM_RULES
        if mapped_roles & rule.roles
    ]
