"""``batchloom export``."""

import time
from pathlib import Path
from typing import Annotated, final

from batchloom.cli.options import Argument, AsJson, Generation, Option, Split
from batchloom.cli.terminal import print_escaped, print_json, print_note
from batchloom.core.wording import format_count, format_size
from batchloom.store import ExportTarget, export_store

_PROGRESS_SECONDS = 5.0


def export(
    path: Annotated[Path, Argument(metavar="STORE", help="Folder of a store, or a Megatron prefix.")],
    *,
    to: Annotated[
        ExportTarget,
        Option(
            help="Format: megatron (copies of the shards), flat (one file of ids), parquet or hf (for "
            "datasets.load_from_disk)."
        ),
    ],
    out: Annotated[Path, Option(help="Folder to write, which must be empty or not exist.")],
    split: Split = "train",
    merge: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Name of one prefix for all shards; only with --to megatron.",
            show_default="one prefix per shard",
        ),
    ] = None,
    generation: Generation = None,
    as_json: AsJson = False,
) -> None:
    """Write a store in a form that other tools read."""
    result = export_store(
        path,
        to=to,
        out=out,
        split=split,
        merge=merge,
        generation=generation,
        progress=_ExportProgress().count,
    )
    if as_json:
        print_json(result)
        return
    print_escaped(
        f"{result.path}: {result.documents:,} documents, {result.tokens:,} tokens in "
        f"{format_count(result.files, 'file')}, {format_size(result.bytes)}.",
    )
    for note in result.notes:
        print_escaped(note)


@final
class _ExportProgress:
    """Periodic progress on standard error: number of documents written."""

    def __init__(self) -> None:
        self._documents = 0
        self._last_report_time = time.monotonic()

    def count(self, documents: int) -> None:
        self._documents += documents
        if time.monotonic() - self._last_report_time >= _PROGRESS_SECONDS:
            self._last_report_time = time.monotonic()
            print_note(f"exporting: {self._documents:,} documents")
