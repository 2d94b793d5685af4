"""The training loop, top to bottom.

The loss of a step is a sum over the trained tokens of its whole global batch, divided by
their number, so how the batch is cut into passes and shared by ranks does not change the
gradient. All that a step computes follows from the settings, the store and its number:
that is why a resumed run goes on exactly.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchloom import Loader, Store
from batchloom.batches import Batch, Meter
from batchloom.core.errors import TrainError
from batchloom.train.checkpoint import has_only_finite, read_checkpoint_step
from batchloom.train.data import (
    as_stream,
    finish_stream_store,
    make_model_inputs,
    merge_loader_state,
    write_processor_files,
)
from batchloom.train.edit_requests import EditInbox, apply_pending_edits
from batchloom.train.model import (
    IGNORED_LABEL,
    PretrainedModel,
    copy_tokenizer,
    explain_memory_errors,
)
from batchloom.train.model_build import TrainableModel
from batchloom.train.run import TrainRun, open_run_folder
from batchloom.train.train_log import draw_loss_curve
from batchloom.train.train_settings import OptimSettings, PretrainedSettings


class StepResult(NamedTuple):
    """What a step came to: nats a trained token, the gradient's norm, trained tokens."""

    loss: float
    norm: float
    trained: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: the last step done.
        val_loss: nats a token of the val subset at the end; None when there is none.
        model: the trained model.
    """

    step: int
    val_loss: float | None
    model: TrainableModel


def train(
    run: TrainRun,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    between: Callable[[int], None] = lambda _: None,
) -> TrainResult:
    """Do the steps of a run.

    Args:
        run: as :func:`set_up` makes it.
        resume: go on from the newest checkpoint of the folder; else the folder must be new.
        stop_at: save and stop after this step, as if the time were up.
        between: called on every rank with the steps done so far, before the first and after each; what it raises ends
            the run.

    Raises:
        StateError: ``resume`` with other settings or data; names each field that differs.
        TrainError: the folder holds something else, a loss is not finite, or the memory does
            not suffice.
        StoreConflictError: another process trains in the folder.
        OutputError: the folder cannot be written.
    """
    with run.folder.lock() if run.ranks.first else nullcontext():
        return _run_steps(run, resume=resume, stop_at=stop_at, between=between)


def _run_steps(run: TrainRun, *, resume: bool, stop_at: int | None, between: Callable[[int], None]) -> TrainResult:
    """The steps of a run in a folder that is ours."""
    settings, log = run.settings, run.log
    start_step = open_run_folder(run, resume=resume)
    inbox = EditInbox(run.folder.edits)
    # Edits that the newest checkpoint does not know of: before any step is made without them.
    edited_state = run.loader.state_dict() if apply_pending_edits(run, inbox, start_step) else None
    last = min(settings.steps, stop_at or settings.steps)
    val_loss, parameters = None, count_parameters(run)
    if start_step >= last:
        log.print_line(
            f"Step {start_step} of {settings.steps} is done already; --max-iters (of a worker --num-steps) sets how "
            "many."
        )
    step, meter = start_step, Meter(run.loader, exchange=False)
    between(start_step)
    for batch in iter_next_batches(run, meter, max(0, last - start_step)):
        step = batch.step + 1
        lr = compute_learning_rate(step, settings.steps, settings.optim)
        check_batch_ids(run, run.store, batch)
        with explain_memory_errors(settings, parameters):
            loss, norm, trained = run_optimizer_step(run, batch, lr)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            fact = f"The loss of step {step} is {loss} (gradient norm {norm})"
            raise TrainError(describe_divergence(run, step, fact))
        meter.step(batch.step, trained=trained)
        log_step(run, batch, {"loss": loss, "lr": lr, "norm": norm, "trained": trained}, meter)
        apply_pending_edits(run, inbox, step)
        if step == last or is_due(step, settings.eval_interval):
            val_loss = evaluate_val_loss(run, step)
        if step == last or is_due(step, settings.save_interval):
            save_run_checkpoint(run, step)
        between(step)
    if start_step < step < last:
        log.print_line(f"The sources are exhausted after step {step} of {settings.steps}; the run ends.")
        if not is_due(step, settings.eval_interval):
            val_loss = evaluate_val_loss(run, step)
        if not is_due(step, settings.save_interval):
            save_run_checkpoint(run, step)
    if run.ranks.first:
        write_run_outputs(run, edited_state if step == start_step else None)
    log.print_line(f"Loss curve: {run.folder.curve}")
    if (stream := as_stream(run.store)) is not None and run.settings.steps == max(start_step, last):
        run.ranks.run_exclusively((lambda: finish_stream_store(stream, log.print_line)) if run.ranks.first else None)
    return TrainResult(step if start_step < last else max(start_step, last), val_loss, run.model)


def iter_next_batches(run: TrainRun, meter: Meter, count: int) -> Iterator[Batch]:
    """The next ``count`` batches, or all there are."""
    batches, parameters = islice(meter.over(), count), count_parameters(run)
    while True:
        # On a GPU a batch takes room beside the model.
        with explain_memory_errors(run.settings, parameters):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def count_parameters(run: TrainRun) -> int:
    """Numbers the model of a run learns; shared ones count once."""
    return sum(weight.numel() for weight in run.model.parameters())


def check_batch_ids(run: TrainRun, store: Store, batch: Batch) -> None:
    """Refuse ids the model has no row for: a look-up would end in a traceback, or in a dead GPU.

    Raises:
        TrainError: names the id, and whether the data or a setting is wrong.
    """
    rows = run.model.vocab_size
    # Both at once: each number that is read has the GPU waited for.
    lowest, highest = torch.stack(batch["input_ids"].aminmax()).tolist()
    if lowest >= 0 and highest < rows:
        return
    invalid_id = lowest if lowest < 0 else highest
    if store.vocab_size is not None or lowest < 0:
        remedy = "the data is damaged: batchloom check says where"
    elif isinstance(run.settings.model, PretrainedSettings):
        remedy = "the data was made for another model"
    else:
        remedy = f"set model.vocab_size in the --config-file to more than {highest}"
    raise TrainError(
        f"Step {batch.step + 1} of {store.location.name} holds id {invalid_id} and the model has {rows} of them: "
        f"{remedy}."
    )


def compute_learning_rate(step: int, steps: int, optim: OptimSettings) -> float:
    """The learning rate of a step (1 is the first): linear warm-up, then half a cosine."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    share = optim.final_lr_share
    return optim.lr * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))


def run_optimizer_step(run: TrainRun, batch: Batch, lr: float) -> StepResult:
    """One optimizer step; the weights stay as they are when loss or norm is not finite."""
    trained_count = run.ranks.total(float((batch["labels"] != IGNORED_LABEL).sum()))[0]
    trained = max(1.0, trained_count)
    total = torch.zeros((), device=run.ranks.device)
    passes = run.loader.share_at(batch.step).passes
    for number, part in enumerate(iter_passes(run.model, batch, passes)):
        with sync_gradients(run.learner, last=number == passes - 1):
            with make_autocast(run.ranks.device):
                loss = run.learner(**part)
            # Ranks average their gradients where the sum over all of them is meant.
            with run.ranks.collective_errors():
                (loss * (run.ranks.world_size / trained)).backward()
        total += loss.detach()
    mean = run.ranks.total(total.item())[0] / trained
    norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), run.settings.optim.clip))
    if math.isfinite(mean) and math.isfinite(norm):
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return StepResult(mean, norm, int(trained_count))


def iter_passes(model: TrainableModel, batch: Batch, passes: int) -> Iterator[dict[str, Any]]:
    """What the model is called with for the rows of a batch, in as many parts as there are passes."""
    window = model.window if isinstance(model, PretrainedModel) else None
    for part in batch.split(len(batch["input_ids"]) // passes):
        yield make_model_inputs(part, window)


@contextmanager
def sync_gradients(learner: nn.Module, *, last: bool) -> Iterator[None]:
    """Ranks add up their gradients in the last pass of a step only."""
    if isinstance(learner, DistributedDataParallel) and not last:
        with learner.no_sync():
            yield
    else:
        yield


def make_autocast(device: torch.device) -> torch.autocast:
    """bfloat16 for matrix products on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def evaluate_val_loss(run: TrainRun, step: int) -> float | None:
    """The loss on the val subset, the same batches each time; None when there is no val.

    Of a mixture each source has a loss of its own, and shares ``eval_batches`` with the others; the one returned is
    over all the tokens that were looked at.

    Raises:
        TrainError: it is not finite.
    """
    if not run.val:
        return None
    eval_batches = run.settings.eval_batches
    max_batches = None if eval_batches is None else max(1, eval_batches // len(run.val))
    loss_sums = {name: sum_val_losses(run, loader, max_batches) for name, loader in run.val.items()}
    losses = {name: total / max(1.0, trained) for name, (total, trained) in loss_sums.items()}
    mean_loss = sum(loss_sum[0] for loss_sum in loss_sums.values()) / max(
        1.0, sum(loss_sum[1] for loss_sum in loss_sums.values())
    )
    if not math.isfinite(mean_loss):
        raise TrainError(describe_divergence(run, step, f"The val loss of step {step} is {mean_loss}"))
    is_mixture = "" not in run.val
    origin = run.loader.origin if is_mixture else run.val[""].origin
    run.log.val(step, run.settings.steps, mean_loss, origin, losses if is_mixture else {})
    return mean_loss


@torch.no_grad()
def sum_val_losses(run: TrainRun, val: Loader, max_batches: int | None) -> tuple[float, float]:
    """Return the summed loss and the trained tokens of the first ``max_batches`` val batches, over all ranks."""
    plain: nn.Module = run.learner
    plain = run.learner.module if isinstance(run.learner, DistributedDataParallel) else run.learner
    parameters = count_parameters(run)
    total = trained = 0.0
    for number in range(min(len(val), max_batches or len(val))):
        batch = val[number]
        check_batch_ids(run, run.store, batch)
        trained += float((batch["labels"] != IGNORED_LABEL).sum())
        for part in iter_passes(run.model, batch, run.passes):
            with make_autocast(run.ranks.device), explain_memory_errors(run.settings, parameters):
                total += float(plain(**part))
    total, trained = run.ranks.total(total, trained)
    return total, trained


def log_step(run: TrainRun, batch: Batch, step_metrics: dict[str, float], meter: Meter) -> None:
    """Log a step, with its speed and where its data came from."""
    stream = as_stream(run.store) is not None
    if not (stream or run.log.is_enabled):
        return
    metrics = meter.metrics()
    if stream:
        spec = run.loader.plan.spec
        # Nobody knows the other ranks' rows.
        tokens = int(run.ranks.total(metrics["rank/tokens"])[0])
        seconds = metrics["rank/seconds"]
        padding = 1 - tokens / (spec.global_batch_size * spec.seq_len)
    else:
        tokens, seconds = int(metrics["perf/tokens"]), metrics["perf/seconds"]
        padding = 1 - metrics["perf/packing_efficiency"]
    entry = {
        "step": batch.step + 1,
        **step_metrics,
        "tokens": tokens,
        "trained_share": step_metrics["trained"] / max(tokens, 1),
        "tokens_per_s": tokens / seconds,
        "padding": padding,
        "data_wait": metrics["perf/data_wait_share"],
        "origin": batch.origin,
    }
    for name in ("imbalance", "imbalance_in_order"):
        if f"perf/{name}" in metrics:
            entry[name] = metrics[f"perf/{name}"]
    sources = run.loader.plan.stores if not stream else ()
    if len(sources) > 1:
        kinds = ("tokens", "epoch")
        entry["sources"] = {name: {kind: metrics.get(f"data/{name}/{kind}", 0.0) for kind in kinds} for name in sources}
    run.log.step(entry, run.settings.steps)


def save_run_checkpoint(run: TrainRun, step: int) -> None:
    """Write a checkpoint, once for all ranks.

    Raises:
        TrainError: a weight is not finite; the checkpoints before it stay.
    """
    if not has_only_finite(run.model, run.optimizer):
        raise TrainError(describe_divergence(run, step, f"Weights are not finite after step {step}"))
    state = merge_loader_state(run.loader, as_stream(run.store), run.ranks)
    if run.ranks.first:
        run.folder.save(step, run.model, run.optimizer, dict(state))
        export_pretrained(run)
    run.ranks.wait()


def write_run_outputs(run: TrainRun, edited_state: dict[str, Any] | None) -> None:
    """Write what a run leaves when it ends.

    Args:
        run: of the first rank.
        edited_state: the loader's state with edits that no step followed, so that no checkpoint was saved with them.
    """
    if edited_state is not None:
        run.folder.save_edits(edited_state)
    if not run.folder.model.is_dir():
        # A kill between checkpoint and folder, or a person, may have left none.
        export_pretrained(run)
    draw_loss_curve(run.folder.log, run.folder.curve, run.loader.origin)


def export_pretrained(run: TrainRun) -> None:
    """Write a pretrained model as a folder that transformers loads, with its tokenizer and processor."""
    model, settings = run.model, run.settings.model
    if not (isinstance(model, PretrainedModel) and isinstance(settings, PretrainedSettings)):
        return

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(Path(settings.init), run.store, folder)
        if run.loader.holds_media:
            write_processor_files(run.loader, folder)

    run.folder.write_model(write)


def is_due(step: int, interval: int) -> bool:
    """Whether something that is done every ``interval`` steps (0: never) is done now."""
    return interval > 0 and step % interval == 0


def describe_divergence(run: TrainRun, step: int, fact: str) -> str:
    """Says that a run diverged, and what is left."""
    newest = run.folder.find_newest_checkpoint()
    checkpoint_note = f"is of step {read_checkpoint_step(newest)}" if newest else "was not yet made"
    lr = compute_learning_rate(step, run.settings.steps, run.settings.optim)
    return (
        f"{fact} at a learning rate of {lr:.3g}: the run diverged. The newest checkpoint {checkpoint_note}. "
        "Start again with a lower --lr."
    )
