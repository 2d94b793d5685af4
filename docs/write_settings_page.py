"""Write docs/settings.md: every declared setting, with its option, type, bounds, default and help."""

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
from batchloom.train import StreamOptions, TrainSettings

PAGE = Path(__file__).parent / "settings.md"
_HEADER = """# Settings

Each setting is declared once, in a settings class. Its option on the command line, its keyword in Python, its key in a
recipe file and this page derive from the declaration. `python docs/write_settings_page.py` writes the page.
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


if __name__ == "__main__":
    PAGE.write_text(format_page())
