"""Output of a run: printed step lines, ``log.jsonl``, and a loss curve at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from batchloom.core.errors import OutputError, StateError
from batchloom.core.report_output import escape_plot_text, save_figure
from batchloom.train.json_files import parse_json_object

PrintLine = Callable[[str], None]
_ENTRY_KINDS = ("start", "step", "val", "edit")
_LOSS_KINDS = ("step", "val")
_MAX_LISTED = 8


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
        """Append one object to the log.

        Raises:
            OutputError: the log cannot be written.
        """
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
        omitted_note = f", and {len(source_losses) - _MAX_LISTED:,} more" if len(source_losses) > _MAX_LISTED else ""
        source_note = f"  ({', '.join(source_losses[:_MAX_LISTED])}{omitted_note})" if source_losses else ""
        self.print_line(f"step {step:>{len(str(steps))}}/{steps}  val loss {loss:.4f}{source_note}")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log, without an unfinished last line.

    A killed process may leave such a line. A log may lack entries or be deleted, because no step depends on it.
    An existing file must be a valid log, because it is truncated and drawn.

    Raises:
        StateError: a line is not a log entry; names it.
    """
    entries = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    # The last part is empty after a final line break; otherwise it is an unfinished line.
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = parse_json_object(line)
            fault = _find_entry_fault(entry)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise StateError(
                f"{path}, line {number} {fault}. Delete that line, or the whole log: a run continues without it, and "
                "only the curve begins later."
            )
        entries.append(entry)
    return entries


def _find_entry_fault(entry: dict[str, Any]) -> str:
    """Describe the error of an entry as the end of a sentence; empty if it is valid."""
    kind, step, loss = (entry.get(name) for name in ("kind", "step", "loss"))
    if kind not in _ENTRY_KINDS:
        return f"has {kind!r:.40} for kind, which is none of {', '.join(_ENTRY_KINDS)}"
    if not isinstance(step, int) or isinstance(step, bool):
        return f"has {step!r:.40} for step, which is not a whole number"
    if kind in _LOSS_KINDS and (not isinstance(loss, int | float) or isinstance(loss, bool)):
        return f"has {loss!r:.40} for loss, which is not a number"
    return ""


def truncate_log(path: Path, last_step: int) -> None:
    """Delete the entries after ``last_step``, which a resumed run writes again.

    A damaged log raises StateError and is unchanged.
    """
    retained_entries = [entry for entry in read_log(path) if entry["step"] <= last_step]
    partial_path = path.with_name(path.name + ".partial")
    try:
        partial_path.write_text("".join(json.dumps(entry) + "\n" for entry in retained_entries), "utf-8")
        partial_path.rename(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}. Fix the folder, then continue with --resume."
        ) from error


def draw_loss_curve(log: Path, png: Path, title: str) -> None:
    """Plot the losses of a log against the step; OutputError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    entries = read_log(log)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, style, label in (("step", "-", "train"), ("val", "o-", "val")):
        points = [(e["step"], e["loss"]) for e in entries if e["kind"] == kind]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=escape_plot_text(title))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, png)
