"""Options and arguments of a command, which its function declares in annotations.

They become parameters of click. typer does the same, but makes a pydantic adapter for each of them, which takes longer
than anything else in the start of a short command.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, final, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from batchloom.cli.terminal import set_quiet
from batchloom.core.errors import ExitCode
from batchloom.core.settings import Setting, SettingField, list_written_fields, quote_value, strip_none, suggest

_PLACEHOLDERS = {int: "NUMBER", float: "NUMBER", Path: "PATH"}


@final
@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option, in the annotation of a parameter.

    Attributes:
        names: ``--name`` or ``--name/--no-name``; empty: derived from the parameter.
        help: help text.
        metavar: placeholder of the value; empty: derived from the type.
        minimum: inclusive lower bound of a number.
        show_default: default in the help, if it is not that of the parameter; False: none.
        panel: heading of the option in the help.
    """

    names: str = ""
    help: str = ""
    metavar: str = ""
    minimum: int | None = None
    show_default: str | bool = True
    panel: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """Declaration of a positional argument, in the annotation of a parameter."""

    metavar: str
    help: str


StorePath = Annotated[
    str | None,
    Argument(
        metavar="STORE",
        help="Folder or URL of a store, a Megatron prefix, or the name of synthetic data; or the folder of a run.",
    ),
]
WorldSize = Annotated[int | None, Option(help="Number of data-parallel ranks, to show the part of each.", panel="Plan")]
Split = Annotated[Literal["train", "val", "test"], Option(help="Subset of the store.")]
Generation = Annotated[int | None, Option(help="Generation of the store.", show_default="the newest")]
DryRun = Annotated[bool, Option("--dry-run", help="Show what would change, without changing anything.")]
AsJson = Annotated[bool, Option("--json", help="Print the result as one line of JSON.")]


@final
class TextType(click.ParamType):  # type: ignore[type-arg]  # older versions of click take none
    """Type of a text, or of one of several choices, which a shell completes."""

    name = "text"

    def __init__(self, choices: tuple[str, ...] = ()) -> None:
        self._choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text; refuse one that is no choice, and suggest the nearest."""
        if self._choices and value not in self._choices:
            choices = ", ".join(self._choices)
            self.fail(f"{quote_value(value)} is none of {choices}{suggest(value, self._choices)}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the choices that begin with a text; without choices ask for files."""
        if not self._choices:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in self._choices if choice.startswith(incomplete)]


@final
class NumberType(click.ParamType):  # type: ignore[type-arg]  # older versions of click take none
    """Type of an option whose value is a number."""

    name = "number"

    def __init__(self, kind: type[int] | type[float], minimum: int | None) -> None:
        self._kind = kind
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text."""
        try:
            number = self._kind(value)
        except ValueError:
            noun = "whole number" if self._kind is int else "number"
            self.fail(f"{quote_value(value)} is not a {noun}", param, ctx)
        if self._minimum is not None and not number >= self._minimum:
            self.fail(f"{number} is less than {self._minimum}", param, ctx)
        return number


@final
class PanelOption(click.Option):
    """An option below a heading of the help."""

    panel: str | None = None


@final
class DescribedArgument(click.Argument):
    """A positional argument with a help text."""

    def __init__(self, name: str, declaration: Argument, **values: Any) -> None:
        super().__init__([name], **values)
        self._declaration = declaration

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the argument as the usage line writes it."""
        placeholder = self._declaration.metavar
        name = placeholder if self.required else f"[{placeholder}]"
        return name if self.nargs == 1 else f"{name}..."

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the placeholder and the help text."""
        return self._declaration.metavar, self._declaration.help + "  [required]" * self.required

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the argument in errors."""
        return repr(self._declaration.metavar)


QUIET = PanelOption(
    ["-q", "--quiet"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=set_quiet,
    help="Print only the result, warnings and errors: no progress and no notes.",
)


def make_parameters(function: Callable[..., object]) -> list[click.Parameter]:
    """Return the parameters that annotations of a function declare, and `QUIET`."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [*(_make_parameter(parameter, *get_args(hints[parameter.name])[:2]) for parameter in parameters), QUIET]


def _make_parameter(parameter: inspect.Parameter, hint: Any, declaration: Option | Argument) -> click.Parameter:
    kind = strip_none(hint)
    is_list = get_origin(kind) is list
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    value_type = str if is_list or choices else kind
    values: dict[str, Any] = {"callback": _convert_to_list} if is_list else {}
    if parameter.default is inspect.Parameter.empty:
        values["required"] = True
    else:
        values |= {"required": False, "default": parameter.default}
    if isinstance(declaration, Argument):
        values["type"] = _choose_type(value_type)
        return DescribedArgument(parameter.name, declaration, nargs=-1 if is_list else 1, **values)
    name = parameter.name.replace("_", "-")
    option = PanelOption(
        [parameter.name, declaration.names or (f"--{name}/--no-{name}" if kind is bool else f"--{name}")],
        help=declaration.help,
        metavar=None if kind is bool else declaration.metavar or "|".join(choices) or _PLACEHOLDERS.get(kind, "TEXT"),
        # False would make the value optional.
        is_flag=True if kind is bool else None,
        multiple=is_list,
        type=_choose_type(value_type, declaration.minimum, choices),
        show_default=_choose_default_text(parameter.default, declaration),
        **values,
    )
    option.panel = declaration.panel
    return option


def _choose_default_text(default: object, declaration: Option) -> str | bool:
    """Return the default shown in the help, or whether click shows the value."""
    if isinstance(default, float) and declaration.show_default is True:
        return f"{default:g}"
    return default != "" and declaration.show_default


def _choose_type(kind: Any, minimum: int | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Return the type of click for a type of Python."""
    if kind is Path:
        return click.Path(path_type=Path)
    if kind is str:
        return TextType(choices)
    return NumberType(kind, minimum) if kind in (int, float) else kind


def _convert_to_list(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:  # noqa: ARG001 - click's signature
    """Return the values of a repeated parameter; None if there are none."""
    return list(values) or None


def with_settings(
    *classes: type[Any], only: tuple[str, ...] = (), parameter: str = "settings"
) -> Callable[..., Callable[..., ExitCode | None]]:
    """Replace a parameter of a command by one option per declared field.

    The command receives the given values in this parameter: a dict by field name, with those of a nested settings
    class in a dict of their own. Options that were not given are absent.

    Args:
        classes: settings classes, whose nested settings classes are included.
        only: names of the fields to offer; all if empty.
        parameter: name of the replaced parameter.
    """
    paths = {path: field for cls in classes for path, field in _list_options(cls) if not only or path[-1] in only}

    def decorate(command: Callable[..., ExitCode | None]) -> Callable[..., ExitCode | None]:
        @wraps(command)
        def run(**values: Any) -> ExitCode | None:
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
        options = [_declare_option("_".join(path), field) for path, field in paths.items()]
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
    written = {field.name: field for field in list_written_fields(cls)}
    options: list[tuple[tuple[str, ...], SettingField]] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in sorted(fields(cls), key=lambda field: field.name not in cls.__annotations__):
        declared = written.get(field.name)
        if declared is not None and isinstance(declared.form, Setting):
            options += [((field.name,), declared)] if declared.form.has_option else []
            continue
        if declared is not None:
            prefix = declared.form.prefix
            for path, option in _list_options(declared.hint):
                full_path = (field.name, *path) if prefix is None else (prefix + path[0], *path[1:])
                options.append((full_path, option))
            continue
        hint = hints[field.name]
        if get_origin(hint) is tuple:
            # An option has one value, not one for each input.
            continue
        # A mapping that is annotated with a settings class holds values of its fields.
        candidates = (hint, *getattr(hint, "__metadata__", getattr(hint, "__args__", ())))
        nested = next((cls for cls in candidates if isinstance(cls, type) and is_dataclass(cls)), None)
        if nested is not None:
            options += [((field.name, *path), option) for path, option in _list_options(nested)]
    return options


def _declare_option(name: str, field: SettingField) -> inspect.Parameter:
    setting = field.setting
    hint: Any = setting.option_type or field.hint
    if hint is list:
        hint = list[str]
    option = Option(
        "/".join(field.option_names),
        help=setting.help,
        metavar=setting.metavar or "",
        show_default=_format_default(field),
        panel=setting.panel,
    )
    annotation = Annotated[hint | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _format_default(field: SettingField) -> str | bool:
    """Return the default shown in the help; False for none."""
    if field.setting.shown_default:
        return field.setting.shown_default
    if isinstance(field.default, bool):
        # A flag without a --no- form is off by default.
        names = field.option_names
        return len(names) == 2 and names[not field.default][2:]
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return field.default not in (None, MISSING, ()) and str(field.default)
