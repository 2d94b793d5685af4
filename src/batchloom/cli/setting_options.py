"""Command-line options derived from declared settings."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from batchloom.core.settings import SettingField, list_settings, quote_value
from batchloom.core.wording import parse_size


def parse_bytes(text: str, option: str) -> int:
    """Parse the value of an option as a positive number of bytes."""
    size = parse_size(text)
    if not size:
        raise typer.BadParameter(
            f"{quote_value(text)} is no number of bytes; write it as 2G or 500MB", param_hint=option
        )
    return size


def with_settings(
    *classes: type[Any], only: tuple[str, ...] = (), parameter: str = "settings"
) -> Callable[..., Callable[..., int]]:
    """Replace a parameter of a command by one option per declared field.

    The command receives the given values in this parameter: a dict by field name, with those of a nested settings
    class in a dict of their own. Options that were not given are absent.

    Args:
        classes: settings classes, whose nested settings classes are included.
        only: names of the fields to offer; all if empty.
        parameter: name of the replaced parameter.
    """
    paths = {path: field for cls in classes for path, field in _list_options(cls) if not only or path[-1] in only}

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def run(**values: Any) -> int:
            settings: dict[str, Any] = {}
            for path in paths:
                value = values.pop("_".join(path))
                if value is not None:
                    group = settings
                    for name in path[:-1]:
                        group = group.setdefault(name, {})
                    group[path[-1]] = value
            return command(**values, **{parameter: settings})

        signature = inspect.signature(command)
        options = [_make_parameter("_".join(path), field) for path, field in paths.items()]
        parameters: list[inspect.Parameter] = []
        for declared in signature.parameters.values():
            parameters += options if declared.name == parameter else [declared]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        hints = get_type_hints(command, include_extras=True)
        hints.pop(parameter)
        run.__annotations__ = hints | {option.name: option.annotation for option in options}
        return run

    return decorate


def _list_options(cls: Any) -> list[tuple[tuple[str, ...], SettingField]]:
    """List the declared fields of a settings class by path, inherited ones last."""
    declared = {field.name: field for field in list_settings(cls)}
    options: list[tuple[tuple[str, ...], SettingField]] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in sorted(fields(cls), key=lambda field: field.name not in cls.__annotations__):
        if field.name in declared:
            if not declared[field.name].setting.has_option:
                continue
            options.append(((field.name,), declared[field.name]))
            continue
        hint = hints[field.name]
        # A mapping that is annotated with a settings class holds values of its fields.
        candidates = (hint, *getattr(hint, "__metadata__", getattr(hint, "__args__", ())))
        nested = next((cls for cls in candidates if isinstance(cls, type) and is_dataclass(cls)), None)
        if nested is not None:
            options += [((field.name, *path), option) for path, option in _list_options(nested)]
    return options


def _make_parameter(name: str, field: SettingField) -> inspect.Parameter:
    setting = field.setting
    hint: Any = setting.option_type or field.hint
    if get_origin(hint) is Literal:
        hint = str
    if hint is list:
        hint = list[str]
    info = typer.Option(
        "/".join(field.option_names),
        help=setting.help,
        metavar=setting.metavar,
        show_default=_format_default(field),
        rich_help_panel=setting.panel,
    )
    annotation = Annotated[hint | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _format_default(field: SettingField) -> str | bool:
    """Return the default shown in the help; False for none."""
    if field.setting.shown_default:
        return field.setting.shown_default
    if isinstance(field.default, bool):
        # A flag without a --no- form is off by default.
        names = field.option_names
        return len(names) == 2 and names[not field.default][2:]
    return field.default not in (None, MISSING, ()) and str(field.default)
