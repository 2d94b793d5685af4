"""``--map prompt=q,response=a``: the columns of the roles, as a person names them."""

import re
from collections.abc import Container, Iterable, Mapping

from batchloom.chat.schema.schemas import FORMS, INTERLEAVED, ROLES
from batchloom.core.settings import nearest, raise_problems

_HEAD = re.compile(r"[^.\[\]]+")

# What people call a role: the known names of its columns.
_KNOWN_AS = {
    name: role
    for rule in FORMS
    for role, names in (*rule.required.items(), *rule.optional.items())
    for name in names
    if name not in ROLES
}


def parse_mapping(text: str) -> dict[str, str]:
    """The roles of ``role=column,role=column`` and their columns.

    A column may be a path such as ``answers.text[0]``; an empty one (``context=``) says that the
    role is left out. Columns whose names hold a comma go into ``detect_schema`` as a dict.

    Raises:
        SettingsError: what is not of that form, roles that are unknown, named twice, or do not
            go together; all of it at once.
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
    raise_problems(problems + mapping_problems(mapping))
    return mapping


def as_found(mapping: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The mapping with columns by their very names, where these have white space at their ends."""
    known = dict.fromkeys(names)
    bare = {name.strip(): name for name in reversed(known) if isinstance(name, str)}
    return {role: _as_found(column, known, bare) for role, column in mapping.items()}


def _as_found(column: str, known: Container[str], bare: Mapping[str, str]) -> str:
    if column in known or column in bare:
        return column if column in known else bare[column]
    # Of a path such as answers.text[0] the first step is a column.
    head = _HEAD.match(column)
    if head is None or head[0] in known:
        return column
    return bare.get(head[0], head[0]) + column[head.end() :]


def mapping_problems(mapping: Mapping[str, str]) -> list[str]:
    """What is wrong with a mapping of roles to columns, one sentence each."""
    problems = [
        f"map.{role}: unknown role{_meant(role)}; roles are {', '.join(ROLES)}"
        for role in mapping
        if role not in ROLES
    ]
    problems += [
        f"map.{role}: {column!r} is not the name of a column"
        for role, column in mapping.items()
        if not isinstance(column, str)
    ]
    named = {role for role, column in mapping.items() if column}
    if not problems and not any(named <= rule.roles for rule in (*FORMS, INTERLEAVED)):
        problems.append(
            f"map: no record has {', '.join(sorted(named))} together; "
            f"what goes together is {'; or '.join(_together(named))}"
        )
    return problems


def _meant(role: str) -> str:
    hint = nearest(role, [*ROLES, *_KNOWN_AS])
    for name, known in _KNOWN_AS.items():
        hint = hint.replace(f"{name!r}", f"{known!r}")
    return hint


def _together(named: set[str]) -> list[str]:
    return [
        " + ".join((*rule.required, *(f"[{role}]" for role in rule.optional)))
        for rule in FORMS
        if named & rule.roles
    ]
