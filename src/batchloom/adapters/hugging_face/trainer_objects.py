"""Objects for Hugging Face's ``Trainer`` and TRL's ``SFTTrainer``.

    parts = make_trainer_parts(loader, args)
    Trainer(model=model, args=args, train_dataset=parts.dataset, data_collator=parts.collator,
            callbacks=[parts.callback], compute_loss_func=parts.loss)

These trainers distribute batches to ranks themselves, in turn. So the dataset is numbered in the order of their
requests, and each rank gets, step by step, the rows that the loader has for it.

Metrics at the steps that the trainer logs:

    meter = Meter(loader)
    Trainer(..., callbacks=[parts.callback, MetricsCallback(meter, send_to_jsonl("out/metrics.jsonl"))])
"""

from batchloom.adapters.requirements import ACCELERATE, DATASETS, TORCH, TRANSFORMERS, TRL, require_installed

require_installed(TORCH, TRANSFORMERS, DATASETS, ACCELERATE)

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast, final

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import get_worker_info
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.isolation_check import check_no_leak, get_logits
from batchloom.adapters.logging import SendMetrics
from batchloom.adapters.pytorch import LoaderDataset
from batchloom.adapters.weighted_loss import sum_token_losses
from batchloom.adapters.worker_memory import SharedDict
from batchloom.batches import IGNORE_INDEX, Batch, Loader, Meter, get_token_reader
from batchloom.core.errors import InputError, SettingsError, StateError, TrainError
from batchloom.core.settings import as_int, quote_value
from batchloom.core.wording import format_count
from batchloom.plan.order import DATA_PARALLEL, list_divisors

BatchForm = Callable[[Batch], Mapping[str, Any]]
_DEALT_REMEDY = (
    "The plan already shuffles and distributes rows: give train_sampling_strategy='sequential', and no sampler, "
    "dispatching or splitting of batches."
)
# Trainer settings that the plan has already decided: the required value, and the reason.
_REQUIRED_SETTINGS: dict[str, tuple[object, str]] = {
    "train_sampling_strategy": (
        "sequential",
        "the plan already shuffles, and can group by length (group_by_length=True)",
    ),
    "dataloader_drop_last": (False, "the plan defines the last step (last='drop')"),
    "dataloader_in_order": (True, "the order of batches would change with every run"),
    "auto_find_batch_size": (False, "the plan defines the sizes of a step"),
    "restore_callback_states_from_checkpoint": (False, "the callback would be recreated without its loader"),
    "use_cache": (False, "with a cache the documents of a packed row see each other"),
}


class MicroBatchCollator:
    """Collator that unpacks the micro-batch, which the dataset gives as one item."""

    def __init__(self, form: BatchForm | None = None) -> None:
        self._form = form

    def __call__(self, items: Sequence[Batch]) -> dict[str, Any]:
        """Return the micro-batch, converted by ``form``."""
        if len(items) != 1 or not isinstance(items[0], Batch):
            raise TrainError(
                f"The collator was given {len(items)} rows of {type(items[0]).__name__} and needs a micro-batch of "
                "this adapter's dataset: give parts.dataset (parts.eval_dataset) and parts.collator together."
            )
        model_inputs = items[0] if self._form is None else self._form(items[0])
        return dict(model_inputs) if get_worker_info() is None else SharedDict(model_inputs)


@dataclass(frozen=True, slots=True)
class TrainerBatching:
    """Distribution of a sequential dataset by a trainer: one batch per rank in turn.

    Attributes:
        batch_size: rows of a micro-batch.
        accumulation: micro-batches of a step on a rank.
        rank: rank of this process.
        world_size: number of ranks.
    """

    batch_size: int
    accumulation: int
    rank: int
    world_size: int

    @property
    def rows(self) -> int:
        """Rows of a step, over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def locate_row(self, number: int) -> tuple[int, int, int]:
        """Return (step, micro-batch, row in it) of a row number of the dataset.

        Raises:
            TrainError: the row belongs to another rank.
        """
        batch, row = divmod(number, self.batch_size)
        turn, rank = divmod(batch, self.world_size)
        if rank != self.rank:
            raise TrainError(
                f"Row {number} is for rank {rank} of {self.world_size}, and rank {self.rank} requests it. "
                f"{_DEALT_REMEDY}"
            )
        step, micro = divmod(turn, self.accumulation)
        return step, micro, row

    def locate_micro_batch(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Return (step, micro-batch) of the rows that a trainer requests together.

        Raises:
            TrainError: they are not one micro-batch, or belong to another rank.
        """
        step, micro, row = self.locate_row(numbers[0])
        if row or list(numbers) != list(range(numbers[0], numbers[0] + self.batch_size)):
            first_rows = ", ".join(map(str, numbers[:4]))
            raise TrainError(
                f"The trainer requests rows {first_rows}, ... ({len(numbers)}) at once, and a micro-batch of the "
                f"plan has {self.batch_size} consecutive rows. {_DEALT_REMEDY}"
            )
        return step, micro


def make_trainer_batching(args: Any, loader: Loader, *, evaluation: bool = False) -> TrainerBatching:
    share = (loader.spec.rank, loader.spec.world_size)
    if evaluation:
        return TrainerBatching(args.eval_batch_size, 1, *share)
    return TrainerBatching(args.train_batch_size, args.gradient_accumulation_steps, *share)


def find_training_problems(args: Any, loader: Loader) -> list[str]:
    """Return the reasons why a trainer would not follow the plan, with remedies."""
    return [
        *_find_loader_problems(args, loader, "loader"),
        *_find_order_problems(args),
        *_find_size_problems(args, loader),
        *_find_step_problems(args, loader),
        *_find_sft_problems(args),
    ]


def find_evaluation_problems(args: Any, loader: Loader) -> list[str]:
    """Return the reasons why a trainer would not evaluate on a loader's plan."""
    problems = _find_loader_problems(args, loader, "evaluation")
    if not loader.plan.has_step(0):
        problems.append(_describe_no_steps("evaluation", loader))
    rows = _get_rows_per_step(loader)
    if rows is not None and rows != args.eval_batch_size:
        problems.append(
            f"per_device_eval_batch_size: {args.eval_batch_size} rows per rank, and the evaluation loader has "
            f"{rows}: give its Loader global_batch_size={args.eval_batch_size * args.world_size}, or "
            f"per_device_eval_batch_size={rows}"
        )
    return problems


def _find_loader_problems(args: Any, loader: Loader, name: str) -> list[str]:
    spec = loader.spec
    problems = []
    if (spec.rank, spec.world_size) != (args.process_index, args.world_size):
        problems.append(
            f"{name}: reads the share of rank {spec.rank} of {spec.world_size}, and the trainer's process is "
            f"{args.process_index} of {args.world_size}: make the TrainingArguments first, which start "
            "torch.distributed, and then the Loader, without rank= and world_size="
        )
    if spec.labels != "aligned":
        problems.append(
            f"{name}: labels={spec.labels!r}; transformers models shift labels themselves: give labels='aligned'"
        )
    if loader.holds_media:
        problems += _find_media_problems(args, loader, name)
    if spec.output != "torch":
        problems.append(f"{name}: output={spec.output!r}; the trainer takes tensors: give output='torch'")
    mesh = getattr(args, "parallelism_config", None)
    split = mesh is not None and mesh.tp_size * mesh.cp_size * mesh.sp_size > 1
    if spec.mesh != DATA_PARALLEL or split:
        problems.append(f"{name}: tensor and context parallelism are not supported: use data-parallel ranks only")
    return problems


def _find_media_problems(args: Any, loader: Loader, name: str) -> list[str]:
    """Return the settings that do not work with images and audio."""
    problems = []
    if loader.spec.form != "rows":
        problems.append(f"{name}: form={loader.spec.form!r}; with images or audio give form='rows'")
    if args.world_size == 1:
        return problems
    sharding_reason = "sharded layers wait for ranks whose pass holds no image or audio"
    if args.fsdp or args.deepspeed:
        setting_name = "fsdp" if args.fsdp else "deepspeed"
        problems.append(
            f"{setting_name}: {sharding_reason}: leave it out (DDP), or use FSDP2SFTTrainer, which runs them on all "
            "ranks"
        )
    find_unused_parameters = args.ddp_find_unused_parameters
    if not (find_unused_parameters or (find_unused_parameters is None and not args.gradient_checkpointing)):
        problems.append(
            f"ddp_find_unused_parameters: {find_unused_parameters}; a pass may hold no image or audio, and other "
            "ranks would wait for the gradients of the image or audio layers: set it to True"
        )
    return problems


def _find_order_problems(args: Any) -> list[str]:
    problems = [
        f"{name}: {getattr(args, name)!r}; {reason}: {name}={required!r}"
        for name, (required, reason) in _REQUIRED_SETTINGS.items()
        if getattr(args, name, required) != required
    ]
    problems += [
        f"accelerator_config.{name}: True distributes rows differently from the plan: leave it unset"
        for name in ("dispatch_batches", "split_batches")
        if getattr(args.accelerator_config, name)
    ]
    if args.world_size > 1 and not args.average_tokens_across_devices:
        weight = "with False, the weight of a token depends on its rank: leave it True"
        problems.append(f"average_tokens_across_devices: {weight}")
    return problems


def _get_rows_per_step(loader: Loader) -> int | None:
    """Return the rows of every step of a rank; None if edits change them."""
    row_counts = {loader.feed.share_at(segment.step).rows for segment in loader.plan.segments}
    return None if len(row_counts) > 1 else row_counts.pop()


def _find_size_problems(args: Any, loader: Loader) -> list[str]:
    rows = _get_rows_per_step(loader)
    if rows is None:
        fact = "its edits change global_batch_size, and a trainer has a single one for the run"
        return [f"loader: {fact}: edit only other settings"]
    batch_size = args.train_batch_size
    passes = args.gradient_accumulation_steps
    if batch_size * passes == rows:
        return []
    valid_sizes = ", ".join(f"{size} x {rows // size}" for size in list_divisors(rows))
    actual_size = batch_size * passes * args.world_size
    expected_size = loader.plan.spec.global_batch_size
    fact = (
        f"{batch_size} rows x gradient_accumulation_steps {passes} x {args.world_size} ranks make {actual_size} a "
        f"step, and the plan has global_batch_size {expected_size}; rows x steps that match: {valid_sizes}"
    )
    return [f"per_device_train_batch_size: {fact}; or Loader(global_batch_size={actual_size})"]


def _find_step_problems(args: Any, loader: Loader) -> list[str]:
    steps = len(loader)
    if not steps:
        return [_describe_no_steps("loader", loader)]
    if args.max_steps > steps:
        more = "Loader(epochs=...) or Loader(steps=...) gives more"
        return [f"max_steps: {args.max_steps}, and the plan has {steps}: give at most {steps}; {more}"]
    if args.max_steps <= 0 and args.num_train_epochs > 1:
        remedy = "num_train_epochs=1, and Loader(epochs=...), whose epochs each have their own order"
        return [f"num_train_epochs: {args.num_train_epochs} would repeat the same steps: {remedy}"]
    return []


def _describe_no_steps(name: str, loader: Loader) -> str:
    size = loader.plan.spec.global_batch_size
    return (
        f"{name}: the documents do not fill a step of {size} sequences, and last='drop' leaves out an incomplete "
        "step: give last='fill', or a smaller global_batch_size"
    )


def _find_sft_problems(args: Any) -> list[str]:
    """Return the settings of an ``SFTConfig`` that would change prepared rows."""
    if not hasattr(args, "dataset_kwargs"):
        return []
    require_installed(TRL)
    problems = [
        f"{name}: True, and the loader already packs: {name}=False"
        for name in ("packing", "padding_free", "eval_packing")
        if getattr(args, name, False)
    ]
    if not (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        remedy = "dataset_kwargs={'skip_prepare_dataset': True}"
        problems.append(f"dataset_kwargs: SFTTrainer would process rows that are already prepared: {remedy}")
    return problems


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

    dataset: "PlannedRows"
    collator: MicroBatchCollator
    callback: "PlanState"
    loss: "TokenLoss"
    eval_dataset: "PlannedRows | None"


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
    dataset = PlannedRows(loader, make_trainer_batching(args, loader))
    collator = MicroBatchCollator(form)
    loss = TokenLoss(args.label_smoothing_factor)
    return TrainerParts(
        dataset,
        collator,
        PlanState(loader, dataset, collator, loss, evaluation),
        loss,
        None
        if evaluation is None
        else PlannedRows(evaluation, make_trainer_batching(args, evaluation, evaluation=True)),
    )


@final
# SFTTrainer accepts no other class.
class PlannedRows(datasets.Dataset):  # type: ignore[misc]
    """Rows of all steps, numbered in the order in which a trainer distributes them.

    A process reads the rows of its own rank, one micro-batch at a time, with any number of workers.
    """

    def __init__(self, loader: Loader, dealing: TrainerBatching) -> None:
        names = ("input_ids", "labels", "position_ids")
        super().__init__(pa.table({name: pa.array([], pa.list_(pa.int64())) for name in names}))
        self.dealing = dealing
        self.begin(loader, 0)

    def begin(self, loader: Loader, first: int) -> None:
        """Set the plan to its current state, from step ``first`` on."""
        # The number of rows is asked for by what distributes them, which would divide the steps of a loader.
        self._steps = LoaderDataset(loader)
        self._step_count = len(loader)
        self._first = first
        self._cached_batch: tuple[int, Batch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached_batch": None}

    def __len__(self) -> int:
        return (self._step_count - self._first) * self.dealing.rows

    @property
    def num_rows(self) -> int:
        """Rows of all steps."""
        return len(self)

    def _read_step(self, step: int) -> Batch:
        if self._cached_batch is None or self._cached_batch[0] != step:
            self._cached_batch = step, self._steps[self._first + step]
        return self._cached_batch[1]

    def __getitems__(self, keys: list[int]) -> list[Batch]:
        """Return the micro-batch of these rows, as one item."""
        step, micro = self.dealing.locate_micro_batch(keys)
        return [self._read_step(step).split(self.dealing.batch_size)[micro]]

    def __getitem__(self, key: Any) -> Batch:
        """Return a row of this rank as a batch of one.

        Raises:
            InputError: the key is a column, which rows that are read one by one do not have.
        """
        number = as_int(key)
        if number is None:
            raise InputError(f"Rows of a plan are selected by their numbers, not by {quote_value(key)}.")
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        step, micro, row = self.dealing.locate_row(number)
        return self._read_step(step).split(1)[micro * self.dealing.batch_size + row]

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's rows in training order."""
        for step in range(self._step_count - self._first):
            yield from self._read_step(step).split(1)

    def remove_columns(self, column_names: object, new_fingerprint: object = None) -> "PlannedRows":
        """Return the same rows, which only have columns that models take.

        A trainer calls this for any dataset.
        """
        del column_names, new_fingerprint
        return self

    def _refuse(self) -> NoReturn:
        raise InputError(
            "Rows of a plan are read when they are trained, and cannot be changed: change the settings of the Loader "
            "or the store. For SFTTrainer give dataset_kwargs={'skip_prepare_dataset': True}."
        )

    map = filter = select = shuffle = sort = shard = train_test_split = property(_refuse)


@final
class PlanState(TrainerCallback, ExportableState):  # type: ignore[misc]  # types of transformers are not read
    """Callback that saves the loader state in ``trainer_state.json`` and restores it.

    The state is that of the trained steps, without prefetched batches. Before the first step it checks that the ranks
    agree, that a checkpoint is of this plan, and that the model isolates documents.

    Args:
        loader: loader of this process.
        dataset: dataset that the trainer must use.
        collator: collator that the trainer must use.
        loss: loss that the trainer must use for data with loss weights.
        evaluation: loader of the evaluation data; None if there is none.

    Attributes:
        first: step that this call of ``train`` began with.
    """

    def __init__(
        self,
        loader: Loader,
        dataset: PlannedRows,
        collator: MicroBatchCollator,
        loss: "TokenLoss",
        evaluation: Loader | None = None,
    ) -> None:
        self._loader = loader
        self._dataset = dataset
        self._collator = collator
        self._loss = loss
        loaders = [loader] if evaluation is None else [loader, evaluation]
        self._weighted = any(get_token_reader(some.store).weighted for some in loaders)
        self._trainer_state: TrainerState | None = None
        self._model: Any = None
        self._edits = loader.plan.edits
        self._is_attached = False
        self.first = 0

    def state(self) -> dict[str, Any]:
        """Return the state for the trainer's checkpoints: plain JSON values."""
        steps_done = self._trainer_state.global_step if self._trainer_state else 0
        attributes = {"loader": self._loader.state_at(steps_done)}
        if self._model is not None:
            attributes["weights"] = sample_weights(self._model)
        return {"args": {}, "attributes": attributes}

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Turn the model's cache off, also for a run that only evaluates."""
        disable_cache(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Check that the trainer will follow the plan, and resume from its checkpoint.

        Raises:
            SettingsError: settings changed since the parts were made.
            StateError: the checkpoint belongs to another plan (names each field that differs), or has no state.
            TrainError: another dataset or collator, batch sizes changed since the parts were made, ranks differ, the
                model lets documents attend to each other, or it does not have the weights of the checkpoint.
        """
        if problems := find_training_problems(args, self._loader):
            raise SettingsError(problems)
        # The model may have been replaced since the trainer was made.
        disable_cache(model)
        rows = train_dataloader.dataset
        collate = train_dataloader.collate_fn
        if rows is not self._dataset or collate is not self._collator:
            names = " and ".join(type(trainer_object).__name__ for trainer_object in (rows, collate))
            raise TrainError(
                f"The trainer has {names}: give it train_dataset=parts.dataset and data_collator=parts.collator "
                "of the same parts as the callback."
            )
        batching = make_trainer_batching(args, self._loader)
        expected_batching = self._dataset.dealing
        if batching != expected_batching:
            raise TrainError(
                f"The trainer's arguments have {batching.batch_size} rows x gradient_accumulation_steps "
                f"{batching.accumulation}, and its parts were made for {expected_batching.batch_size} x "
                f"{expected_batching.accumulation}: make new parts and a new trainer."
            )
        # The trainer counts steps in this object and keeps it while it trains.
        self._trainer_state = state
        self.first = state.global_step
        if self.first:
            self._resume(state, model)
        self._model = model
        # With ignore_data_skip the trainer restarts at row 0, which then must be the first row of the current
        # step.
        self._dataset.begin(self._loader, self.first if args.ignore_data_skip else 0)
        self._edits = self._loader.plan.edits
        require_agreement(self._loader, also={"max_steps": state.max_steps})
        check_no_leak(model, self._loader, self._collator, args.train_batch_size, half=args.bf16 or args.fp16)
        if self._weighted and not self._is_attached:
            self._loss.attach(model)
            self._is_attached = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Reject an edit of the plan during training.

        Raises:
            TrainError: the loader was edited since training began: rows are prefetched, also by other processes.
        """
        edits = self._loader.plan.edits
        if edits != self._edits:
            raise TrainError(
                f"The loader has {format_count(len(edits), 'edit')} and had {len(self._edits)} when training began, "
                "and the trainer reads the plan of that time: edit before trainer.train(), also when it resumes from "
                "a checkpoint."
            )

    def _resume(self, state: TrainerState, model: Any) -> None:
        saved_state = cast("dict[str, Any]", state.stateful_callbacks).get(type(self).__name__)
        saved_state = saved_state.get("attributes") if isinstance(saved_state, dict) else None
        if not isinstance(saved_state, dict) or "loader" not in saved_state:
            raise StateError(
                f"The checkpoint of step {self.first} holds no loader state: it was made without parts.callback, so "
                "its training data is unknown. Use a checkpoint made with it, or start without one."
            )
        self._loader.load_state_dict(saved_state["loader"])
        if self._loader.next_step != self.first:
            raise StateError(
                f"The checkpoint is of step {self.first} and its loader state is of step {self._loader.next_step}; "
                "it was changed by hand."
            )
        check_same_weights(model, saved_state.get("weights"), self.first)


@final
class TokenLoss:
    """Cross-entropy sum divided by the step's number of trained tokens on all ranks.

    Loss weights of a batch are applied, once the callback of the parts has attached the loss to the model.

    Args:
        smoothing: ``label_smoothing_factor``, which a trainer does not apply to a custom loss.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing
        self._weights: Tensor | None = None

    def attach(self, model: Any) -> None:
        """Take ``loss_weights`` from the model's inputs; trainers pass none to a loss."""
        model.register_forward_pre_hook(self._take_weights, with_kwargs=True)

    def _take_weights(self, _model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._weights is not None:
            raise TrainError(
                "The batches have loss_weights, and the trainer's loss does not apply them: give the trainer "
                "compute_loss_func=parts.loss."
            )
        self._weights = kwargs.get("loss_weights")
        return args, {name: value for name, value in kwargs.items() if name != "loss_weights"}

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of a micro-batch; 0 with a zero gradient if nothing is trained.

        Args:
            outputs: model outputs with ``logits`` [R, S, vocabulary].
            labels: labels [R, S], not shifted.
            num_items_in_batch: trained tokens of the step; None to count those of the micro-batch.
        """
        scores = get_logits(outputs)
        targets = labels[:, 1:].reshape(-1)
        weights = self._weights
        self._weights = None
        total = sum_token_losses(
            scores[:, :-1].reshape(len(targets), -1),
            targets,
            None if weights is None else weights[:, 1:].reshape(-1),
            label_smoothing=self._smoothing,
        )
        count = (targets != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
        return total / torch.as_tensor(count, device=total.device).clamp(min=1)


def disable_cache(model: Any) -> None:
    """Set ``use_cache`` to false in every config of a model.

    The trainer sets it only in ``model.config``. Models with images or audio (Llava, Qwen2-VL, Qwen2-Audio) read it in
    the config of their language model, and with a cache packed documents attend to each other.
    """
    for part in model.modules() if model is not None else ():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config.use_cache = False


def compute_row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return summed loss and trained tokens of each row, float32 [R, 2].

    Use it as ``preprocess_logits_for_metrics``.
    """
    targets = labels[:, 1:]
    losses = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), targets, ignore_index=IGNORE_INDEX, reduction="none"
    )
    return torch.stack([losses.sum(1), (targets != IGNORE_INDEX).sum(1).float()], 1)


def compute_token_loss(prediction: Any) -> dict[str, float]:
    """Return ``eval_token_loss``, nats per trained token, for ``compute_metrics``.

    ``preprocess_logits_for_metrics`` must be :func:`compute_row_losses`.
    """
    losses, counts = np.asarray(prediction.predictions, np.float64).sum(0)
    return {"token_loss": float(losses / max(1.0, counts))}


@torch.no_grad()
def sample_weights(model: Any) -> dict[str, float]:
    """Return the middle element of each weight of a model except sharded ones."""
    weights = _get_local_weights(model)
    if not weights:
        return {}
    numbers = [weight.flatten()[weight.numel() // 2].double().cpu() for weight in weights.values()]
    return dict(zip(weights, torch.stack(numbers).tolist(), strict=True))


def _get_local_weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for name, weight in model.named_parameters()
        if type(weight.data) is torch.Tensor and weight.numel() and not weight.is_meta
    }


def check_same_weights(model: Any, saved_samples: object, step: int) -> None:
    """Reject a model whose weights differ from those in its checkpoint.

    Saved values that are not of :func:`sample_weights` are ignored. Values of another dtype are compared after
    rounding.

    Raises:
        TrainError: weights differ; the error names them.
    """
    if not isinstance(saved_samples, dict):
        return
    samples = sample_weights(model)
    weights = _get_local_weights(model)
    differing_names = [
        name
        for name, number in samples.items()
        if name in saved_samples and torch.tensor(saved_samples[name], dtype=weights[name].dtype).item() != number
    ]
    if differing_names:
        raise TrainError(
            f"The trainer does not have the weights of its checkpoint of step {step}: "
            f"{', '.join(differing_names[:3])} ({len(differing_names)} of {len(samples)}) have other values than "
            "when it was saved. If its log reports missing keys, transformers has not loaded them: give the trainer "
            "the model of the checkpoint (from_pretrained(CHECKPOINT)), and resume from it again."
        )


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
        self._meter = meter
        self._send = send

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._meter.begin()

    on_evaluate = on_save = on_train_begin

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Count a step."""
        self._meter.step(state.global_step - 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send the metrics of the steps since the last log."""
        if "loss" in (logs or {}) and state.is_world_process_zero:
            self._send(self._meter.metrics(), state.global_step)
