"""Output and options that the commands share."""

import inspect
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.models import OptionInfo

from batchloom.core.files import decode_file_name
from batchloom.core.settings import SettingField, list_settings, quote_value
from batchloom.core.wording import escape_unprintable, parse_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:([^/?#\s]*)@)?[^?#\s]*(?:\?([^#\s]*))?(?:#(\S*))?")
# URL parts of one character are wildcards, not secrets.
_MIN_SECRET_LENGTH = 2
_SPINNER_DELAY = 0.5
_VALUE_NAMES = {int: "NUMBER", float: "NUMBER", Path: "PATH"}

StorePath = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE",
        help="Folder of a store, a Megatron prefix, or the name of synthetic data.",
        show_default=False,
    ),
]
WorldSize = Annotated[int | None, typer.Option(help="Number of data-parallel ranks.", rich_help_panel="Plan")]
Split = Annotated[str, typer.Option(help="Subset of the store: train, val or test.")]
Generation = Annotated[int | None, typer.Option(help="Generation of the store.", show_default="the newest")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, without changing anything.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]


def plain_console(*, stderr: bool = False) -> "Console":
    """Return a console without markup and emoji codes, which names may contain."""
    from rich.console import Console  # noqa: PLC0415 - start-up time

    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


_get_console = cache(plain_console)


def print_escaped(text: str, style: str = "", *, stderr: bool = False) -> None:
    """Print one line, in which every character is visible."""
    if style:
        _get_console(stderr=stderr).print(escape_unprintable(text), style=style)
    else:
        print(escape_unprintable(text), file=sys.stderr if stderr else sys.stdout)


def make_table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    title: str | None = None,
    framed: bool = False,
    header: bool = True,
) -> "Table":
    """Return a table of visible text; columns in ``numbers`` are aligned to the right."""
    from rich import box  # noqa: PLC0415 - start-up time
    from rich.table import Table  # noqa: PLC0415

    table = Table(
        title=None if title is None else escape_unprintable(title),
        title_justify="left",
        box=box.HEAVY_HEAD if framed else None,
        pad_edge=framed,
        show_header=header,
    )
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*map(escape_unprintable, row))
    return table


def print_json(value: object) -> None:
    """Print a value as one line of JSON; dataclasses become objects, and paths text."""
    # The JSON must be valid in a terminal of any encoding.
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_utf8, default=_to_plain))


def _to_plain(value: object) -> Any:
    return msgspec.to_builtins(value, enc_hook=lambda part: decode_file_name(str(part)))


def redact_urls(sentence: str, arguments: Sequence[str]) -> str:
    """Return a sentence without credentials, query and fragment of any URL.

    A path or library may have changed a URL, so each secret is removed wherever it occurs.
    """
    url_parts = {part for word in arguments for match in _URL_PATTERN.findall(word) for part in match}
    for part in sorted((part for part in url_parts if len(part) >= _MIN_SECRET_LENGTH), key=len, reverse=True):
        sentence = sentence.replace(part, "...")
    return sentence


def _print_to_stderr(record: logging.LogRecord) -> None:
    print(record.getMessage(), file=sys.stderr, flush=True)


@final
class _PrintingHandler(logging.Handler):
    def __init__(self, print_record: Callable[[logging.LogRecord], None], level: int) -> None:
        super().__init__(level)
        self._print_record = print_record

    def emit(self, record: logging.LogRecord) -> None:
        self._print_record(record)


@contextmanager
def print_log(
    print_record: Callable[[logging.LogRecord], None] = _print_to_stderr, level: int = logging.INFO
) -> Iterator[None]:
    """Print the log ``batchloom``, such as counting progress, from a level on."""
    log, handler = logging.getLogger("batchloom"), _PrintingHandler(print_record, level)
    previous_level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(previous_level)
        log.removeHandler(handler)


@contextmanager
def show_load(name: str) -> Iterator[None]:
    """Show a spinner on a terminal if loading ``name`` takes over half a second."""
    if not sys.stderr.isatty():
        yield
        return
    # Imported here: the thread would import rich while this one imports other modules.
    from rich.live import Live  # noqa: PLC0415 - start-up time
    from rich.spinner import Spinner  # noqa: PLC0415

    console, done = plain_console(stderr=True), threading.Event()
    # The loading code may replace sys.stderr.
    console.file = sys.stderr
    spinner = Spinner("dots", f"Loading {name} ...")
    live = Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)

    def spin() -> None:
        if not done.wait(_SPINNER_DELAY):
            with live:
                done.wait()

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
        if get_origin(hint) is tuple:
            # An option has one value, not one for each input.
            continue
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
        metavar=setting.metavar or _name_value(field.hint if get_origin(field.hint) is Literal else hint),
        show_default=_format_default(field),
        rich_help_panel=setting.panel,
    )
    annotation = Annotated[hint | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def declare_values(command: Callable[..., object]) -> None:
    """Name the values of a command's options, and parse its numbers."""
    for hint in get_type_hints(command, include_extras=True).values():
        for info in getattr(hint, "__metadata__", ()):
            if not isinstance(info, OptionInfo):
                continue
            kind = next((kind for kind in (int, float) if kind in (hint.__origin__, *get_args(hint.__origin__))), None)
            info.metavar = info.metavar or _name_value(hint.__origin__)
            if kind is not None and info.min is info.max is None:
                info.parser = _parse_whole_number if kind is int else _parse_number


def _name_value(hint: Any) -> str:
    """Return the placeholder of a value in the help."""
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return "|".join(kinds)
    return next((name for kind, name in _VALUE_NAMES.items() if kind in kinds), "TEXT")


def _parse_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{quote_value(text)} is not a whole number") from None


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{quote_value(text)} is not a number") from None


def _format_default(field: SettingField) -> str | bool:
    """Return the default shown in the help; False for none."""
    if field.setting.shown_default:
        return field.setting.shown_default
    if isinstance(field.default, bool):
        # A flag without a --no- form is off by default.
        names = field.option_names
        return len(names) == 2 and names[not field.default][2:]
    return field.default not in (None, MISSING, ()) and str(field.default)
