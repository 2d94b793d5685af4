"""``batchloom datasets``."""

import json
from typing import Annotated

import typer
from rich.table import Table

import batchloom
from batchloom.cli.terminal.console import plain_console


def datasets(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the data sets that have a short name: batchloom prepare NAME --out STORE."""
    entries = batchloom.list_datasets()
    if as_json:
        print(json.dumps(entries))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "size", "read", "input"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=True)
    table.add_column("what it is")
    for entry in entries:
        access = "where it lies" if entry["streaming"] else "downloaded"
        access = access if entry["source"] == "real" else "made up"
        table.add_row(entry["name"], entry["size"], access, entry["input"], entry["description"])
    plain_console().print(table)
