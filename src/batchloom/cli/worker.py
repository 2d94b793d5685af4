"""``batchloom worker``."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from batchloom.cli.train import print_line
from batchloom.core.errors import SettingsError
from batchloom.train import DATASET_TYPES, MODEL_SIZES, LeaveEvent, WorkerConfig, require_train_packages

# Settings with another option name; one-word settings are left out, as errors use such words.
_OPTION_NAMES = {"tokenizer_name": "--tokenizer"}
_SETTING_PATTERN = re.compile("|".join(rf"\b{one.name}\b" for one in fields(WorkerConfig) if "_" in one.name))


def worker(
    *,
    dataset_type: Annotated[
        str | None,
        typer.Option(help=f"Type of the data: {', '.join(DATASET_TYPES)}. Required."),
    ] = None,
    dataset_name: Annotated[
        str | None,
        typer.Option(
            help="org/name of the Hub, or the folder or URL of a store; for synthetic data its settings, as in "
            "documents=1000,kind=text."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of a data set of the Hub, in the form prepare takes.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Number of sequences of a step for each worker.")] = 4,
    seq_len: Annotated[int, typer.Option(help="Number of tokens of a sequence.")] = 32,
    overlong: Annotated[
        str | None,
        typer.Option(
            help="Policy for documents longer than a sequence: split, drop, truncate or error.",
            show_default="split; drop for conversations and media",
        ),
    ] = None,
    num_steps: Annotated[int, typer.Option(help="Number of steps of the complete run.")] = 100,
    model_size: Annotated[str, typer.Option(help=f"Size of the model: {', '.join(MODEL_SIZES)}.")] = "tiny",
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run, shared by all workers; an existing run is resumed."),
    ] = Path("runs/worker"),
    save_interval: Annotated[
        int,
        typer.Option(help="Number of steps between checkpoints: the most that a kill costs."),
    ] = 10,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    worker_id: Annotated[
        str | None, typer.Option(help="Name of the worker in its output.", show_default="machine and process")
    ] = None,
) -> None:
    """Be one worker of a run that others may join and leave.

    Behind torchrun (--nnodes 1:8) or in a worker of Ray Train it finds the others; else it is alone.
    """
    require_train_packages()
    with _rename_settings_to_options():
        config = WorkerConfig(
            worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}",
            dataset_type=dataset_type or "",
            dataset_name=dataset_name,
            tokenizer_name=tokenizer,
            batch_size=batch_size,
            seq_len=seq_len,
            overlong=overlong,  # type: ignore[arg-type]
            num_steps=num_steps,
            model_size=model_size,
            out=out,
            save_interval=save_interval,
            device=device,
        )
    # Importing torch takes seconds.
    from batchloom.train import run_worker  # noqa: PLC0415

    leave = LeaveEvent()
    with _leave_on_signals(leave) as received_signals:
        report = run_worker(config, print_line, leave)
    if not report.finished:
        # Exit this way even if another worker was signaled: torchrun restarts with the remaining ones.
        raise typer.Exit(128 + (received_signals[0] if received_signals else signal.SIGTERM))


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
