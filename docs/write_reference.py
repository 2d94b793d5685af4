"""Write the generated pages of docs/reference: settings, cleaning steps, and the schema of recipe files."""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from batchloom import PlanSpec
from batchloom.core.settings import SettingField, list_settings
from batchloom.media import FrameSampling, MediaLimits
from batchloom.preparation import (
    ChatRecipe,
    DedupRecipe,
    ExecutionSettings,
    FimRecipe,
    MediaRecipe,
    ReadRecipe,
    Recipe,
    RunSettings,
)
from batchloom.text import KNOWN_STEPS
from batchloom.train import StreamOptions, TrainSettings

PAGE = Path(__file__).parent / "reference/settings.md"
RECIPE_SCHEMA = Path(__file__).parent / "reference/recipe.schema.json"
CLEANING_PAGE = Path(__file__).parent / "reference/cleaning-steps.md"
_HEADER = """# Settings

Each setting is declared once, in a settings class. Its option on the command line, its keyword in Python, its key in a
recipe file, the [schema of recipe files](recipe.schema.json) for editors and this page derive from the declaration.
`python docs/write_reference.py` writes both.
"""
_CLEANING_HEADER = """# Cleaning steps

The steps of `--clean NAME[,NAME...]`, in the recommended order. [Clean and filter texts](../how-to/prepare/cleaning.md)
shows how to use them. In a recipe file a step may have settings: `clean: [html, {length: {least_words: 20}}]`.
A limit of `null` (`None` in Python) is off. `python docs/write_reference.py` writes this page.
"""
_TABLE_HEAD = "| setting | option | value | default | meaning |\n|---|---|---|---|---|\n"
# Prefix of a setting's key where several classes share one mapping.
_KEY_PREFIXES: dict[type, str] = {FrameSampling: "video_"}
_GROUPS: dict[str, tuple[type, ...]] = {
    "Preparing data: `prepare`, `stream`, `doctor`, recipe files": (
        *(Recipe, ReadRecipe, ChatRecipe, DedupRecipe, MediaRecipe),
    ),
    "Running `prepare`": (RunSettings, ExecutionSettings),
    "Fill-in-the-middle: keys of `fim` in Python and recipe files": (FimRecipe,),
    "Images, audio and video: more keys of `media` in Python and recipe files": (MediaLimits, FrameSampling),
    "Data order: `Loader`, `plan`, `explain`, `when`": (PlanSpec,),
    "Training: `train` and its configuration files": (TrainSettings, StreamOptions),
}


def format_page() -> str:
    """Return the complete page."""
    sections = [_HEADER]
    for title, classes in _GROUPS.items():
        rows = [_format_row(cls, field) for cls in classes for field in _list_fields(cls)]
        sections.append(f"\n## {title}\n\n{_TABLE_HEAD}{''.join(rows)}")
    return "".join(sections)


def _list_fields(cls: type) -> list[SettingField]:
    """List the declared fields of a class, inherited ones last, as the command line does."""
    return sorted(list_settings(cls), key=lambda field: field.name not in cls.__annotations__)


def _format_row(cls: type, field: SettingField) -> str:
    setting = field.setting
    help_text = setting.help.replace("|", r"\|")
    option = ", ".join(f"`{name}`" for name in field.option_names) if cls is not FimRecipe else ""
    key = _KEY_PREFIXES.get(cls, "") + field.name
    return f"| `{key}` | {option} | {_format_type(field)} | {_format_default(field)} | {help_text} |\n"


def _format_type(field: SettingField) -> str:
    setting = field.setting
    hint = setting.option_type if setting.check and setting.option_type else field.hint
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    name = _name_type(hint)
    # A check of the field itself replaces the bounds.
    if hint in (int, float) and not (setting.check and hint is field.hint):
        return name + _format_bounds(setting.minimum, setting.maximum, setting.below)
    return name


def _name_type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_name_type(option) for option in typing.get_args(hint) if option is not types.NoneType)
    names = {str: "text", int: "number", float: "number", bool: "yes or no", Path: "path", tuple: "list"}
    kind = typing.get_origin(hint) or hint
    return names.get(kind) or ("mapping" if issubclass(kind, Mapping) else f"`{kind.__name__}`")


def _format_bounds(minimum: float | None, maximum: float | None, below: float | None) -> str:
    if below is not None:
        return f" from {minimum or 0:g} to below {below:g}"
    # Limits above 2**62 only keep a number inside its storage.
    least = f" from {int(minimum or 0):,}" if abs(minimum or 0) < 1 << 62 else ""
    return least + (f" to {int(maximum):,}" if maximum is not None and maximum < 1 << 62 else "")


def _format_default(field: SettingField) -> str:
    if field.setting.shown_default:
        return field.setting.shown_default
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    return "" if field.default in (None, MISSING, ()) else f"`{field.default}`"


def format_recipe_schema() -> str:
    """Return the JSON schema of recipe files, for completion and checks in editors."""
    fields = [field for cls in (Recipe, ReadRecipe, ChatRecipe) for field in list_settings(cls)]
    properties = {field.name: _describe_value(field) for field in fields}
    properties["inputs"] = {
        "description": "Files, folders, globs, URLs and data sets, in reading order.",
        "type": "array",
        "items": {"type": ["string", "object"]},
    }
    modes = next(field for field in list_settings(DedupRecipe) if field.name == "mode")
    mode = _describe_value(modes)
    properties["dedup"] = {
        "description": mode["description"],
        "anyOf": [{"enum": mode["enum"]}, _describe_class(DedupRecipe)],
    }
    properties["media"] = _describe_class(MediaRecipe, MediaLimits, FrameSampling)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of batchloom prepare",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=1) + "\n"


def _describe_class(*classes: type) -> dict[str, Any]:
    properties = {
        _KEY_PREFIXES.get(cls, "") + field.name: _describe_value(field)
        for cls in classes
        for field in list_settings(cls)
    }
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _describe_value(field: SettingField) -> dict[str, Any]:
    """Return the schema of a setting's value; short forms of texts are allowed, null is the default."""
    setting, described = field.setting, {"description": field.setting.help}
    if field.default not in (None, MISSING, ()):
        described["default"] = field.default
    if typing.get_origin(field.hint) is typing.Literal:
        return {**described, "enum": [*typing.get_args(field.hint), None]}
    if dataclasses.is_dataclass(field.hint):
        return {**described, "anyOf": [{"type": ["number", "null"]}, _describe_class(field.hint)]}
    kind = typing.get_origin(field.hint) or field.hint
    names = {str: "string", int: "integer", float: "number", bool: "boolean", tuple: "array"}
    types_of_value = [names.get(kind, "object"), "null"]
    if (setting.option_type is str and kind is not str) or kind is tuple:
        types_of_value.append("string")
    bounds = {"minimum": setting.minimum, "maximum": setting.maximum, "exclusiveMaximum": setting.below}
    if kind not in (int, float) or setting.check:
        bounds = {}
    return {**described, "type": types_of_value, **{name: value for name, value in bounds.items() if value is not None}}


def format_cleaning_steps() -> str:
    """Return the page of the cleaning steps and their settings."""
    sections = [_CLEANING_HEADER]
    for name, step in KNOWN_STEPS.items():
        summary, meanings = _parse_attributes(step.settings)
        packages = sorted({f"`{package}`" for _, package in step.requirements})
        needs = f" Needs {' and '.join(packages)} (extra `clean`)." if packages else ""
        help_text = step.help[0].upper() + step.help[1:]
        rows = [
            f"| `{field.name}` | {_format_step_default(field)} | {meanings[field.name]} |\n"
            for field in dataclasses.fields(step.settings)
        ]
        notes = "" if summary.startswith("Settings of the step") else f"\n{summary}\n"
        table = "| setting | default | meaning |\n|---|---|---|\n" + "".join(rows)
        sections.append(f"\n## `{name}`\n\n{help_text}.{needs}\n{notes}\n{table}")
    return "".join(sections)


def _parse_attributes(settings: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the meaning of each attribute."""
    text = inspect.getdoc(settings) or ""
    summary, _, attributes = text.partition("\nAttributes:\n")
    meanings = {}
    for match in re.finditer(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        meaning = " ".join(match[2].split()).rstrip(".").replace("``", "`").replace("|", r"\|")
        meanings.update(dict.fromkeys(match[1].split(", "), meaning[0].upper() + meaning[1:] + "."))
    return " ".join(summary.split()).replace("``", "`"), meanings


def _format_step_default(field: "dataclasses.Field[Any]") -> str:
    value = {} if field.default is MISSING else field.default
    if value is None or (isinstance(value, (dict, tuple)) and not value):
        return ""
    plain = json.dumps(value, ensure_ascii=False)
    return f"`{plain if isinstance(value, (tuple, bool)) else value}`"


if __name__ == "__main__":
    PAGE.write_text(format_page())
    RECIPE_SCHEMA.write_text(format_recipe_schema())
    CLEANING_PAGE.write_text(format_cleaning_steps())
