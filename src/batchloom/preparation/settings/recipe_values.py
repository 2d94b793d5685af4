"""Short forms of recipe values, parsed and formatted: sizes, cleaning, dedup."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from batchloom.core.errors import SettingsError
from batchloom.core.settings import is_text, quote_value, raise_problems, suggest, to_plain
from batchloom.preparation.settings.dedup_recipe import DedupRecipe
from batchloom.text import CleanStep

# Command-line value for no step.
_NO_STEPS = "none"
_SIZE_CHARACTERS = 40
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_MAX_INT = 1 << 63
_MAX_DEPTH = 16
_STEP_HINT = "write its name, or its name and settings: {name: {setting: value}}"
SIZE_HINT = f"a size of at most {_SIZE_CHARACTERS} characters such as 100M, 1G or 100_000"


def parse_token_count(text: str) -> int | None:
    """Parse ``100M``, ``1G`` or ``100_000``; return None if it is no number."""
    match = re.fullmatch(r"([\d_,]*\d)(\.\d+)?\s*([KMG]?)", text.strip().upper())
    if not match or len(text) > _SIZE_CHARACTERS:
        return None
    digits, fraction, unit = match.groups()
    integer_digits = re.sub("[_,]", "", digits)
    return (
        round(float(integer_digits + fraction) * _SIZE_UNITS[unit])
        if fraction
        else int(integer_digits) * _SIZE_UNITS[unit]
    )


def format_token_count(size: int) -> int | str:
    """Return the shortest form of a size that is exact."""
    fitting = [unit for unit, factor in _SIZE_UNITS.items() if unit and size and size % factor == 0]
    return f"{size // _SIZE_UNITS[fitting[-1]]}{fitting[-1]}" if fitting else size


def coerce_token_count(value: object) -> object:
    """Parse a number of tokens from a string; return other values unchanged.

    Raises:
        SettingsError: a string that is no size.
    """
    if not isinstance(value, str):
        return value
    size = parse_token_count(value)
    if size is None:
        raise SettingsError([f"tokens_per_shard: {quote_value(value)} is not {SIZE_HINT}"])
    return size


def parse_names(value: object) -> tuple[Any, ...]:
    """Parse names from ``NAME,NAME`` or a list; the recipe checks each.

    Raises:
        SettingsError: neither a string nor a list.
    """
    if isinstance(value, str):
        return tuple(filter(None, (name.strip() for name in value.split(","))))
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise SettingsError([f"ignore: {quote_value(value)} is no list of names; write a list"])
    return tuple(value)


def parse_dedup(value: object) -> DedupRecipe:
    """Parse deduplication from a mode, settings with a mode, or a DedupRecipe.

    Raises:
        SettingsError: unknown settings, or another type. The recipe reports problems of
            their values.
    """
    if isinstance(value, DedupRecipe):
        return value
    if not isinstance(value, Mapping):
        return DedupRecipe(mode=value)  # type: ignore[arg-type]  # the recipe checks it
    field_names = [field.name for field in fields(DedupRecipe)]
    problems = [
        f"dedup.{name}: unknown setting{suggest(str(name), field_names)}" for name in value if name not in field_names
    ]
    if "mode" not in value:
        problems.append("dedup.mode: missing; write {mode: near, ...}")
    raise_problems(problems)
    return DedupRecipe(**value)


def dedup_to_plain(dedup: DedupRecipe) -> str | dict[str, Any]:
    """Return the plain value: the mode alone if everything else has its default."""
    if dedup.mode != "near":
        return dedup.mode
    plain = to_plain(dedup)
    # Derived settings are left out, so that the result can be parsed again.
    derived_fields = ("similarity",) if dedup.similarity is None else ("bands", "rows")
    return {name: value for name, value in plain.items() if name not in derived_fields}


def parse_clean_steps(value: object) -> tuple[CleanStep, ...]:
    """Parse cleaning steps from names, ``{name: {settings}}`` or steps.

    Names may be one string, ``NAME,NAME``; ``none`` alone means no step. Names and settings are not checked here.

    Raises:
        SettingsError: steps of another form, all in one error.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise SettingsError(
            [f"clean: {quote_value(value)} is no list of steps; write a list, and of each step {_STEP_HINT}"]
        )
    names = [name for entry in value for name in (_split_names(entry) if isinstance(entry, str) else [entry])]
    if names == [_NO_STEPS]:
        return ()
    steps: list[CleanStep] = []
    problems: list[str] = []
    for number, entry in enumerate(names):
        try:
            steps.append(_parse_step(entry, f"clean[{number}]"))
        except SettingsError as error:
            problems += error.problems
    raise_problems(problems)
    return tuple(steps)


def clean_steps_to_settings(steps: Sequence[CleanStep]) -> list[Any]:
    """Return the steps as plain values: a name, or a name and its settings."""
    return [{step.name: _to_json_value(step.settings)} if step.settings else step.name for step in steps]


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _parse_step(value: object, key_path: str) -> CleanStep:
    if isinstance(value, CleanStep):
        value = {value.name: value.settings}
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise SettingsError([f"{key_path}: {quote_value(value)} is no step; {_STEP_HINT}"])
    ((name, settings),) = value.items()
    if not is_text(name):
        raise SettingsError([f"{key_path}: {quote_value(name)} is not the name of a step; {_STEP_HINT}"])
    if settings is None:
        settings = {}
    if not isinstance(settings, Mapping):
        raise SettingsError([f"{key_path}.{name}: {quote_value(settings)} is no settings; write {{setting: value}}"])
    raise_problems(
        [
            f"{key_path}.{name}.{key}: {quote_value(setting_value)} cannot be written into a manifest; give "
            "numbers, texts, "
            f"true, false "
            "or lists of them"
            for key, setting_value in settings.items()
            if not (is_text(key) and _is_json_value(setting_value))
        ]
    )
    return CleanStep(name, dict(settings))


def _is_json_value(value: object, depth: int = 0) -> bool:
    """Return whether a value survives a round trip through JSON."""
    if isinstance(value, (list, tuple)):
        return depth < _MAX_DEPTH and all(_is_json_value(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return depth < _MAX_DEPTH and all(
            is_text(key) and _is_json_value(item, depth + 1) for key, item in value.items()
        )
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, str):
        return value == "" or is_text(value)
    if isinstance(value, int):
        return -_MAX_INT <= value < _MAX_INT
    return isinstance(value, float) and math.isfinite(value)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_json_value(item) for key, item in value.items()}
    return [_to_json_value(item) for item in value] if isinstance(value, (list, tuple)) else value
