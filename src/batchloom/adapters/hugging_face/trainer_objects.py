"""Objects for Hugging Face's ``Trainer`` and TRL's ``SFTTrainer``.

    parts = make_trainer_parts(loader, args)
    Trainer(model=model, args=args, train_dataset=parts.dataset, data_collator=parts.collator,
            callbacks=[parts.callback], compute_loss_func=parts.loss)

These trainers distribute batches to ranks themselves, in turn. So the dataset is numbered in the order of their
requests, and each rank gets, step by step, the rows that the loader has for it.
"""

from batchloom.adapters.requirements import (
    ACCELERATE,
    DATASETS,
    TORCH,
    TRANSFORMERS,
    require_installed,
)

require_installed(TORCH, TRANSFORMERS, DATASETS, ACCELERATE)

from dataclasses import dataclass
from typing import Any

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.hugging_face.hf_dealing import (
    BatchForm,
    MicroBatchCollator,
    find_evaluation_problems,
    find_training_problems,
    make_trainer_batching,
)
from batchloom.adapters.hugging_face.hf_parts import PlannedRows, PlanState, TokenLoss
from batchloom.batches import Loader
from batchloom.core.errors import InputError, SettingsError


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """Arguments for a trainer.

    Attributes:
        dataset: ``train_dataset=``.
        collator: ``data_collator=``, also for the evaluation.
        callback: entry of ``callbacks=``; saves the loader's state in the checkpoints and compares it on resume.
        loss: ``compute_loss_func=``; the mean over the step's trained tokens on all ranks, independent of the model's
            use of ``num_items_in_batch``; 0 if there are none. ``SFTTrainer`` does not need it.
        eval_dataset: ``eval_dataset=``; None without ``evaluation``.
    """

    dataset: PlannedRows
    collator: MicroBatchCollator
    callback: PlanState
    loss: TokenLoss
    eval_dataset: PlannedRows | None


def make_trainer_parts(
    loader: Loader, args: Any, *, evaluation: Loader | None = None, form: BatchForm | None = None
) -> TrainerParts:
    """Make the objects with which a trainer trains on exactly a loader's batches.

    Args:
        loader: loader of this process, not iterated yet; made after ``args``, which start torch.distributed.
        args: ``TrainingArguments`` (``SFTConfig``) of the trainer.
        evaluation: loader of the evaluation documents, with ``global_batch_size`` of
            ``per_device_eval_batch_size`` x ranks.
        form: function that converts a ``Batch`` to the model's inputs, such as those of
            ``batchloom.batches.forms``; None for no conversion.

    Raises:
        MissingDependencyError: ``args`` are of a trl version that is too old.
        SettingsError: settings with which the trainer would not follow the plan; the error lists all of them.
        InputError: the loader is a stream, whose steps cannot be read by number.
        TrainError: ``evaluation`` differs between ranks; the loader is compared before the first step.
    """
    for candidate in (loader, evaluation):
        if candidate is not None and candidate.streamed:
            raise InputError(
                "A stream has no numbered rows, which a trainer requires: prepare the data (batchloom prepare), or "
                "let the stream write a store (stream(keep=...)) and read that."
            )
    problems = find_training_problems(args, loader)
    if loader.next_step:
        problems.append(
            f"loader: is at step {loader.next_step}; give a new one, and resume with the trainer's own "
            "resume_from_checkpoint, which counts the steps"
        )
    if evaluation is not None:
        problems += find_evaluation_problems(args, evaluation)
    if problems:
        raise SettingsError(problems)
    if evaluation is not None:
        # A run may only evaluate.
        require_agreement(evaluation)
    dataset, collator = (
        PlannedRows(loader, make_trainer_batching(args, loader)),
        MicroBatchCollator(form),
    )
    return TrainerParts(
        dataset,
        collator,
        PlanState(loader, dataset, collator),
        TokenLoss(args.label_smoothing_factor),
        None
        if evaluation is None
        else PlannedRows(evaluation, make_trainer_batching(args, evaluation, evaluation=True)),
    )
