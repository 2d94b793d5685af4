"""Validation of rule limits."""

import math
from collections.abc import Sequence

from batchloom.core.settings import as_int, is_text, quote_value


def find_limit_problems(
    settings: object,
    *,
    count: Sequence[str] = (),
    size: Sequence[str] = (),
    number: Sequence[str] = (),
    share: Sequence[str] = (),
    words: Sequence[str] = (),
    switch: Sequence[str] = (),
) -> list[str]:
    """Return the problems of settings fields; a limit that is None is off.

    Args:
        settings: a settings dataclass.
        count: names of integer fields.
        size: names of integer fields that cannot be None.
        number: names of fields from 0 on.
        share: names of fields from 0 to 1.
        words: names of fields with a list of words.
        switch: names of Boolean fields.
    """
    kinds = (
        (count, _is_count, "not a whole number from 0 on"),
        (size, _is_size, "not a whole number from 0 on"),
        (number, _is_number, "not a finite number from 0 on"),
        (share, _is_share, "not a number from 0 to 1"),
        (words, _is_words, "not a list of words"),
        (switch, lambda value: isinstance(value, bool), "neither True nor False"),
    )
    return [
        f"{name}: {quote_value(getattr(settings, name))} is {problem}"
        for names, is_valid, problem in kinds
        for name in names
        if not is_valid(getattr(settings, name))
    ]


def find_pair_problems(name: str, pairs: object) -> list[str]:
    """Return the problems of limits by n-gram length: ``((2, 0.2), (3, 0.18))``."""
    if isinstance(pairs, tuple) and all(map(_is_pair, pairs)):
        return []
    return [f"{name}: {quote_value(pairs)} is not a list of [words, share], such as [[2, 0.2], [3, 0.18]]"]


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    words = as_int(pair[0])
    return words is not None and 1 <= words <= 64 and pair[0] == words and _is_share(pair[1])


def _is_count(value: object) -> bool:
    count = as_int(value)
    return value is None or (count is not None and 0 <= count < 1 << 31)


def _is_size(value: object) -> bool:
    return value is not None and _is_count(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value is None
    return 0 <= value < math.inf


def _is_share(value: object) -> bool:
    return _is_number(value) and (value is None or value <= 1)  # type: ignore[operator]


def _is_words(value: object) -> bool:
    return isinstance(value, tuple) and all(map(is_text, value))
