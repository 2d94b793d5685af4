"""Figures to loggers: each is a function of (figures, step), and so is whatever else takes them.

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
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One figure of a step."""


class DictLogger(Protocol):
    """What is used of a run of Weights & Biases, and of those that log as it does."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """The figures of a step."""


def send_to_tensorboard(writer: ScalarWriter) -> SendMetrics:
    """Each figure as a scalar of its name."""

    def send(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return send


def send_to_wandb(run: DictLogger) -> SendMetrics:
    """All figures by one ``run.log(figures, step=step)``; ``run`` is what ``wandb.init`` returns."""

    def send(metrics: Mapping[str, float], step: int) -> None:
        run.log(dict(metrics), step=step)

    return send


def send_to_jsonl(path: str | Path) -> SendMetrics:
    """A line ``{"step": ..., figure: ...}`` at the end of a file, which is whole once it is sent.

    Figures that are no finite number are null, since JSON has none; one by the name ``step`` is left out.
    What a killed process left of a line stays alone on its line: the next begins behind a line break.

    Raises:
        OutputError: when sending, the file cannot be written.
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
            raise OutputError(f"{file} cannot be written: {error.strerror}. Make room or name another file.") from error

    return send


def send_to_all(*sends: SendMetrics) -> SendMetrics:
    """The same figures to each of several."""

    def send(metrics: Mapping[str, float], step: int) -> None:
        for send_metrics in sends:
            send_metrics(metrics, step)

    return send
