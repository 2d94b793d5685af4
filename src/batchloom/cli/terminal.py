"""Output that the commands share."""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Union, final

import click
import msgspec

from batchloom.core.files import decode_file_name
from batchloom.core.settings import quote_value
from batchloom.core.wording import escape_unprintable, parse_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:([^/?#\s]*)@)?[^?#\s]*(?:\?([^#\s]*))?(?:#(\S*))?")
# URL parts of one character are wildcards, not secrets.
_MIN_SECRET_LENGTH = 2
_SPINNER_DELAY = 0.5
_QUIET_KEY = "batchloom.quiet"
# Width of a file or a pipe: rich takes 80, and cuts the cells of wider tables.
_PIPE_WIDTH = 1000
_DUMB_TERMINALS = ("dumb", "unknown")


def plain_console(*, stderr: bool = False) -> "Console":
    """Return a console without markup and emoji codes, which names may contain."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=True, markup=False, emoji=False)


_get_console = cache(plain_console)


def set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's signature
    """Record whether the command was given ``--quiet``."""
    ctx.meta[_QUIET_KEY] = value


def is_quiet() -> bool:
    """Return whether the running command was given ``--quiet``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET_KEY))


def can_redraw_stderr() -> bool:
    """Return whether standard error is a terminal that can overwrite lines.

    ``FORCE_COLOR`` makes rich take a pipe for a terminal, and redrawn lines would fill a log.
    """
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in _DUMB_TERMINALS


def print_note(text: str) -> None:
    """Print progress or a note on standard error, unless the command is quiet."""
    if not is_quiet():
        print_escaped(text, stderr=True)


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
    from rich import box
    from rich.table import Table

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


Line = Union[str, tuple[str, str], "Table"]


def report(value: object, lines: Iterable[Line], *, as_json: bool) -> None:
    """Print a result as one line of JSON, or as text.

    A line of text is a string, a string with its style, or a table.
    """
    if as_json:
        print_json(value)
        return
    for line in lines:
        if isinstance(line, str):
            print_escaped(line)
        elif isinstance(line, tuple):
            print_escaped(*line)
        else:
            plain_console().print(line, soft_wrap=False)


def format_marks(marks: Mapping[str, str]) -> str:
    """Return marks such as ``source=synthetic`` for the end of a line."""
    return "".join(f"  {name}={value}" for name, value in marks.items())


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
    """Print the log ``batchloom`` from a level on; with ``--quiet`` only warnings."""
    if is_quiet():
        level = max(level, logging.WARNING)
    log = logging.getLogger("batchloom")
    handler = _PrintingHandler(print_record, level)
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
    if is_quiet() or not can_redraw_stderr():
        yield
        return
    # Imported here: the thread would import rich while this one imports other modules.
    from rich.live import Live
    from rich.spinner import Spinner

    console = plain_console(stderr=True)
    done = threading.Event()
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
        raise click.BadParameter(
            f"{quote_value(text)} is no number of bytes; write it as 2G or 500MB", param_hint=option
        )
    return size
