"""``batchloom demo``."""

from pathlib import Path
from typing import Annotated

import typer

from batchloom.cli.train import print_line
from batchloom.train import require_train_packages


def demo(
    *,
    out: Annotated[Path, typer.Option(help="Folder for the files of the demo; created if missing.")] = Path("demo"),
    steps: Annotated[int | None, typer.Option(help="Number of steps to train.", min=1, show_default="250")] = None,
) -> None:
    """Prepare, check, load, train and sample on real text, in three minutes.

    The text comes with Python: the demo needs no network and no account.
    """
    require_train_packages()
    from batchloom.train import run_demo  # noqa: PLC0415 - importing torch takes seconds

    try:
        run_demo(out, steps, print_line)
    except KeyboardInterrupt:
        typer.echo(f"\nStopped; the same command begins again in {out}.", err=True)
        raise typer.Exit(130) from None
