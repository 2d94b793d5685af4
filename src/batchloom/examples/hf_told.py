"""How the examples for Hugging Face trainers hear of the loss of a step."""

from typing import Any

from transformers import TrainerCallback

from batchloom.examples.job import Job


class Tell(TrainerCallback):
    """Says how steps went; rank 0 does."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_log(
        self,
        args: Any,  # noqa: ARG002 - theirs
        state: Any,
        control: Any,  # noqa: ARG002
        logs: Any = None,
        **_: Any,
    ) -> None:
        """Hear of a step."""
        if state.is_world_process_zero and "loss" in logs:
            self.job.tell(state.global_step - 1, logs["loss"])
