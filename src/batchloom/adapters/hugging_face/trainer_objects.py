"""Hugging Face ``Trainer`` and TRL's ``SFTTrainer``, as they are: a dataset, a collator, a callback and a loss.

    parts = make_trainer_parts(loader, args)
    Trainer(model=model, args=args, train_dataset=parts.dataset, data_collator=parts.collator,
            callbacks=[parts.callback], compute_loss_func=parts.loss)

A trainer of theirs deals batches to ranks by itself, in turn; so the dataset is numbered in the order they ask for it,
and each rank is given, step by step, the rows the loader has for it.
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
    """What a trainer is given.

    Attributes:
        dataset: ``train_dataset=``.
        collator: ``data_collator=``, of the evaluation, too.
        callback: one of ``callbacks=``: keeps the loader's state in the checkpoints and compares it at a resume.
        loss: ``compute_loss_func=``: the mean over the trained tokens of the step, on all ranks, whatever the model
            makes of ``num_items_in_batch``; 0 where there are none. ``SFTTrainer`` needs none.
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
    """The parts that have a trainer train on the batches of a loader, micro-batch by micro-batch and rank by rank.

    Args:
        loader: of this process, not iterated yet; made after ``args``, which start torch.distributed.
        args: the ``TrainingArguments`` (``SFTConfig``) that the trainer is given.
        evaluation: over the documents to evaluate on, with ``global_batch_size`` of
            ``per_device_eval_batch_size`` x ranks.
        form: what a micro-batch becomes before the model is given it: a function of a ``Batch``, such as those of
            ``batchloom.batches.forms``; None leaves it as it is.

    Raises:
        MissingDependencyError: ``args`` are of a trl that is too old.
        SettingsError: settings under which the trainer would not train on the plan; all at once.
        InputError: a stream, which has no step on its own.
        TrainError: ranks whose ``evaluation`` differs; of the loader they find it out before the first step.
    """
    for candidate in (loader, evaluation):
        if candidate is not None and candidate.streamed:
            raise InputError(
                "A stream has no step on its own, and a trainer asks for rows by number: prepare the data "
                "(batchloom prepare), or keep the stream (stream(keep=...)) and read what it kept."
            )
    problems = find_training_problems(args, loader)
    if loader.next_step:
        problems.append(
            f"loader: goes on at step {loader.next_step}; give a new one, and the trainer's own "
            "resume_from_checkpoint: it counts the steps"
        )
    if evaluation is not None:
        problems += find_evaluation_problems(args, evaluation)
    if problems:
        raise SettingsError(problems)
    if evaluation is not None:
        # A run may be of an evaluation alone.
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
