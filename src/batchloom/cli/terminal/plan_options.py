"""Options that several commands about plans share."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, final

import typer

StorePath = Annotated[
    str | None,
    typer.Argument(
        help="A store's folder, a bare Megatron prefix, or the name of synthetic data.",
        show_default=False,
    ),
]
WorldSize = Annotated[int | None, typer.Option(help="Number of data-parallel ranks.", rich_help_panel="Plan")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@final
class _StderrLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Print the log ``batchloom``, mainly counting progress, to standard error."""
    log, handler = logging.getLogger("batchloom"), _StderrLogHandler()
    previous_level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(previous_level)
        log.removeHandler(handler)
