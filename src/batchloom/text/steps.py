"""Cleaning steps (each maps a text to a text or a drop): types and settings."""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from batchloom.core.settings import as_int, is_bool, is_positive_number, is_text, quote_value, raise_problems


@dataclass(frozen=True, slots=True)
class CleanStep:
    """A step as named in a recipe.

    Attributes:
        name: name of the step.
        settings: settings that differ from the step's defaults, by name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DroppedText:
    """A document that a step removes.

    Attributes:
        reason: rule from a closed list, without numbers (``gopher: too few words``); drops
            are counted by it.
        detail: measured and required value (``31 words, at least 50``).
    """

    reason: str
    detail: str


CleanFunction = Callable[[str], str | DroppedText]


class Limit(NamedTuple):
    """Valid values of a field, and the problem of the others as the end of "... is"."""

    is_valid: Callable[[Any], bool]
    problem: str


def _is_count(value: Any) -> bool:
    count = as_int(value)
    return count is not None and 0 <= count < 1 << 31


def _is_share(value: Any) -> bool:
    return is_positive_number(value, zero=True) and value <= 1


def _are_ngram_shares(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and as_int(pair[0]) in range(1, 65) and _is_share(pair[1])
        for pair in value
    )


Count = Annotated[int, Limit(_is_count, "not a whole number from 0 on")]
Number = Annotated[float, Limit(lambda value: is_positive_number(value, zero=True), "not a finite number from 0 on")]
Share = Annotated[float, Limit(_is_share, "not a number from 0 to 1")]
Switch = Annotated[bool, Limit(is_bool, "neither True nor False")]
Words = Annotated[
    tuple[str, ...], Limit(lambda value: isinstance(value, tuple) and all(map(is_text, value)), "not a list of words")
]
ListPath = Annotated[str, Limit(is_text, "not the path of a list")]
# (n, share) pairs.
NgramShares = Annotated[
    tuple[tuple[int | float, ...], ...],
    Limit(_are_ngram_shares, "not a list of [words, share], such as [[2, 0.2], [3, 0.18]]"),
]


def check_limits(settings: object) -> None:
    """Raise SettingsError for fields of a settings dataclass outside their limits."""
    problems = []
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if value is None and type(None) in options:
            continue
        limits = [limit for option in options for limit in getattr(option, "__metadata__", ())]
        problems += [
            f"{name}: {quote_value(value)} is {limit.problem}" for limit in limits if not limit.is_valid(value)
        ]
    raise_problems(problems)
