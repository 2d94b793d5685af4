"""Output of a run: printed step lines, ``log.jsonl``, and a loss curve at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from batchloom.adapters.logging import read_log
from batchloom.core.errors import OutputError
from batchloom.core.report_output import escape_plot_text, save_figure
from batchloom.core.wording import format_list

PrintLine = Callable[[str], None]
MAX_LISTED = 6


@final
class RunLog:
    """Writer of ``log.jsonl`` that also prints a summary of each entry.

    Args:
        path: path of the log; None on ranks without output.
        print_line: function that prints one line.
        print_every: interval of printed step lines (every step is logged).

    Attributes:
        mark: suffix of every printed line, which marks synthetic data.
    """

    mark = ""

    def __init__(self, path: Path | None, print_line: PrintLine, print_every: int = 1) -> None:
        self._path, self._print_line, self._print_every = path, print_line, print_every

    @property
    def is_enabled(self) -> bool:
        """True on the rank that logs and prints."""
        return self._path is not None

    def print_line(self, line: str) -> None:
        """Print a line that is not logged."""
        if self._path is not None:
            self._print_line(line if "source=" in line else line + self.mark)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one object to the log."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise OutputError(
                f"{self._path} cannot be written: {error.strerror}. Make room, then continue with --resume."
            ) from error

    def step(self, entry: dict[str, Any], steps: int) -> None:
        """Log a step and print its loss, speed, padding and data wait."""
        self.write({"kind": "step", **entry})
        step = entry["step"]
        if step % self._print_every == 0 or step in (1, steps):
            uneven = f"  imbalance {entry['imbalance']:.3f}" if "imbalance" in entry else ""
            self.print_line(
                f"step {step:>{len(str(steps))}}/{steps}  loss {entry['loss']:.4f}  "
                f"lr {entry['lr']:.2e}  {entry['tokens_per_s']:,.0f} tok/s  "
                f"trained {entry['trained_share']:.2%}  padding {entry['padding']:.2%}  "
                f"data wait {entry['data_wait']:.2%}{uneven}"
            )

    def val(self, step: int, steps: int, loss: float, origin: str, sources: dict[str, float]) -> None:
        """Log and print the val loss, and for a mixture the loss of each source."""
        entry: dict[str, Any] = {"kind": "val", "step": step, "loss": loss, "origin": origin}
        self.write({**entry, "sources": sources} if sources else entry)
        source_losses = [f"{name} {source_loss:.4f}" for name, source_loss in sources.items()]
        source_note = f"  ({format_list(source_losses, MAX_LISTED)})" if source_losses else ""
        self.print_line(f"step {step:>{len(str(steps))}}/{steps}  val loss {loss:.4f}{source_note}")


def draw_loss_curve(log: Path, png: Path, title: str) -> None:
    """Plot the losses of a log against the step; OutputError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    entries = read_log(log)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, style, label in (("step", "-", "train"), ("val", "o-", "val")):
        points = [(entry["step"], entry["loss"]) for entry in entries if entry.get("kind") == kind and "loss" in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=escape_plot_text(title))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, png)
