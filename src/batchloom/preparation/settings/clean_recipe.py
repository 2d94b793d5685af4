"""Settings of cleaning steps, and the index of the evaluation sets they name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchloom.core.errors import SettingsError
from batchloom.core.settings import is_text, quote_value, raise_problems, value_to_plain
from batchloom.text import CleanStep

# Command-line value for no step.
_NO_STEPS = "none"
_STEP_HINT = "write its name, or its name and settings: {name: {setting: value}}"


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
    names = [
        name.strip() if isinstance(name, str) else name
        for entry in value
        for name in (entry.split(",") if isinstance(entry, str) else [entry])
    ]
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
    return [{step.name: value_to_plain(step.settings)} if step.settings else step.name for step in steps]


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
            "numbers, texts, true, false or lists of them"
            for key, setting_value in settings.items()
            if not (is_text(key) and _is_json_value(setting_value))
        ]
    )
    return CleanStep(name, dict(settings))


def _is_json_value(value: object) -> bool:
    """Return whether a value survives a round trip through JSON."""
    try:
        plain = value_to_plain(value)
        return bool(json.loads(json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()) == plain)
    except (TypeError, ValueError, RecursionError):
        return False
