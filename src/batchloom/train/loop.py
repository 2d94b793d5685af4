"""The command train and its loop.

Read :func:`start_training`, then :func:`iter_training`.

The loss of a step is a sum over the trained tokens of its global batch, divided by their number. So splitting the
batch into passes and over ranks does not change the gradient. All that a step computes follows from the settings,
the store and the step number, which makes resuming exact.
"""

import math
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchloom import DatasetConfig, Loader
from batchloom.adapters.optimizer_step import (
    check_batch_ids,
    check_weights,
    make_divergence_error,
    set_learning_rate,
    update_weights,
)
from batchloom.adapters.rank_group import join_ranks
from batchloom.batches import IGNORE_INDEX, Batch, Meter
from batchloom.batches.loading import require_plan_feed
from batchloom.core.errors import SettingsError
from batchloom.core.run_files import read_checkpoint_step
from batchloom.core.settings import raise_problems, to_plain
from batchloom.core.wording import format_count
from batchloom.streaming import Stream
from batchloom.train.model.model_build import TrainableModel, make_model_inputs
from batchloom.train.model.pretrained import (
    PretrainedModel,
    copy_tokenizer,
    get_max_positions,
    get_model_vocabulary,
    read_model_config,
)
from batchloom.train.request import TrainRequest
from batchloom.train.run import TrainRun, hold_run_folder, set_up_run
from batchloom.train.run_data import describe_order, finish_stream_store, open_run_data
from batchloom.train.run_edits import EditInbox, apply_pending_edits
from batchloom.train.run_folder import PrintLine, RunFolder, RunLog, draw_loss_curve
from batchloom.train.train_settings import (
    PRETRAINED_KEYS,
    OptimSettings,
    PretrainedSettings,
    TrainSettings,
    apply_finetuning_defaults,
    load_named_config,
    make_settings,
    merge_settings,
    read_config,
)


class StepResult(NamedTuple):
    """Loss in nats per trained token, gradient norm and trained tokens of a step."""

    loss: float
    norm: float
    trained: int


class TrainResult(NamedTuple):
    """Steps done, last val loss in nats per token (or None), and the model."""

    steps: int
    val_loss: float | None
    model: TrainableModel


def start_training(request: TrainRequest, print_line: PrintLine) -> TrainResult:
    """Run the train command.

    After the run began, KeyboardInterrupt describes the remaining files and how to resume.
    """
    folder = RunFolder(request.run_path, prepares=request.data.dataset_config is not None)
    dataset = DatasetConfig.load(request.data.dataset_config) if request.data.dataset_config else None
    settings = _make_run_settings(request, folder, dataset)
    if not request.resume:
        # The loop checks this again. Here it fails before an input is prepared for hours.
        folder.check_new()
    check_steps(folder, settings.steps, request.stop_at)
    model_vocabulary = get_model_vocabulary(settings.model) if request.data.if_missing == "synthetic" else None
    try:
        with join_ranks(request.device) as ranks:
            log = RunLog(folder.log if ranks.first else None, print_line)
            with open_run_data(request, dataset, settings, model_vocabulary, folder, ranks, log) as source:
                if dataset is not None:
                    log.print_line(describe_order(settings, is_continuation=request.is_continuation))
                if note := request.describe_name():
                    log.print_line(note)
                run = set_up_run(source, settings, folder, ranks, log, media=request.data.read_media)
                result = train(run, resume=request.resume, stop_at=request.stop_at)
                if isinstance(source, Stream) and result.steps >= settings.steps:
                    finish = partial(finish_stream_store, source, request.data, log.print_line)
                    ranks.run_exclusively(finish if ranks.first else None)
                return result
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_describe_interrupted_run(folder)) from error


def check_steps(folder: RunFolder, steps: int, stop_at: int | None = None, option: str = "--max-iters") -> None:
    """Refuse to end a run before the steps that it has done, or stop it past its end.

    Args:
        folder: folder of the run.
        steps: number of steps of the complete run, which ``option`` sets.
        stop_at: step after which to save and stop early.
        option: option of the command that sets ``steps``.

    Raises:
        SettingsError: the steps are fewer than those done, or ``stop_at`` is not between the two.
    """
    newest = folder.find_newest_checkpoint()
    done = 0 if newest is None else read_checkpoint_step(newest)
    remedy = f"{folder.path} has {format_count(done, 'step')} done: give at least {done}"
    problems = [f"{option}: {steps} is too few, because {remedy}"] if steps < done else []
    if stop_at is not None and stop_at < done:
        problems.append(f"--stop-at: {stop_at} is too early, because {remedy}")
    if stop_at is not None and stop_at > steps:
        problems.append(f"--stop-at: {stop_at} is after the end of the run, which has {steps} steps ({option})")
    raise_problems(problems)


def _make_run_settings(request: TrainRequest, folder: RunFolder, dataset: DatasetConfig | None) -> TrainSettings:
    """Combine the configuration, the data sets and the command line; the last wins."""
    model_options = {"init": request.model_folder, "attn_implementation": request.attn_implementation}
    model_changes = {name: value for name, value in model_options.items() if value is not None}
    changes = {**request.changes, **({"model": model_changes} if model_changes else {})}
    if request.is_continuation:
        return make_settings(to_plain(folder.read_settings()), changes)
    config_file = request.config_file
    path = "" if config_file is None else str(config_file)
    if config_file is not None:
        plain = read_config(config_file)
    elif request.init is not None:
        plain = {"model": {}}
    else:
        plain = load_named_config(request.config_name)
    model_values = plain.get("model")
    if request.init is not None and isinstance(model_values, dict) and not model_values.keys() <= PRETRAINED_KEYS:
        problem = f"model: the shape in {path} and --init exclude each other: give one"
        raise SettingsError([problem])
    init_folder = request.model_folder or (model_values.get("init") if isinstance(model_values, dict) else None)
    if init_folder is None and request.attn_implementation is not None:
        raise SettingsError(["--attn-implementation: requires --init; the GPT has its own"])
    longest = None
    if isinstance(init_folder, str):
        longest = get_max_positions(read_model_config(PretrainedSettings(init_folder)))
        plain = apply_finetuning_defaults(plain, longest)
    if dataset is not None and (order := dataset.plan_settings(longest)):
        plain = merge_settings(plain, {"seq_len": order.pop("seq_len"), "order": order})
    return make_settings(plain, changes, path)


def _describe_interrupted_run(folder: RunFolder) -> str:
    """Describe the remains of an interrupted run and how to resume."""
    if not folder.has_run:
        if folder.data.exists():
            return f"Stopped before the run began. Its data in {folder.data} stays; continue with the same command."
        return "Stopped before the run began; nothing was left behind."
    newest = folder.find_newest_checkpoint()
    if newest is None:
        progress = "it has no checkpoint yet, so its steps are lost (--save-interval sets how often one is made). Start"
        return f"Stopped the run in {folder.path}; {progress} it again with --resume."
    done = format_count(read_checkpoint_step(newest), "step")
    progress = f"its newest checkpoint has {done}. Continue with the same command and"
    return f"Stopped the run in {folder.path}; {progress} --resume."


def train(run: TrainRun, *, resume: bool = False, stop_at: int | None = None) -> TrainResult:
    """Train the steps of a run.

    Args:
        run: result of :func:`set_up_run`.
        resume: whether to resume from the newest checkpoint of the folder; else the folder must be new.
        stop_at: step after which to save and stop early.

    Raises:
        StateError: ``resume`` with other settings or data; names each field that differs.
        TrainError: the folder holds other files, a loss is not finite, or memory runs out.
        StoreConflictError: another process trains in the folder.
        OutputError: the folder cannot be written.
    """
    steps = iter_training(run, resume=resume, stop_at=stop_at)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: TrainResult = end.value
        return result


def iter_training(
    run: TrainRun, *, resume: bool = False, stop_at: int | None = None
) -> Generator[int, None, TrainResult]:
    """Train the steps of a run; yield the steps done before the first and after each."""
    settings = run.settings
    log = run.log
    with hold_run_folder(run, resume=resume) as start_step:
        inbox = EditInbox(run.folder.edits)
        last = min(settings.steps, stop_at or settings.steps)
        # Apply edits that the newest checkpoint lacks before any step is computed without them.
        is_edited = apply_pending_edits(run, inbox, start_step)
        if is_edited and run.ranks.first and is_last_step(run, start_step, last):
            run.folder.save_edits(run.loader.state_dict())
        if start_step >= last:
            option = "--max-iters (of a worker --num-steps)" if last == settings.steps else "--stop-at"
            log.print_line(
                f"{start_step} of {format_count(settings.steps, 'step')} are done already; {option} sets the last one."
            )
        done = start_step
        val_loss = None
        meter = Meter(run.loader, exchange=False)
        yield done
        for batch in islice(meter.over(), max(0, last - start_step)):
            done = batch.step + 1
            lr = compute_learning_rate(done, settings.steps, settings.optim)
            check_batch_ids(run.model, batch)
            row_losses = compute_row_losses(run, batch) if is_due(done, settings.log_row_loss) else None
            loss, norm, trained = run_optimizer_step(run, batch, lr)
            meter.step(batch.step, trained=trained)
            log_step(run, batch, {"loss": loss, "lr": lr, "norm": norm, "trained": trained}, meter, row_losses)
            apply_pending_edits(run, inbox, done)
            is_end = is_last_step(run, done, last)
            if is_end and done < last:
                log.print_line(f"The sources are exhausted after {done} of {settings.steps} steps; the run ends.")
            if is_end or is_due(done, settings.eval_interval):
                val_loss = evaluate_val_loss(run, batch.step)
            if is_end or is_due(done, settings.save_interval):
                save_run_checkpoint(run, done)
            yield done
        finish_run(run)
        return TrainResult(done, val_loss, run.model)


def compute_learning_rate(done: int, steps: int, optim: OptimSettings) -> float:
    """Return the learning rate of the step with which ``done`` steps are done.

    It rises linearly, then falls as a half cosine.
    """
    if done <= optim.warmup_steps:
        return optim.lr * done / optim.warmup_steps
    progress = (done - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    share = optim.final_lr_share
    return optim.lr * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))


def run_optimizer_step(run: TrainRun, batch: Batch, lr: float) -> StepResult:
    """Run one optimizer step; raise TrainError if loss or gradient norm is not finite."""
    trained_count = run.ranks.total(float((batch["labels"] != IGNORE_INDEX).sum()))[0]
    set_learning_rate(run.optimizer, lr)
    loss, norm = update_weights(
        run.model,
        run.optimizer,
        _iter_losses(run, batch),
        run.ranks,
        step=batch.step,
        max_norm=run.settings.optim.clip,
        divisor=max(1.0, trained_count),
    )
    return StepResult(loss, norm, int(trained_count))


def _iter_losses(run: TrainRun, batch: Batch) -> Iterator[Tensor]:
    """Yield the summed loss of each pass, in the context for its backward pass."""
    passes = run.loader.feed.share_at(batch.step).passes
    learner = run.learner
    for number, part in enumerate(iter_passes(run.model, batch, passes), 1):
        # Gradients are summed over ranks once, in the last pass.
        with learner.no_sync() if isinstance(learner, DistributedDataParallel) and number < passes else nullcontext():
            with make_autocast(run.ranks.device):
                loss = learner(**part)
            yield loss


def iter_passes(model: TrainableModel, batch: Batch, passes: int) -> Iterator[dict[str, Any]]:
    window = model.window if isinstance(model, PretrainedModel) else None
    for part in batch.split(len(batch["input_ids"]) // passes):
        yield make_model_inputs(part, window)


def make_autocast(device: torch.device) -> torch.autocast:
    """Return autocast to bfloat16 on a GPU, and a no-op on other devices."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def evaluate_val_loss(run: TrainRun, step: int) -> float | None:
    """Return the loss on fixed batches of the val subset after a step, or None.

    Each source of a mixture has its own loss, and they share ``eval_batches``. The result is the loss over all
    tokens. TrainError is raised if it is not finite.
    """
    if not run.val:
        return None
    eval_batches = run.settings.eval_batches
    max_batches = None if eval_batches is None else max(1, eval_batches // len(run.val))
    loss_sums = {name: sum_val_losses(run, loader, max_batches) for name, loader in run.val.items()}
    losses = {name: total / max(1.0, trained) for name, (total, trained) in loss_sums.items()}
    all_trained = sum(trained for _, trained in loss_sums.values())
    mean_loss = sum(total for total, _ in loss_sums.values()) / max(1.0, all_trained)
    if not math.isfinite(mean_loss):
        raise make_divergence_error(f"The val loss after step {step} is {mean_loss}", run.optimizer)
    is_mixture = "" not in run.val
    origin = run.loader.origin if is_mixture else run.val[""].origin
    run.log.val(step, run.settings.steps, mean_loss, origin, losses if is_mixture else {})
    return mean_loss


@torch.no_grad()
def sum_val_losses(run: TrainRun, val: Loader, max_batches: int | None) -> tuple[float, float]:
    """Return the summed loss and the trained tokens of val batches, over all ranks."""
    plain = run.learner.module if isinstance(run.learner, DistributedDataParallel) else run.learner
    total = trained = 0.0
    for number in range(min(len(val), max_batches or len(val))):
        batch = val[number]
        check_batch_ids(run.model, batch)
        trained += float((batch["labels"] != IGNORE_INDEX).sum())
        for part in iter_passes(run.model, batch, val.feed.share_at(number).passes):
            with make_autocast(run.ranks.device):
                total += float(plain(**part))
    total, trained = run.ranks.total(total, trained)
    return total, trained


@torch.no_grad()
def compute_row_losses(run: TrainRun, batch: Batch) -> list[float | None]:
    """Return the mean loss of each row of a global batch, in the plan's row order.

    It is in nats per trained token, and None for a row without one. The rows are passed through the model once more,
    each alone and with the weights before the step, so the arithmetic of training stays the same.
    """
    feed = require_plan_feed(run.loader.feed, batch.step)
    start, stop = feed.plan.positions_of(batch.step)
    _, positions = feed.select_rows(batch.step)
    own_losses: list[tuple[int, float]] = []
    single_rows = iter_passes(run.model, batch, len(positions))
    for position, model_inputs in zip(positions.tolist(), single_rows, strict=True):
        trained = int((model_inputs["labels"] != IGNORE_INDEX).sum())
        if trained and position >= 0:
            with make_autocast(run.ranks.device):
                own_losses.append((position - start, float(run.model(**model_inputs)) / trained))
    losses = dict(pair for own in run.ranks.all_gather(own_losses) for pair in own)
    return [losses.get(row) for row in range(stop - start)]


def log_step(
    run: TrainRun, batch: Batch, step_metrics: dict[str, float], meter: Meter, row_losses: list[float | None] | None
) -> None:
    streamed = run.loader.streamed
    if not (streamed or run.log.is_enabled):
        return
    metrics = meter.metrics()
    scope = "rank" if streamed else "perf"
    tokens = metrics[f"{scope}/tokens"]
    filled = metrics[f"{scope}/packing_efficiency"]
    if streamed:
        # With a stream each rank knows only its own rows.
        tokens, filled = run.ranks.total(tokens, filled / run.ranks.world_size)
    entry = {
        "step": batch.step,
        **step_metrics,
        "tokens": int(tokens),
        "trained_share": step_metrics["trained"] / max(tokens, 1),
        "tokens_per_s": tokens / metrics[f"{scope}/seconds"],
        "padding": 1 - filled,
        "data_wait": metrics["perf/data_wait_share"],
        "origin": batch.origin,
    }
    for name in ("imbalance", "imbalance_in_order"):
        if f"perf/{name}" in metrics:
            entry[name] = metrics[f"perf/{name}"]
    sources = () if streamed else run.loader.plan.stores
    if len(sources) > 1:
        kinds = ("tokens", "epoch")
        entry["sources"] = {name: {kind: metrics.get(f"data/{name}/{kind}", 0.0) for kind in kinds} for name in sources}
    if row_losses is not None:
        entry["row_loss"] = row_losses
    run.log.step(entry, run.settings.steps)


def save_run_checkpoint(run: TrainRun, done: int) -> None:
    check_weights(run.model, run.optimizer, run.ranks, done)
    state = run.loader.state_dict()
    if isinstance(run.store, Stream):
        state = run.store.merged(run.ranks.all_gather(state))
    if run.ranks.first:
        run.folder.save(done, run.model, run.optimizer, state)
        export_pretrained(run)
    run.ranks.wait()


def finish_run(run: TrainRun) -> None:
    if run.ranks.first:
        if not run.folder.model.is_dir():
            # A kill after the checkpoint, or a user, may have left the folder without a model.
            export_pretrained(run)
        draw_loss_curve(run.folder.log, run.folder.curve, run.loader.origin)
    run.log.print_line(f"Loss curve: {run.folder.curve}")


def export_pretrained(run: TrainRun) -> None:
    model = run.model
    settings = run.settings.model
    if not (isinstance(model, PretrainedModel) and isinstance(settings, PretrainedSettings)):
        return

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(Path(settings.init), run.store, folder)
        if (media := run.loader.feed.media) is not None:
            for name, text in media.processor_files.items():
                (folder / name).write_text(text, "utf-8")

    run.folder.write_model(write)


def is_last_step(run: TrainRun, step: int, last: int) -> bool:
    """Return whether no step follows, as when the sources of a mixture end."""
    return step >= last or not (run.loader.streamed or run.loader.plan.has_step(step))


def is_due(step: int, interval: int) -> bool:
    """Return whether a periodic action is due; an interval of 0 means never."""
    return interval > 0 and step % interval == 0
