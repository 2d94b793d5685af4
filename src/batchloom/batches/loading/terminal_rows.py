"""Packed rows of a step in a terminal: spans, padding and loss."""

import numpy as np
from rich.console import Console
from rich.text import Text

from batchloom.batches.loading.combined_store import read_trained
from batchloom.core.wording import escape_unprintable, format_count
from batchloom.plan import Plan
from batchloom.plan.packing import Rows, slice_rows

_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_green")
_TRAINED = "█"
_UNTRAINED = "▒"
_PADDING = "·"


def print_rows(plan: Plan, step: int, rows: Rows, most: int) -> None:
    """Print the first ``most`` rows of a step or of a rank, one per line."""
    console = Console(highlight=False)
    seq_len = plan.spec_at(step).seq_len
    console.print(f"Step {step:,}: {format_count(len(rows), 'row')} of {seq_len:,} tokens", soft_wrap=True)
    number_width = len(f"{len(rows):,}")
    width = max(console.width - number_width - len("  100.0%"), 10)
    for row in range(min(len(rows), most)):
        line = Text(f"{row:>{number_width},} ", "dim", no_wrap=True)
        line.append(_draw_row(plan, slice_rows(rows, row, row + 1), seq_len, width))
        line.append(f" {rows.lengths[rows.pointers[row] : rows.pointers[row + 1]].sum() / seq_len:6.1%}", "dim")
        console.print(line)
    if len(rows) > most:
        console.print(f"and {format_count(len(rows) - most, 'row')} more", style="dim")
    legend = Text(f"{_TRAINED} loss  {_UNTRAINED} no loss  {_PADDING} padding", "dim")
    for number, name in enumerate(plan.names if len(plan.names) > 1 else ()):
        legend.append(f"  {escape_unprintable(name)}", _COLOURS[number % len(_COLOURS)])
    console.print(legend, soft_wrap=True)


def _draw_row(plan: Plan, row: Rows, seq_len: int, width: int) -> Text:
    """Draw a row as ``width`` characters; each shows the token in its middle."""
    spans = np.full(seq_len, -1, np.int64)
    trained = np.zeros(seq_len, bool)
    for span in range(len(row.lengths)):
        start = int(row.row_offsets[span])
        length = int(row.lengths[span])
        spans[start : start + length] = span
        if not (row.banned is not None and bool(row.banned[span])):
            store = plan.stores[plan.names[int(row.sources[span])]]
            document = int(row.documents[span])
            first = int(row.starts[span])
            trained[start : start + length] = read_trained(store, document, first, length)
    columns = ((np.arange(width) + 0.5) * seq_len / width).astype(np.int64)
    line = Text()
    for span, is_trained in zip(spans[columns].tolist(), trained[columns].tolist(), strict=True):
        if span < 0:
            line.append(_PADDING, "dim")
            continue
        colour = _COLOURS[int(row.sources[span]) % len(_COLOURS)]
        # Neighbours of one source differ in brightness.
        line.append(_TRAINED if is_trained else _UNTRAINED, f"dim {colour}" if span % 2 else colour)
    return line
