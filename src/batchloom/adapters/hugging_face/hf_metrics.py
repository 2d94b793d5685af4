"""Metrics of a run under a Hugging Face trainer, at the steps it logs.

meter = Meter(loader)
Trainer(..., callbacks=[parts.callback, MetricsCallback(meter, send_to_jsonl("out/metrics.jsonl"))])
"""

from batchloom.adapters.requirements import TORCH, TRANSFORMERS, require_installed

require_installed(TORCH, TRANSFORMERS)

from typing import Any, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from batchloom.adapters.logging import SendMetrics
from batchloom.batches import Meter


@final
class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # types of transformers are not read
    """Callback that counts steps with a meter and sends metrics when the trainer logs.

    Evaluations and checkpoints do not count into a step's time. The time spent waiting for data is unknown, because
    the trainer fetches by itself. Every rank counts, and rank 0 sends.

    Args:
        meter: meter of the loader that the trainer's parts were made of.
        send: function of (metrics, step); see ``batchloom.adapters.logging``.
    """

    def __init__(self, meter: Meter, send: SendMetrics) -> None:
        self._meter, self._send = meter, send

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._meter.begin()

    on_evaluate = on_save = on_train_begin

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - signature of transformers
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Count a step."""
        self._meter.step(state.global_step - 1)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - signature of transformers
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        *,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send the metrics of the steps since the last log."""
        if "loss" in (logs or {}) and state.is_world_process_zero:
            self._send(self._meter.metrics(), state.global_step)
