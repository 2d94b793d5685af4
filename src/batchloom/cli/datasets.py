"""``batchloom datasets``."""

import batchloom
from batchloom.cli.terminal import AsJson, make_table, plain_console, print_json


def datasets(*, as_json: AsJson = False) -> None:
    """List the data sets that have a short name, which prepare takes as input."""
    entries = batchloom.list_datasets()
    if as_json:
        print_json(entries)
        return
    rows = []
    for entry in entries:
        access = "remotely" if entry["streaming"] else "downloaded"
        access = access if entry["source"] == "real" else "synthetic"
        rows.append((entry["name"], entry["size"], access, entry["input"], entry["description"]))
    table = make_table(("name", "size", "read", "input", "description"), rows, numbers={"size"})
    for column in table.columns[:-1]:
        column.no_wrap = True
    plain_console().print(table)
