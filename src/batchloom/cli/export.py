"""``batchloom export``."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, final

import typer

from batchloom.cli.terminal.console import plain_console
from batchloom.core.wording import format_count, format_size
from batchloom.store import export_store

_PROGRESS_SECONDS = 5.0


def export(
    path: Annotated[Path, typer.Argument(help="A store's folder or a Megatron prefix.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            help="megatron (shards as they are), flat (one file of ids), parquet, hf (for "
            "datasets.load_from_disk), mds (for mosaicml-streaming)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    split: Annotated[str, typer.Option(help="train, val or test.")] = "train",
    merge: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --to megatron: all shards as one prefix NAME."),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="An older generation of the store; the newest by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Write a store in a form that other tools read."""
    result = export_store(
        path,
        to=to,  # type: ignore[arg-type]  # checked by the callee
        out=out,
        split=split,
        merge=merge,
        generation=generation,
        progress=_ExportProgress().count,
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(result), default=str))
        return
    console = plain_console()
    console.print(
        f"{result.path}: {result.documents:,} documents, {result.tokens:,} tokens in "
        f"{format_count(result.files, 'file')}, "
        f"{format_size(result.bytes)}.",
        markup=False,
    )
    for note in result.notes:
        console.print(note, markup=False)


@final
class _ExportProgress:
    """Periodic progress on standard error: number of documents written."""

    def __init__(self) -> None:
        self._documents, self._last_report_time = 0, time.monotonic()

    def count(self, documents: int) -> None:
        self._documents += documents
        if time.monotonic() - self._last_report_time >= _PROGRESS_SECONDS:
            self._last_report_time = time.monotonic()
            print(f"exporting: {self._documents:,} documents", file=sys.stderr)
