"""``FSDP2SFTTrainer``: training as in Hugging Face, with FSDP2 and a plan."""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import (
    barrier,
    discard_later_checkpoints,
    find_newest_checkpoint,
    list_checkpoints,
    parse_checkpoint_step,
    remove_old_checkpoints,
)
from batchloom.adapters.fsdp2 import fsdp2_state as fsdp2
from batchloom.adapters.fsdp2.fsdp2_arguments import FSDP2Arguments, collect_plan_settings, convert_arguments
from batchloom.adapters.isolation_check import check_no_leak
from batchloom.adapters.logging import send_to_jsonl, truncate_log
from batchloom.adapters.optimizer_step import (
    check_batch_ids,
    check_weights,
    make_parameter_groups,
    set_learning_rate,
    update_weights,
)
from batchloom.adapters.rank_group import RankGroup, choose_device
from batchloom.adapters.weighted_loss import compute_loss
from batchloom.batches import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    Batch,
    DocumentRows,
    Loader,
    Meter,
    accepts_argument,
    add_model_masks,
)
from batchloom.core.errors import InputError, PlanError, SettingsError, StateError, TrainError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.plan import Mixture, Plan
from batchloom.plan.order import list_divisors
from batchloom.store import Store, open_store, write_file
from batchloom.store.format import MaskBuilder, encode_index
from batchloom.store.write import write_mask

# Takes the sequences of a pass and returns the model's inputs.
Collator = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
_DATA_HELP = (
    "Give an open store (batchloom.open_store), a Mixture, a Plan, a Loader, or a list of records "
    '{"input_ids": [...], "labels": [...]}; batchloom prepare makes a store of texts and conversations'
)
_ID_DTYPE = np.dtype("<i4")
_MAX_ID = int(np.iinfo(_ID_DTYPE).max)
_NO_IDS = np.empty(0, _ID_DTYPE)
# Columns that other trainers read in addition to ids and labels, to mask the loss or to separate documents.
_UNSUPPORTED_COLUMNS = (
    "assistant_masks",
    "completion_mask",
    "label",
    "label_ids",
    "loss_mask",
    "loss_scale",
    "loss_weights",
    "position_ids",
    "seq_lengths",
)


class TrainOutput(NamedTuple):
    """Result of a run, under Hugging Face's names."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@final
class FSDP2SFTTrainer:
    """Trainer of transformers models on a plan's batches, alone or with torchrun.

    The loss is the sum over all trained tokens of a step, over all ranks and passes, divided by their number. So
    the number of ranks and passes does not change the gradient. Loss weights multiply the loss of their tokens.

    Args:
        model: a causal language model; under torchrun its layers are sharded (``_no_split_modules``) after rank 0's
            weights were broadcast. A model that is already sharded is not changed.
        args: ``FSDP2Arguments``, ``TrainingArguments`` or ``SFTConfig``. Unsupported settings are rejected.
        train_dataset: an open store, a ``Mixture``, a ``Plan``, a ``Loader``, a ``MultiModalDataset`` (also
            iterable), or records ``{"input_ids": [...], "labels": [...]}`` in memory (labels are the tokens, or -100).
        data_collator: None to use the plan's rows unchanged; else it takes the sequences of a pass, each
            ``{"input_ids", "labels", "position_ids"}`` of [seq_len] with padding, and returns the model's inputs.

    Attributes:
        args: settings of the run.
        loader: loader of this rank.
        log_history: entries of ``log.jsonl`` that this process made.

    Raises:
        SettingsError: settings are unsupported, invalid or contradict the given plan; lists all of them.
        InputError: the data cannot be trained on, records are invalid, or the model does not fit the data or does
            not accept the divisor of its loss.
        PlanError: the batch sizes in ``args`` do not make the plan's global batch; the error names valid ones.
    """

    def __init__(
        self, *, model: nn.Module, args: Any, train_dataset: Any, data_collator: Collator | None = None
    ) -> None:
        self.args = convert_arguments(args)
        self.model = model
        if isinstance(train_dataset, LoaderSource):
            # Its collator makes of rows what the loader gives already.
            data_collator = None
        self.data_collator = data_collator
        self.log_history: list[dict[str, Any]] = []
        self._log_file = Path(self.args.output_dir) / "log.jsonl"
        self.ranks = _start_process_group(use_cpu=self.args.use_cpu)
        world_size = self.ranks.world_size
        self.loader = make_fsdp2_loader(train_dataset, self.args, collect_plan_settings(args), world_size)
        self.media = None
        if self.loader.holds_media:
            self.media = MediaPasses(self.loader, model, collated=data_collator is not None)
        else:
            _check_model(model)
        if data_collator is None and not accepts_argument(model, "position_ids"):
            raise InputError(
                f"{type(model).__name__} takes no position_ids: it would let the documents of a row see each other."
            )
        plan_steps = len(self.loader)
        max_steps = self.args.max_steps
        if max_steps > plan_steps:
            raise PlanError(
                f"max_steps {max_steps} are requested and the plan has {plan_steps}: make the plan with "
                f"steps={max_steps}, or with more epochs."
            )
        self.steps = max_steps if max_steps > 0 else plan_steps
        if self.args.gradient_checkpointing:
            # Newer versions of transformers have the method under this name.
            legacy_enable: Any = getattr(model, "gradient_checkpointing_enable", None)
            getattr(model, "activation_checkpointing_enable", legacy_enable)({"use_reentrant": False})
        self._place_model()
        self.optimizer = torch.optim.AdamW(
            make_parameter_groups(model, self.args.weight_decay),
            self.args.learning_rate,
            # torch rejects integer betas, and a beta of 0 may be one.
            betas=(float(self.args.adam_beta1), float(self.args.adam_beta2)),
            eps=self.args.adam_epsilon,
        )

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:  # noqa: FBT001 - as theirs
        """Run the training steps; every rank calls it.

        Args:
            resume_from_checkpoint: True for the newest checkpoint of ``output_dir``, or a checkpoint folder; None
                to use the value in ``args``. The number of ranks may differ.

        Returns:
            Total steps done, mean loss of the steps of this call (nats per trained token) and ``train_runtime`` in
            seconds.

        Raises:
            StateError: there is no checkpoint, it belongs to another plan or model, or a line of the log is damaged.
            TrainError: ``output_dir`` has checkpoints and no resume was requested, ranks do not read the same
                data, the model has no embedding row for an id or lets packed documents attend to each other, or a
                loss is not finite, or the weights are not finite at a checkpoint or at the end.
        """
        start_time = time.monotonic()
        checkpoint = resume_from_checkpoint
        steps_done = self._resume(self.args.resume_from_checkpoint if checkpoint is None else checkpoint)
        require_agreement(self.loader)
        self.log_history = []
        if self.loader.spec.rank == 0 and self._log_file.is_file():
            truncate_log(self._log_file, steps_done)
        self.model.train()
        losses: list[float] = []
        # Loss and trained tokens of the steps since the last line of the log.
        window: list[tuple[float, int]] = []
        meter = Meter(self.loader)
        for batch in meter.over(self.loader):
            if batch.step >= self.steps:
                break
            steps_done = batch.step + 1
            if not losses:
                self._check_no_leak(batch)
            loss, norm, count = self._train_step(batch)
            losses.append(loss)
            window.append((loss, count))
            meter.step(batch, trained=count)
            if steps_done % self.args.logging_steps == 0 or steps_done == self.steps:
                mean = sum(loss for loss, _ in window) / len(window)
                tokens = sum(count for _, count in window)
                step_metrics = {"loss": mean, "tokens": tokens, "grad_norm": norm, "origin": batch.origin}
                self._log(batch.step, step_metrics | meter.metrics())
                window.clear()
            self._save_if_due(steps_done)
        # Keep the process group: save_model and scripts that read the shards need it.
        barrier()
        mean = sum(losses) / max(1, len(losses))
        seconds = time.monotonic() - start_time
        return TrainOutput(steps_done, mean, {"train_loss": mean, "train_runtime": seconds})

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the full model from rank 0 with ``save_pretrained``; every rank calls it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if self.loader.spec.rank == 0:
            folder = output_dir or self.args.output_dir
            self.model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        barrier()

    def _place_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            if self.args.bf16:
                raise InputError(
                    "bf16 is requested and the model is already sharded: give fully_shard a MixedPrecisionPolicy "
                    "with param_dtype=torch.bfloat16 instead."
                )
            return
        if any(weight.is_meta for weight in self.model.parameters()):
            raise InputError("The model has weights without values (device meta): load them before it is trained.")
        self.model.to(self.ranks.device)
        if self.ranks.world_size > 1:
            fsdp2.shard_model(self.model, bf16=self.args.bf16)

    def _resume(self, checkpoint: bool | str | None) -> int:  # noqa: FBT001
        """Resume from the requested checkpoint and return the steps done."""
        folder = Path(self.args.output_dir)
        newest_checkpoint = find_newest_checkpoint(folder)
        if not checkpoint:
            if newest_checkpoint is not None and self.args.save_strategy == "steps":
                raise TrainError(
                    f"{folder} holds {newest_checkpoint.name} of an earlier run: train(resume_from_checkpoint=True) "
                    "continues it; for a new run give another output_dir, or remove the checkpoints."
                )
            return 0
        checkpoint_path = newest_checkpoint if checkpoint is True else Path(str(checkpoint))
        if checkpoint_path is None:
            raise StateError(
                f"There is no checkpoint in {folder}: train() starts a run and saves the first checkpoint after "
                f"save_steps {self.args.save_steps}."
            )
        if not checkpoint_path.is_dir():
            raise StateError(
                f"There is no checkpoint {checkpoint_path}; {folder} has "
                f"{[path.name for path in list_checkpoints(folder)] or 'none'}."
            )
        steps_done = fsdp2.load_fsdp2(checkpoint_path, self.model, self.optimizer, self.loader)
        if self.args.save_strategy == "steps":
            discard_later_checkpoints(folder, parse_checkpoint_step(checkpoint_path))
        return steps_done

    def _train_step(self, batch: Batch) -> tuple[float, float, int]:
        """Do an optimizer step; return loss, gradient norm and trained tokens (all ranks)."""
        rank = self.loader.spec.rank
        seed = self.loader.plan.spec.seed
        check_batch_ids(self.model, batch)
        # Seed each step, so that dropout does not depend on interruptions.
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {batch.step} {rank}".encode()))
        split = batch.split(self.args.per_device_train_batch_size)
        if self.media is not None:
            split = self.media.add_extra_rows(split, self.ranks.device)
        parts = [self._make_model_inputs(part) for part in split]
        count = self._count_trained_tokens(batch.step, parts)
        lr = self.args.learning_rate * compute_lr_factor(self.args, batch.step, self.steps)
        set_learning_rate(self.optimizer, lr)
        loss, norm = update_weights(
            self.model,
            self.optimizer,
            (self._compute_loss(part, max(1, count)) for part in parts),
            self.ranks,
            step=batch.step,
            # With an infinite maximum it only computes the norm.
            max_norm=self.args.max_grad_norm or math.inf,
        )
        return loss, norm, count

    def _compute_loss(self, part: dict[str, Any], count: int) -> Any:
        """Return the loss of a pass, summed and divided by the trained tokens of the step."""
        with self._make_autocast():
            if self.media is None and "loss_weights" not in part:
                return self.model(**part, use_cache=False, num_items_in_batch=count).loss
            # Multimodal models divide their own loss by the tokens of the pass, and models do not weight their loss.
            return compute_loss(self.model, part, count)

    def _check_no_leak(self, batch: Batch) -> None:
        """Reject a model in which packed documents attend to each other."""
        if self.data_collator is not None:
            return
        check_batch_ids(self.model, batch)

        def collate(parts: list[Batch]) -> dict[str, Any]:
            return {**self._make_model_inputs(parts[0]), "use_cache": False}

        rows = self.args.per_device_train_batch_size
        half = self.args.bf16
        with self._make_autocast():
            check_no_leak(self.model, self.loader, collate, rows, half=half)
        if isinstance(self.model, FSDPModule):
            # Without a backward pass the root module would stay unsharded.
            self.model.reshard()

    def _make_model_inputs(self, part: Batch) -> dict[str, Any]:
        model_inputs: Mapping[str, Any] = part if self.media is None else self.media.add_masks(part, self.ranks.device)
        if self.data_collator is not None:
            rows = len(part["input_ids"])
            model_inputs = self.data_collator(
                [{name: value[row] for name, value in part.items()} for row in range(rows)]
            )
            if "loss_weights" in part and "loss_weights" not in model_inputs:
                raise InputError("data_collator leaves out loss_weights, which the data has: pass them on as they are.")
            mask = model_inputs.get("attention_mask")
            packing = self.loader.plan.spec.packing
            if mask is not None and mask.ndim == 2 and packing != "none":
                raise InputError(
                    f"data_collator gives an attention_mask of {list(mask.shape)} and rows are packed ({packing}): "
                    "their documents would see each other. Set packing=False, or leave the mask out."
                )
        return {
            name: value.to(self.ranks.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in model_inputs.items()
        }

    def _count_trained_tokens(self, step: int, parts: list[dict[str, Any]]) -> int:
        """Return the number of tokens with a loss in a step, over all ranks."""
        if self.data_collator is None:
            return self.loader.trained_tokens(step)
        local_count = sum(int((part["labels"][..., 1:] != IGNORE_INDEX).sum()) for part in parts)
        if local_count > (max_count := self.loader.tokens(step)):
            raise InputError(
                f"data_collator gives {local_count:,} labels in step {step} on rank {self.loader.spec.rank}, which "
                f"has {max_count:,} tokens: padding would be trained. Give labels of -100 where the plan has them."
            )
        return int(self.ranks.total(local_count)[0])

    def _make_autocast(self) -> AbstractContextManager[Any]:
        """Return autocast to bfloat16, unless FSDP does the mixed precision."""
        if self.args.bf16 and not isinstance(self.model, FSDPModule):
            return torch.autocast(self.ranks.device.type, torch.bfloat16)
        return nullcontext()

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        entry = {"lr": self.optimizer.param_groups[0]["lr"], **metrics}
        self.log_history.append({"step": step, **entry})
        if self.loader.spec.rank == 0:
            send_to_jsonl(self._log_file)(entry, step)

    def _save_if_due(self, step: int) -> None:
        is_last = step == self.steps
        is_due = self.args.save_strategy == "steps" and (step % self.args.save_steps == 0 or is_last)
        if is_due or is_last:
            check_weights(self.model, self.optimizer, self.ranks, step)
        if is_due:
            folder = Path(self.args.output_dir)
            fsdp2.save_fsdp2(folder, step, self.model, self.optimizer, self.loader)
            if self.args.save_total_limit:
                remove_old_checkpoints(folder, self.args.save_total_limit)


def _check_model(model: nn.Module) -> None:
    """Reject a model whose loss cannot be divided by the tokens of the complete step."""
    accepts_loss_kwargs = getattr(model, "accepts_loss_kwargs", None)
    if not (accepts_argument(model, "num_items_in_batch") if accepts_loss_kwargs is None else accepts_loss_kwargs):
        raise InputError(
            f"{type(model).__name__} does not take num_items_in_batch: its loss would be divided by the tokens of "
            "one pass of one rank, not by the tokens of the step. Use a causal language model of transformers, or "
            "write the loop: examples/fsdp2.py."
        )


def _start_process_group(*, use_cpu: bool) -> RankGroup:
    """Join the launcher's processes; scripts use the group after training."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device("cpu" if use_cpu else "auto", local_rank, "use_cpu=True")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if not dist.is_initialized():
        return RankGroup(0, 1, local_rank, device)
    return RankGroup(dist.get_rank(), dist.get_world_size(), local_rank, device)


def compute_lr_factor(args: FSDP2Arguments, step: int, steps: int) -> float:
    """Return the share of ``learning_rate`` at a step from 0, as in transformers."""
    warmup_setting = args.warmup_steps
    warmup_steps = int(warmup_setting) if warmup_setting >= 1 else math.ceil(steps * warmup_setting)
    kind = args.lr_scheduler_type
    if kind != "constant" and step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1 - progress)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * progress))) if kind == "cosine" else 1.0


@final
class MediaPasses:
    """Adds rows to passes so that all ranks run the media encoders together.

    Sharded layers wait for all ranks. If one rank has media in a pass, the ranks without get one more row: a
    document of the store with media and no trained tokens. It adds zeros to their gradients.
    """

    def __init__(self, loader: Loader, model: nn.Module, *, collated: bool) -> None:
        self._examples = DocumentRows(loader)
        if collated:
            raise InputError(
                "data_collator takes single sequences, and the data holds images or audio, which belong to complete "
                "passes: leave it out."
            )
        if not hasattr(model, "config"):
            raise InputError(
                f"{type(model).__name__} is not a transformers model, which data with images or audio requires. "
                "Write the loop: examples/fsdp2.py."
            )
        if misfit := self._examples.describe_media_mismatch(model, loader.plan.spec.seq_len):
            raise InputError(f"The model is {misfit}.")
        config: Any = model.config
        self._window: int | None = getattr(config.get_text_config(), "sliding_window", None)
        self._extra_rows: Batch | None = None

    def add_extra_rows(self, parts: Sequence[Batch], device: torch.device) -> list[Batch]:
        """Add a row to passes without media if other ranks have media; all ranks call it."""
        seq_len = parts[0]["input_ids"].shape[1]
        extra_rows = self._get_extra_rows(seq_len)
        if extra_rows is None or not dist.is_initialized():
            return list(parts)
        names = [name for name in extra_rows if name not in TOKEN_KEYS]
        has_media = torch.tensor([[name in part for name in names] for part in parts], device=device)
        has_media_anywhere = has_media.int()
        dist.all_reduce(has_media_anywhere, dist.ReduceOp.MAX)
        missing = ((has_media_anywhere > 0) & ~has_media).any(1).tolist()
        return [
            concat_rows(part, extra_rows) if is_missing else part
            for part, is_missing in zip(parts, missing, strict=True)
        ]

    def add_masks(self, part: Batch, device: torch.device) -> Batch:
        """Move a pass to a device and add the attention masks that its model needs."""
        part.update({name: value.to(device, non_blocking=True) for name, value in part.items()})
        return add_model_masks(part, self._window)

    def _get_extra_rows(self, seq_len: int) -> Batch | None:
        """Return untrained rows with all kinds of media; None if none fit into a row."""
        if self._extra_rows is None or self._extra_rows["input_ids"].shape[1] != seq_len:
            numbers = self._examples.with_media(seq_len)
            if not numbers:
                return None
            self._extra_rows = self._examples.batch([[number] for number in numbers], seq_len)
            self._extra_rows["labels"].fill_(IGNORE_INDEX)
            if "loss_weights" in self._extra_rows:
                self._extra_rows["loss_weights"].zero_()
        return self._extra_rows


def concat_rows(part: Batch, extra_rows: Batch) -> Batch:
    tensors = {}
    media = extra_rows.layout.media if extra_rows.layout is not None else {}
    for name, value in extra_rows.items():
        second = value.to(part["input_ids"].device)
        first = part.get(name)
        if name not in media:
            # Multimodal positions (time, height, width) have these as their first axis.
            tensors[name] = torch.cat((part[name], second), second.ndim - 2)
        elif first is not None:
            tensors[name] = _concat_padded(first, second)
        elif media[name].axis:
            # These features have one entry per row. Rows without media get zeros.
            padding = second.new_zeros((len(part["input_ids"]), *second.shape[1:]))
            tensors[name] = torch.cat((padding, second))
        else:
            tensors[name] = second
    return Batch(tensors, part.step, part.origin)


def _concat_padded(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate along the first axis; pad the others with zeros to the larger size."""
    sizes = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    result = first.new_zeros((len(first) + len(second), *sizes))
    result[: len(first), *map(slice, first.shape[1:])] = first
    result[len(first) :, *map(slice, second.shape[1:])] = second
    return result


@runtime_checkable
class LoaderSource(Protocol):
    """A data set that makes the loader of its rows, as in ``batchloom.compat``."""

    def make_loader(
        self, *, global_batch_size: int, micro_batch_size: int, steps: int | None, epochs: int | None
    ) -> Loader:
        """Return a loader with these sizes of the batch and this length of the run."""


def make_fsdp2_loader(data: Any, args: FSDP2Arguments, plan_settings: Mapping[str, Any], world_size: int) -> Loader:
    """Make the loader of this rank from any form of training data.

    ``plan_settings`` holds the explicitly set plan settings, as of ``collect_plan_settings``.
    """
    micro = args.per_device_train_batch_size
    size = micro * args.gradient_accumulation_steps * world_size
    if isinstance(data, Loader):
        _check_loader(data)
        _check_plan(data.plan, args, plan_settings, size)
        if data.spec.micro_batch_size not in (None, micro):
            raise PlanError(
                f"The Loader was made with micro_batch_size={data.spec.micro_batch_size} and "
                f"per_device_train_batch_size is {micro}: make them equal."
            )
        return data
    if isinstance(data, LoaderSource):
        steps = args.max_steps if args.max_steps > 0 else None
        epochs = None if steps else int(args.num_train_epochs or 1)
        loader = data.make_loader(global_batch_size=size, micro_batch_size=micro, steps=steps, epochs=epochs)
        _check_loader(loader)
        return loader
    if isinstance(data, Plan):
        _check_plan(data, args, plan_settings, size)
        return Loader(data, micro_batch_size=micro)
    if not isinstance(data, Store | Mixture):
        data = _store_records(data)
    if args.max_length is None:
        raise SettingsError(
            ["max_length: TrainingArguments has none; give SFTConfig or FSDP2Arguments, or a Plan as train_dataset"]
        )
    limited = args.max_steps > 0
    return Loader(
        data,
        seq_len=args.max_length,
        global_batch_size=size,
        packing="best_fit" if args.packing else "none",
        seed=args.seed or 0,
        steps=args.max_steps if limited else None,
        epochs=None if limited else int(args.num_train_epochs or 1),
        micro_batch_size=micro,
    )


def _check_loader(loader: Loader) -> None:
    spec = loader.spec
    problems = [
        f"{name}: {actual!r} instead of {expected!r}"
        for name, actual, expected in (
            ("form", spec.form, "rows"),
            ("output", spec.output, "torch"),
            ("labels", spec.labels, "aligned"),
            ("uneven", spec.uneven, "refuse"),
            ("mesh.peers", spec.mesh.processes_per_data_rank, 1),
        )
        if actual != expected
    ]
    if loader.streamed:
        problems.append("a stream: prepare the data, so that any step can be read again")
    if problems:
        raise SettingsError([f"train_dataset is a Loader with {problem}" for problem in problems])


def _check_plan(plan: Plan, args: FSDP2Arguments, plan_settings: Mapping[str, Any], size: int) -> None:
    spec = plan.spec
    epochs = spec.epochs or (None if spec.steps else 1)
    plan_values: dict[str, tuple[Any, str]] = {
        "max_length": (spec.seq_len, f"seq_len={spec.seq_len}"),
        "packing": (spec.packing != "none", f"packing={spec.packing!r}"),
        "seed": (spec.seed, f"seed={spec.seed}"),
    }
    if args.max_steps <= 0:
        description = f"epochs={epochs}" if epochs else f"steps={spec.steps}"
        plan_values["num_train_epochs"] = (epochs, description)
    raise_problems(
        [
            f"{name}: {plan_settings[name]} is requested and the plan has {description}: leave it out, or make "
            "another Plan"
            for name, (value, description) in plan_values.items()
            if name in plan_settings and plan_settings[name] != value
        ]
    )
    if size != spec.global_batch_size:
        world = size // (args.per_device_train_batch_size * args.gradient_accumulation_steps)
        rows, remainder = divmod(spec.global_batch_size, world)
        valid_sizes = [] if remainder else [f"{micro} x {rows // micro}" for micro in list_divisors(rows)]
        raise PlanError(
            f"per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps} x {world} ranks are {size} sequences per step and the plan's "
            f"global_batch_size is {spec.global_batch_size}: "
            + (f"give {' or '.join(valid_sizes[-4:])}." if valid_sizes else "use a number of ranks that divides it.")
        )


def _store_records(records: Any) -> Store:
    """Write records to a store in a temporary folder that is deleted with the store."""
    if isinstance(records, str | bytes | Mapping) or not (
        hasattr(records, "__len__") and hasattr(records, "__getitem__")
    ):
        raise InputError(f"train_dataset is {quote_value(records)}. {_DATA_HELP}.")
    if not len(records):
        raise InputError(f"train_dataset is a {type(records).__name__} without records. {_DATA_HELP}.")
    bits = MaskBuilder()
    id_buffers = []
    lengths = []
    for number in range(len(records)):
        ids, trained_mask = _parse_document(records[number], number)
        bits.append(trained_mask)
        id_buffers.append(ids.tobytes())
        lengths.append(ids.size)
    folder = tempfile.mkdtemp(prefix="batchloom-")
    stem = Path(folder) / "records"
    write_file(stem.with_suffix(".bin"), b"".join(id_buffers))
    write_file(stem.with_suffix(".idx"), encode_index(np.array(lengths, np.uint32), _ID_DTYPE))
    write_mask(stem, bits)
    store = open_store(stem)
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


def _parse_document(record: Any, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the ids of a record, and the mask of its trained tokens."""
    if not isinstance(record, Mapping) or "input_ids" not in record:
        raise InputError(f"Record {number} of train_dataset is {quote_value(record)}. {_DATA_HELP}.")
    ids = _to_integer_array(record["input_ids"])
    _check_columns(record, number, ids.shape)
    labels = ids if record.get("labels") is None else _to_integer_array(record["labels"])
    if not ids.size or labels.shape != ids.shape or ids.min() < 0 or ids.max() > _MAX_ID:
        raise InputError(
            f"Record {number} of train_dataset has input_ids {quote_value(record['input_ids'])} and labels "
            f"{quote_value(record.get('labels'))}. Give lists of one length: token ids from 0 to {_MAX_ID}, and labels "
            "that are the ids, or -100 where there is no loss."
        )
    trained_mask = labels != IGNORE_INDEX
    if (labels[trained_mask] != ids[trained_mask]).any():
        raise InputError(
            f"Record {number} of train_dataset has labels that are neither its input_ids nor -100: do not shift them, "
            "models shift labels themselves."
        )
    return ids.astype(_ID_DTYPE), trained_mask


def _to_integer_array(values: Any) -> NDArray[Any]:
    """Convert values to a 1-D integer array; an empty one if they are none."""
    try:
        array = np.asarray(values)
    except ValueError:
        # The rows have different lengths.
        return _NO_IDS
    return array if array.ndim == 1 and array.dtype.kind in "iu" else _NO_IDS


def _check_columns(record: Mapping[str, Any], number: int, shape: tuple[int, ...]) -> None:
    """Reject columns that change the loss in other trainers and have no effect here."""
    columns = [name for name in _UNSUPPORTED_COLUMNS if record.get(name) is not None]
    mask = record.get("attention_mask")
    if mask is not None and not np.array_equal(mask, np.ones(shape)):
        columns.append("attention_mask (with values other than 1)")
    if columns:
        raise InputError(
            f"Record {number} of train_dataset has {', '.join(columns)}, which FSDP2SFTTrainer does not support: "
            "give labels that are -100 where there is no loss, one document per record without padding, and leave "
            "the rest out."
        )
