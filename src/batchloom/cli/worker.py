"""``batchloom worker``."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any

import click

from batchloom.cli.options import with_settings
from batchloom.cli.terminal import show_load
from batchloom.cli.train import print_line
from batchloom.core.errors import SettingsError
from batchloom.train import LeaveEvent, WorkerConfig, require_train_packages

# Settings with another option name; one-word settings are left out, as errors use such words.
_OPTION_NAMES = {"tokenizer_name": "--tokenizer"}
_SETTING_PATTERN = re.compile("|".join(rf"\b{one.name}\b" for one in fields(WorkerConfig) if "_" in one.name))


@with_settings(WorkerConfig)
def worker(*, settings: dict[str, Any]) -> None:
    """Be one worker of a run that others may join and leave.

    Behind torchrun (--nnodes 1:8) or in a worker of Ray Train it finds the others; else it is alone.
    """
    require_train_packages()
    defaults = {"worker_id": f"{socket.gethostname()}-{os.getpid()}", "dataset_type": ""}
    with _rename_settings_to_options():
        config = WorkerConfig(**{**defaults, **settings})
    with show_load("torch"):
        from batchloom.train import run_worker  # noqa: PLC0415 - importing torch takes seconds

    leave = LeaveEvent()
    with _leave_on_signals(leave) as received_signals:
        report = run_worker(config, print_line, leave)
    if not report.finished:
        # Exit this way even if another worker was signaled: torchrun restarts with the remaining ones.
        raise click.exceptions.Exit(128 + (received_signals[0] if received_signals else signal.SIGTERM))


@contextmanager
def _rename_settings_to_options() -> Iterator[None]:
    """Rename settings in errors to options of the command line."""

    def option(match: re.Match[str]) -> str:
        return _OPTION_NAMES.get(match[0], f"--{match[0].replace('_', '-')}")

    try:
        yield
    except SettingsError as error:
        raise SettingsError([_SETTING_PATTERN.sub(option, problem) for problem in error.problems]) from None


@contextmanager
def _leave_on_signals(leave: LeaveEvent) -> Iterator[list[int]]:
    """Request to leave on SIGINT and SIGTERM; yields the list of received signals."""
    received_signals: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if not leave.heeded:
            # Before the first step, which may be hours away, leaving loses nothing.
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        received_signals.append(number)
        leave.set()

    previous_handlers = {
        number: signal.signal(number, ask)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received_signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
