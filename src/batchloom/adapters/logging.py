"""Metrics to loggers, each a function of (metrics, step), and the log of a run.

send = send_to_all(send_to_tensorboard(writer), send_to_jsonl("run/metrics.jsonl"))
send(meter.metrics(), step)
"""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from batchloom.core.errors import OutputError, StateError
from batchloom.core.files import replace_file
from batchloom.core.settings import as_int

# Kinds of entries that are written between two steps.
_BETWEEN_STEPS = ("start", "edit")
SendMetrics = Callable[[Mapping[str, float], int], None]


class ScalarWriter(Protocol):
    """Protocol of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one metric of a step."""


class DictLogger(Protocol):
    """Protocol of a Weights & Biases run, and of loggers with the same method."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Log the metrics of a step."""


def send_to_tensorboard(writer: ScalarWriter) -> SendMetrics:
    """Send each metric as a scalar of its name."""

    def send(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return send


def send_to_wandb(run: DictLogger) -> SendMetrics:
    """Send all metrics in one ``run.log(metrics, step=step)``.

    ``run`` is the result of ``wandb.init``.
    """

    def send(metrics: Mapping[str, float], step: int) -> None:
        run.log(dict(metrics), step=step)

    return send


def send_to_jsonl(path: str | Path) -> SendMetrics:
    """Append a line ``{"step": ..., metric: ...}`` to a file, flushed when it is sent.

    Values that are not finite are null, since JSON has none; a metric named ``step`` is dropped.
    If a killed process left an incomplete line, the next entry begins on a new line.

    Raises:
        OutputError: raised on sending if the file cannot be written.
    """
    file = Path(path)

    def send(metrics: Mapping[str, float], step: int) -> None:
        finite_metrics = {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in metrics.items()
            if name != "step"
        }
        line = json.dumps({"step": step, **finite_metrics}, allow_nan=False).encode() + b"\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a+b") as out:
                if out.seek(0, 2) and (out.seek(-1, 2), out.read(1))[1] != b"\n":
                    line = b"\n" + line
                out.write(line)
        except OSError as error:
            raise OutputError(
                f"{file} cannot be written: {error.strerror}. Free space or name another file."
            ) from error

    return send


def send_to_all(*sends: SendMetrics) -> SendMetrics:
    """Send the same metrics to each of several loggers."""

    def send(metrics: Mapping[str, float], step: int) -> None:
        for send_metrics in sends:
            send_metrics(metrics, step)

    return send


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's log, without an unfinished last line.

    A killed process may leave such a line. A log may lack entries or be deleted, because no step depends on it.

    Raises:
        StateError: a line is not a log entry; names it.
    """
    entries = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    # The last part is empty after a final line break; otherwise it is an unfinished line.
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        is_entry = isinstance(entry, dict) and as_int(entry.get("step")) is not None
        if not (is_entry and isinstance(entry.get("loss"), int | float | None)):
            raise StateError(
                f"{path}, line {number} is not an entry of a log: {line[:60]!r}. Delete that line, or the whole log: a "
                "run continues without it, and only the curve begins later."
            )
        entries.append(entry)
    return entries


def truncate_log(path: Path, done: int) -> None:
    """Delete the entries after ``done`` steps, which a resumed run writes again.

    What was logged between steps, such as a start or an edit, has the number of the next step.

    Raises:
        StateError: the log is damaged, and unchanged.
        OutputError: it cannot be written, and is unchanged.
    """
    lines = (
        json.dumps(entry) + "\n"
        for entry in read_log(path)
        if entry["step"] < done + (entry.get("kind") in _BETWEEN_STEPS)
    )
    with replace_file(path) as partial_path:
        partial_path.write_text("".join(lines), "utf-8")
