"""Distribution of rows by a Hugging Face trainer, and checks of its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchloom.adapters.requirements import TRL, require_installed
from batchloom.batches import Batch, Loader
from batchloom.core.errors import TrainError
from batchloom.plan.order import DATA_PARALLEL, list_divisors

BatchForm = Callable[[Batch], Mapping[str, Any]]


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
        return dict(items[0] if self._form is None else self._form(items[0]))


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


_DEALT_REMEDY = (
    "The plan already shuffles and distributes rows: give train_sampling_strategy='sequential', and no sampler, "
    "dispatching or splitting of batches."
)


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


# Trainer settings that the plan has already decided: the required value, and the reason.
_REQUIRED_SETTINGS: dict[str, tuple[object, str]] = {
    "train_sampling_strategy": (
        "sequential",
        "the plan already shuffles, and can group by length (PlanOptions(group_by_length=True))",
    ),
    "dataloader_drop_last": (False, "the plan defines the last step (PlanOptions(last='drop'))"),
    "dataloader_in_order": (True, "the order of batches would change with every run"),
    "auto_find_batch_size": (False, "the plan defines the sizes of a step"),
    "restore_callback_states_from_checkpoint": (False, "the callback would be recreated without its loader"),
    "use_cache": (False, "with a cache the documents of a packed row see each other"),
}


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
    row_counts = {loader.share_at(step_range.step).rows for step_range in loader.plan.orders.run_layout.step_ranges}
    return None if len(row_counts) > 1 else row_counts.pop()


def _find_size_problems(args: Any, loader: Loader) -> list[str]:
    rows = _get_rows_per_step(loader)
    if rows is None:
        fact = "its edits change global_batch_size, and a trainer has a single one for the run"
        return [f"loader: {fact}: edit only other settings"]
    batch_size, passes = args.train_batch_size, args.gradient_accumulation_steps
    if batch_size * passes == rows:
        return []
    valid_sizes = ", ".join(f"{size} x {rows // size}" for size in list_divisors(rows))
    actual_size, expected_size = batch_size * passes * args.world_size, loader.plan.spec.global_batch_size
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
