"""``batchloom convert``."""

import dataclasses
import json
from typing import Annotated

import typer

from batchloom.chat import parse_mapping
from batchloom.cli.prepare import ProgressDisplay, unescape_marker
from batchloom.cli.terminal.console import plain_console
from batchloom.core.wording import format_count
from batchloom.preparation import convert as convert_rows
from batchloom.preparation.conversion import ConversionResult


def convert(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Whatever prepare reads."),
    ],
    *,
    out: Annotated[
        str,
        typer.Option(
            help="File that ends in .jsonl, .jsonl.zst, .jsonl.gz, .json or .parquet; - writes JSON "
            "lines to standard output."
        ),
    ],
    map_: Annotated[
        str | None,
        typer.Option("--map", help="Columns that take a role's name: prompt=q,response=a."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Columns that are written, in this order."),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(help="The one column that is the text: rows hold text alone."),
    ] = None,
    split_on: Annotated[
        str,
        typer.Option(help="What a document of a text file is, as for prepare."),
    ] = "auto",
    max_bad: Annotated[
        str,
        typer.Option(
            help="Bad records allowed: a number, or a share that allows at least 10. They go to OUT.quarantine.jsonl."
        ),
    ] = "0.1%",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="Follow symbolic links that lead out of an input folder, as for prepare.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Write the rows of any input, unchanged, to a JSON Lines, JSON or Parquet file."""
    with ProgressDisplay() as display:
        result = convert_rows(
            inputs,
            out=out,
            mapping=parse_mapping(map_) if map_ is not None else None,
            columns=[name.strip() for name in columns.split(",")] if columns is not None else None,
            text_field=text_field,
            split_on=unescape_marker(split_on),
            max_bad=max_bad,
            force=force,
            follow_links=follow_links,
            listener=display.show,
        )
    # Standard output may hold the rows.
    console = plain_console(stderr=result.path is None)
    if as_json and result.path is not None:
        print(json.dumps(dataclasses.asdict(result), default=str))
        return
    console.print(_format_summary(result), markup=False)


def _format_summary(result: ConversionResult) -> str:
    size = f", {result.bytes / 1e6:,.1f} MB" if result.path else ""
    bad = f"; {format_count(result.quarantined, 'bad record')} left out" if result.quarantined else ""
    quarantine_note = f" (see {result.quarantine})" if result.quarantine else ""
    return f"{result.path or 'standard output'}: {format_count(result.rows, 'row')}{size}{bad}{quarantine_note}."
