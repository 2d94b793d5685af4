"""``batchloom train``, ``batchloom worker`` and ``batchloom demo``."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, final

import click

from batchloom.batches import read_mixture
from batchloom.cli.options import AsJson, Option, with_settings
from batchloom.cli.terminal import is_quiet, parse_bytes, print_escaped, print_json, print_log, show_load
from batchloom.core.addresses import is_url
from batchloom.core.errors import ExitCode
from batchloom.core.settings import from_plain
from batchloom.core.wording import format_count
from batchloom.train import LeaveEvent, TrainRequest, WorkerConfig, require_train_packages


@with_settings(TrainRequest)
def train(*, settings: dict[str, Any], as_json: AsJson = False) -> None:
    """Train a small GPT, or finetune a pretrained model.

    Under torchrun every process is one rank.
    """
    require_train_packages()
    printer = _LinePrinter(as_json=as_json)
    with _run_in_terminal(printer):
        with show_load("torch"):
            from batchloom.train import start_training

        request = from_plain(TrainRequest, _parse_options(settings))
        result = start_training(request, printer.print_line)
        if not _is_first_rank():
            return
        if as_json:
            print_json({"path": request.run_path, "steps": result.steps, "val_loss": result.val_loss})
        elif is_quiet():
            loss = "" if result.val_loss is None else f", val loss {result.val_loss:.4f}"
            print_escaped(f"{request.run_path}: {format_count(result.steps, 'step')}{loss}")


@with_settings(WorkerConfig)
def worker(*, settings: dict[str, Any], as_json: AsJson = False) -> ExitCode | None:
    """Train as one worker of a run that others join and leave.

    Under torchrun (--nnodes 1:8) or Ray Train it finds the other workers. Otherwise it trains alone.
    """
    require_train_packages()
    config = WorkerConfig(**{"dataset_type": "", **settings})
    with show_load("torch"):
        from batchloom.train import run_worker

    leave = LeaveEvent()
    with _leave_on_signals(leave) as received_signals:
        report = run_worker(config, _LinePrinter(as_json=as_json).print_line, leave)
    if as_json:
        print_json(report)
    elif is_quiet():
        steps = format_count(report.step, "step")
        print_escaped(f"{config.out}: {steps}, {report.tokens:,} tokens of {config.worker_id}")
    if report.finished:
        return None
    # Exit this way even if another worker was signaled: torchrun restarts with the remaining ones.
    return ExitCode(128 + (received_signals[0] if received_signals else signal.SIGTERM))


def demo(
    *,
    out: Annotated[Path, Option(help="Folder for the files of the demo; created if missing.")] = Path("demo"),
    steps: Annotated[
        int | None, Option(help="Number of steps to train, at least 1.", minimum=1, show_default="250")
    ] = None,
) -> ExitCode | None:
    """Prepare, train and sample real text, in three minutes.

    The text comes with Python: the demo needs no network and no account.
    """
    require_train_packages()
    with show_load("torch"):
        from batchloom.train import run_demo

    try:
        result = run_demo(out, steps, _LinePrinter().print_line)
    except KeyboardInterrupt:
        _echo(f"\nStopped; the same command begins again in {out}.", err=True)
        return ExitCode.INTERRUPTED
    if is_quiet():
        print_escaped(f"{out}: val loss {result.val_loss:.3f}, unigram entropy {result.unigram_entropy:.3f}")
    return None


def _parse_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of a run whose values have a short form."""
    data = dict(settings.get("data", {}))
    if "data" in data and not is_url(data["data"]):
        data["data"] = Path(data["data"])
    if "mixture" in data:
        data["mixture"] = read_mixture(data["mixture"])
    store = data.get("store", {})
    if "cache_limit" in store:
        data["store"] = {**store, "cache_limit": parse_bytes(store["cache_limit"], "--cache-limit")}
    return {**settings, "data": data}


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _run_in_terminal(printer: "_LinePrinter") -> Iterator[None]:
    """Print the log of a run to the terminal; Ctrl-C ends it with one sentence."""
    # Only one rank prints information.
    level = logging.INFO if _is_first_rank() else logging.WARNING
    try:
        with _handle_first_interrupt(), print_log(printer.print_record, level):
            yield
    except KeyboardInterrupt as stop:
        # Ctrl-C reaches all ranks; only one prints.
        if _is_first_rank():
            # Without a message it came while torch was loading.
            _echo(
                f"\n{stop.args[0] if stop.args else 'Stopped before the run began; nothing was left behind.'}", err=True
            )
        raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None


@final
class _LinePrinter:
    """Printer of the lines of a run; with ``--json`` on standard error."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._err = as_json
        self._quiet = is_quiet()

    def print_line(self, line: str) -> None:
        """Print a line of progress."""
        if not self._quiet:
            _echo(line, err=self._err)

    def print_record(self, record: logging.LogRecord) -> None:
        """Print a record of the log; warnings are printed on standard error, and always."""
        _echo(record.getMessage(), err=self._err or record.levelno >= logging.WARNING)


def _echo(line: str, *, err: bool) -> None:
    """Print a line, which may contain path bytes that are not valid text."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    click.echo(line.encode(encoding, "backslashreplace").decode(encoding), err=err)


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


@contextmanager
def _leave_on_signals(leave: LeaveEvent) -> Iterator[list[int]]:
    """Request to leave on SIGINT and SIGTERM; yields the list of received signals."""
    received_signals: list[int] = []

    def request_leave(number: int, _frame: FrameType | None) -> None:
        if not leave.heeded:
            # Before the first step, which may be hours away, leaving loses nothing.
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        received_signals.append(number)
        leave.set()

    previous_handlers = {
        number: signal.signal(number, request_leave)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received_signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
