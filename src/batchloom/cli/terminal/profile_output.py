"""Output of ``prepare --profile``: time by stage."""

from rich.console import Console
from rich.table import Table

from batchloom.core.wording import escape_unprintable, format_duration, format_size
from batchloom.preparation import PrepareReport


def print_profile(console: Console, report: PrepareReport | None) -> None:
    """Print seconds, shares and speeds by stage from the report of a store.

    Args:
        console: the console.
        report: report of the job; None if it cannot be read here.
    """
    if report is None:
        console.print("Where the time went is in report.json beside the store.")
        return
    phases = ", ".join(f"{name} {format_duration(s)}" for name, s in report.seconds_by_phase.items())
    summary = f"{format_duration(report.seconds)} in all" + (f": {phases}" if phases else "")
    console.print(escape_unprintable(f"{summary}; {report.workers:,} at work ({report.crew})"))
    stages = report.content.stages
    if not stages:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for name in ("seconds", "share", "speed", "documents/s"):
        table.add_column(name, justify="right")
    total = sum(stage.seconds for stage in stages.values()) or 1.0
    for name, stage in stages.items():
        seconds = stage.seconds
        fast = seconds > 0
        table.add_row(
            escape_unprintable(name),
            f"{seconds:,.2f}",
            f"{seconds / total:.0%}",
            f"{format_size(stage.bytes / seconds)}/s" if fast and stage.bytes else "",
            f"{stage.documents / seconds:,.0f}" if fast and stage.documents else "",
        )
    console.print(table)
    console.print(
        "Seconds are over all workers where each does a stage for its units; what runs at the same time counts each "
        "for itself."
    )
