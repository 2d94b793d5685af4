"""``batchloom train`` and ``batchloom demo``."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click

from batchloom.batches import read_mixture
from batchloom.cli.options import Option, with_settings
from batchloom.cli.terminal import parse_bytes, print_log, show_load
from batchloom.core.addresses import is_url
from batchloom.core.settings import from_plain
from batchloom.train import TrainRequest, require_train_packages

_NOT_STARTED_MESSAGE = "Stopped before the run began; nothing was left behind."


@with_settings(TrainRequest)
def train(*, settings: dict[str, Any]) -> None:
    """Train a small GPT, or finetune a pretrained model.

    Under torchrun every process is one rank.
    """
    require_train_packages()
    with _run_in_terminal():
        with show_load("torch"):
            from batchloom.train import start_training  # noqa: PLC0415 - importing torch takes seconds

        start_training(from_plain(TrainRequest, _parse_options(settings)), print_line)


def demo(
    *,
    out: Annotated[Path, Option(help="Folder for the files of the demo; created if missing.")] = Path("demo"),
    steps: Annotated[
        int | None, Option(help="Number of steps to train, at least 1.", minimum=1, show_default="250")
    ] = None,
) -> None:
    """Prepare, train and sample real text, in three minutes.

    The text comes with Python: the demo needs no network and no account.
    """
    require_train_packages()
    with show_load("torch"):
        from batchloom.train import run_demo  # noqa: PLC0415 - importing torch takes seconds

    try:
        run_demo(out, steps, print_line)
    except KeyboardInterrupt:
        click.echo(f"\nStopped; the same command begins again in {out}.", err=True)
        raise click.exceptions.Exit(130) from None


def _parse_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of a run whose values have a short form."""
    data = dict(settings.get("data", {}))
    if "data" in data and not is_url(data["data"]):
        data["data"] = Path(data["data"])
    if "mixture" in data:
        data["mixture"] = read_mixture(data["mixture"])
    open_options = data.get("open_options", {})
    if "cache_limit" in open_options:
        data["open_options"] = {
            **open_options,
            "cache_limit": parse_bytes(open_options["cache_limit"], "--cache-limit"),
        }
    return {**settings, "data": data}


@contextmanager
def _run_in_terminal() -> Iterator[None]:
    """Print the log of a run to the terminal; Ctrl-C ends it with one sentence."""
    # Only one rank prints information.
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    try:
        with _handle_first_interrupt(), print_log(_print_record, level):
            yield
    except KeyboardInterrupt as stop:
        # Ctrl-C reaches all ranks; only one prints.
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"\n{stop.args[0] if stop.args else _NOT_STARTED_MESSAGE}", err=True)
        raise click.exceptions.Exit(130) from None


def print_line(line: str, *, err: bool = False) -> None:
    """Print a line, which may contain path bytes that are not valid text."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    click.echo(line.encode(encoding, "backslashreplace").decode(encoding), err=err)


def _print_record(record: logging.LogRecord) -> None:
    print_line(record.getMessage(), err=record.levelno >= logging.WARNING)


@contextmanager
def _handle_first_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C end the run, and ignore others during the shutdown.

    Under torchrun two arrive: one from the terminal, one from torchrun.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    # A background job of a script ignores Ctrl-C, and must continue to.
    if threading.current_thread() is not threading.main_thread() or previous_handler == signal.SIG_IGN:
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, previous_handler)
