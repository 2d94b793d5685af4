"""Runs of Hugging Face's Trainer, for tests and the ranks that they start; imports no trl."""

from transformers import Trainer, TrainingArguments

STEPS = 6
MEDIA_STEPS = 4
# Sizes of a run on media by one rank or two.
MEDIA_RANK_SIZES = {"seq_len": 320, "global_batch_size": 4, "packing": "none"}


def make_args(folder, kind=TrainingArguments, **settings):
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": STEPS,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(str(folder), **{**defaults, **settings})


def get_losses(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class InputRecordingTrainer(Trainer):
    """Trainer that records all inputs of its loss."""

    def compute_loss(self, model, inputs, **settings):
        self.__dict__.setdefault("recorded", []).append(dict(inputs))
        return super().compute_loss(model, inputs, **settings)
