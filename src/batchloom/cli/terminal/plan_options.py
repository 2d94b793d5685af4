"""Options that define a plan, shared by several commands."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, final

import typer

_DATA_PANEL = "Data"
_PLAN_PANEL = "Plan"

StorePath = Annotated[
    str | None,
    typer.Argument(
        help="A store's folder, a bare Megatron prefix, or the name of synthetic data.",
        show_default=False,
    ),
]
MixtureText = Annotated[
    str | None,
    typer.Option(
        "--mixture",
        help="A mixture's YAML file, or PATH=WEIGHT,PATH=WEIGHT, in place of a store.",
        rich_help_panel=_DATA_PANEL,
    ),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="A run's folder, one of its checkpoints, or a JSON file of a loader's state: its plan, in place of the "
        "settings below.",
        rich_help_panel=_DATA_PANEL,
    ),
]
Split = Annotated[str, typer.Option(help="train, val or test.", rich_help_panel=_DATA_PANEL)]
Generation = Annotated[
    int | None,
    typer.Option(
        help="Of the store; the newest, or the one that the checkpoint was made on.",
        rich_help_panel=_DATA_PANEL,
    ),
]
SeqLen = Annotated[int | None, typer.Option(help="Tokens of a sequence.", rich_help_panel=_PLAN_PANEL)]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--global-batch-size",
        help="Sequences of a step, over all ranks.",
        rich_help_panel=_PLAN_PANEL,
    ),
]
Packing = Annotated[
    str | None,
    typer.Option(
        help="best_fit (the default), wrap, first_fit, window_N or none.",
        rich_help_panel=_PLAN_PANEL,
    ),
]
Overlong = Annotated[
    str | None,
    typer.Option(
        help="Of a document longer than a sequence: split, drop, truncate or error; without it texts are split, and "
        "conversations dropped.",
        rich_help_panel=_PLAN_PANEL,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of the order.", rich_help_panel=_PLAN_PANEL)]
Shuffle = Annotated[
    bool | None,
    typer.Option("--shuffle/--no-shuffle", help="Or the order of the store.", rich_help_panel=_PLAN_PANEL),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over a store; 1 by default.", rich_help_panel=_PLAN_PANEL)]
Steps = Annotated[int | None, typer.Option(help="Steps of the whole run.", rich_help_panel=_PLAN_PANEL)]
Last = Annotated[
    str | None,
    typer.Option(help="The last step is filled (fill) or left out (drop).", rich_help_panel=_PLAN_PANEL),
]
PoolSize = Annotated[int | None, typer.Option(help="Documents packed together.", rich_help_panel=_PLAN_PANEL)]
Block = Annotated[int | None, typer.Option(help="Neighbours permuted as one.", rich_help_panel=_PLAN_PANEL)]
Lanes = Annotated[int | None, typer.Option(help="What pools are dealt to.", rich_help_panel=_PLAN_PANEL)]
Align = Annotated[
    int | None,
    typer.Option(help="Documents begin at multiples of so many tokens.", rich_help_panel=_PLAN_PANEL),
]
GroupByLength = Annotated[
    int | None,
    typer.Option(
        help="Steps of a window whose rows are dealt by length (packing none).",
        rich_help_panel=_PLAN_PANEL,
    ),
]
WorldSize = Annotated[int | None, typer.Option(help="Number of data-parallel ranks.", rich_help_panel=_PLAN_PANEL)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


_PLAN_SETTINGS = (
    *(
        "seq_len",
        "global_batch_size",
        "packing",
        "overlong",
        "seed",
        "shuffle",
        "epochs",
        "steps",
        "last",
    ),
    *("pool_size", "block", "lanes", "align", "group_by_length"),
)


def select_plan_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command that are settings of ``PlanSpec``."""
    return {name: options[name] for name in _PLAN_SETTINGS}


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
