"""Metrics to loggers: each logger is a function of (metrics, step).

send = send_to_all(send_to_tensorboard(writer), send_to_jsonl("run/metrics.jsonl"))
send(meter.metrics(), step)
"""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from batchloom.core.errors import OutputError

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
