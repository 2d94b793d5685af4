"""Lightning: a data module that gives micro-batches and saves the loader's state.

data = LoaderDataModule(train=lambda: Loader(store, seq_len=2048, global_batch_size=64, micro_batch_size=4))
Trainer(max_steps=1000, accumulate_grad_batches=16).fit(module, data)
"""

from batchloom.adapters.requirements import LIGHTNING, TORCH, require_installed

require_installed(TORCH, LIGHTNING)

from collections.abc import Callable, Iterator
from typing import Any, final

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.logging import SendMetrics, send_to_all
from batchloom.batches import Batch, Loader, Meter
from batchloom.batches.loading import make_run_share
from batchloom.core.errors import InputError, StateError, TrainError
from batchloom.core.settings import as_int, quote_value

LoaderFactory = Callable[[], Loader]


@final
class LoaderDataModule(LightningDataModule):  # type: ignore[misc]
    """Data module of a plan's batches, without a sampler or distribution by Lightning.

    An item is a micro-batch: ``micro_batch_size`` rows of the loader, so that ``accumulate_grad_batches`` of them
    are a step. A checkpoint holds the state after ``trainer.global_step`` steps, without prefetched batches.

    Args:
        train: makes the loader of the training set; called after the processes have joined, so that the
            loader finds its rank.
        val: makes the loader of the validation set, if there is one; it restarts each time and is not in checkpoints.

    Attributes:
        train_loader, val_loader: loaders that they made, from ``setup`` on; else None.
    """

    def __init__(self, *, train: LoaderFactory, val: LoaderFactory | None = None) -> None:
        super().__init__()
        self._make_train = train
        self._make_val = val
        self.train_loader: Loader | None = None
        self.val_loader: Loader | None = None
        self._step_tokens = (-1, 1)
        self._saved_passes = 0
        self._loaded = self._checked = False

    def setup(self, stage: str) -> None:
        """Make the loaders of a stage.

        Raises:
            InputError: the loader is a stream.
            TrainError: the Trainer asks for epochs, steps or parts of a step that the plan does not have, or a
                set has no complete step.
        """
        if stage == "fit":
            self.train_loader = self._make_train()
            self._loaded = self._checked = False
            _check_run(self.trainer, self.train_loader)
        if stage in ("fit", "validate") and self._make_val is not None:
            self.val_loader = self._make_val()
            _check_evaluation(self.val_loader)

    def train_dataloader(self) -> "_ResumedMicroBatches":
        """Return the micro-batches of the training set, from the next step on."""
        loader = self._get_train_loader()
        if not self._checked:
            self._check_resumed(loader)
        require_agreement(loader)
        accumulated = self.trainer.accumulate_grad_batches
        if self._saved_passes not in (0, accumulated):
            _adjust_batch_count(self.trainer, self._saved_passes, accumulated)
            self._saved_passes = accumulated
        return _ResumedMicroBatches(self.trainer, loader)

    def val_dataloader(self) -> "_MicroBatches | list[Any]":
        """Return the micro-batches of the validation set, from the first on."""
        if self.val_loader is None:
            return []
        require_agreement(self.val_loader)
        return _MicroBatches(self.val_loader)

    @property
    def loss_divisor(self) -> float:
        """Divisor of the loss of a micro-batch, which is summed over its tokens.

        Lightning averages over micro-batches and ranks. With this divisor the result is the mean over the trained
        tokens of the complete step, for any distribution over ranks and micro-batches.

        Raises:
            TrainError: it is read outside of a training step.
        """
        if not self.trainer.training:
            stage = self.trainer.state.stage
            raise TrainError(
                f"loss_divisor is defined only in a training step, and the Trainer is in {stage and stage.value}: "
                "log the mean over the micro-batch's trained tokens there, with their number as its weight "
                "(self.log('val_loss', loss, batch_size=trained, sync_dist=True), trained = (batch['labels'][:, 1:] "
                "!= -100).sum())."
            )
        loader = self._get_train_loader()
        step = self.trainer.global_step
        if self._step_tokens[0] != step:
            self._step_tokens = (step, max(1, loader.trained_tokens(step)))
        world_size = loader.spec.mesh.get_placement(loader.spec.rank, loader.spec.world_size).world_size
        passes: int = self.trainer.accumulate_grad_batches
        return self._step_tokens[1] / (world_size * passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the trained steps, as plain JSON values."""
        if self.train_loader is None:
            return {}
        passes = self.trainer.accumulate_grad_batches
        inside = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready % passes
        state = self.train_loader.state_at(self.trainer.global_step)
        return {"loader": state, "passes": passes, "inside": inside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint's state, on any number of ranks.

        Raises:
            StateError: the state is invalid, of another plan (names each field that differs), or saved inside a step.
        """
        if self.train_loader is None:
            return
        if not {"loader", "passes", "inside"} <= set(state_dict):
            raise StateError(
                "The checkpoint's LoaderDataModule has no loader: it was written by another class of that name."
            )
        if (as_int(passes := state_dict["passes"]) or 0) < 1:
            raise StateError(
                f"The checkpoint's LoaderDataModule has {quote_value(passes)} for the micro-batches of a step: it was "
                "changed by hand."
            )
        if inside := state_dict["inside"]:
            raise StateError(
                f"The checkpoint was taken after {inside} of {state_dict['passes']} micro-batches of a step, whose "
                "gradients it does not hold. Resume from a checkpoint taken at the end of a step "
                "(ModelCheckpoint(every_n_train_steps=...))."
            )
        self.train_loader.load_state_dict(state_dict["loader"])
        self._saved_passes = state_dict["passes"]
        self._loaded = True

    def _check_resumed(self, loader: Loader) -> None:
        """Reject a checkpoint without a loader state, or with a state of another step."""
        first = self.trainer.global_step
        path = self.trainer.ckpt_path
        if path is not None and first and not self._loaded:
            raise StateError(
                f"{path} is of step {first} and holds no LoaderDataModule state, so its training data is unknown. "
                "Use a checkpoint that was made with it, or load only its weights into a new run."
            )
        if loader.next_step != first and (self._loaded or loader.next_step):
            raise StateError(
                f"The data continues at step {loader.next_step}, and Lightning at step {first}: a checkpoint was "
                "changed, its run had several optimizers, or the loader of a new run has been iterated."
            )
        self._checked = True

    def _get_train_loader(self) -> Loader:
        if self.train_loader is None:
            raise TrainError("There is no training loader yet: Trainer.fit calls setup('fit').")
        return self.train_loader


@final
class LightningMetricsCallback(Callback):  # type: ignore[misc]
    """Callback that sends a meter's metrics every ``log_every_n_steps`` steps.

    Validation does not count into a step's time. The time spent waiting for data is unknown, because Lightning fetches
    by itself. Every rank counts, and rank 0 sends.

    Args:
        meter: makes the meter of the training set's loader, with settings of model and devices.
        send: function of (metrics, step); None for the Trainer's own loggers.
    """

    def __init__(self, meter: Callable[[Loader], Meter] = Meter, send: SendMetrics | None = None) -> None:
        self._make_meter = meter
        self._send = send
        self._meter: Meter | None = None
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Start the clock.

        Raises:
            TrainError: the Trainer's data module is not a LoaderDataModule.
        """
        data = trainer.datamodule
        if not isinstance(data, LoaderDataModule) or data.train_loader is None:
            raise TrainError(
                f"The Trainer's datamodule is a {type(data).__name__}, and the callback logs metrics only for a "
                "LoaderDataModule: give Trainer.fit one, or leave the callback out."
            )
        self._meter = self._make_meter(data.train_loader)
        self._last_step = trainer.global_step

    def on_validation_end(self, *_: Any) -> None:
        """Restart the clock, so that validation does not count into the next step."""
        if self._meter is not None:
            self._meter.begin()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count a step, and send the metrics if they are due."""
        step = trainer.global_step
        if self._meter is None or step == self._last_step:
            return
        self._last_step = step
        self._meter.step(step - 1)
        if trainer.is_global_zero and step % trainer.log_every_n_steps == 0:
            send = self._send or send_to_all(*map(_send_to_logger, trainer.loggers))
            send(self._meter.metrics(), step)


def _send_to_logger(logger: Logger) -> SendMetrics:
    # Lightning counts the steps of its own log entries from 0.
    return lambda figures, step: logger.log_metrics(dict(figures), step - 1)


class _MicroBatches:
    """Micro-batches of a loader, from its first step on."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield from batch.split(self._loader.feed.share_at(batch.step).micro_batch_size)


class _ResumedMicroBatches:
    """Micro-batches from the step on that Lightning trains next.

    It has no length: the rest of the plan is counted in steps, and a resumed run may split them differently.
    """

    def __init__(self, trainer: Trainer, loader: Loader) -> None:
        self._trainer = trainer
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        trainer = self._trainer
        loader = self._loader
        _check_optimizers(trainer)
        first = trainer.global_step
        if trainer.max_epochs != 1 and first < trainer.max_steps and not loader.plan.has_step(first):
            # Lightning would start empty epochs in an endless loop.
            raise TrainError(
                f"The plan ends after {first} steps, and Trainer(max_steps={trainer.max_steps}) asks for more: give "
                f"max_steps={first}, Trainer(max_epochs=1), or a Loader of more steps or epochs."
            )
        make_run_share(loader, first)
        loader.load_state_dict(loader.state_at(first))
        for batch in loader:
            # Lightning prefetches one micro-batch.
            if batch.step > trainer.global_step + 1:
                raise TrainError(
                    f"Micro-batches of {batch.step} steps were returned, and Lightning has done "
                    f"{trainer.global_step} steps: with manual optimization, step once per micro-batch, or use "
                    "automatic optimization."
                )
            parts = batch.split(loader.feed.share_at(batch.step).micro_batch_size)
            if len(parts) != trainer.accumulate_grad_batches:
                raise TrainError(
                    f"Step {batch.step} is {len(parts)} micro-batches of {len(parts[0]['input_ids'])} rows on each "
                    f"rank, and the Trainer takes {trainer.accumulate_grad_batches} per step: give "
                    f"Trainer(accumulate_grad_batches={len(parts)}), or another micro_batch_size."
                )
            yield from parts


def _check_run(trainer: Trainer, loader: Loader) -> None:
    if loader.streamed:
        raise InputError(
            "A stream cannot resume at a step number, which Lightning requires: prepare the data, and give a store."
        )
    if trainer.max_epochs not in (1, -1):
        raise TrainError(
            f"Trainer(max_epochs={trainer.max_epochs}) asks for epochs, which the plan already defines: give "
            "Loader(epochs=...) and Trainer(max_epochs=1), or Trainer(max_steps=...)."
        )
    _check_passes(trainer, loader)
    steps = loader.plan.spec.steps
    if trainer.max_epochs == -1 and steps is not None and not 0 <= trainer.max_steps <= steps:
        raise TrainError(
            f"The plan has {steps} steps, and Trainer(max_steps={trainer.max_steps}) asks for another number: give "
            f"at most max_steps={steps}, or Trainer(max_epochs=1)."
        )


def _check_passes(trainer: Trainer, loader: Loader) -> None:
    """Reject settings that would train parts of steps, repeat batches or do nothing."""
    if not loader.plan.has_step(0):
        raise _make_no_steps_error("training", loader)
    if trainer.overfit_batches:
        raise TrainError(
            f"Trainer(overfit_batches={trainer.overfit_batches}) repeats the same batches: give a Loader of a small "
            "store, with epochs=."
        )
    most = trainer.limit_train_batches
    passes = trainer.accumulate_grad_batches
    if isinstance(most, int) and most % passes:
        more = most + passes - most % passes
        raise TrainError(
            f"limit_train_batches is {most} (fast_dev_run also sets it), but a step has {passes} micro-batches: the "
            f"last step would be incomplete. Give {more}, or only max_steps."
        )


def _check_optimizers(trainer: Trainer) -> None:
    if len(trainer.optimizers) > 1:
        raise TrainError(
            f"Lightning counts one step for each of {len(trainer.optimizers)} optimizers, and the plan counts one "
            "for all: give all parameters to one optimizer (it may have several groups)."
        )


def _check_evaluation(loader: Loader) -> None:
    if not loader.streamed and not loader.plan.has_step(0):
        raise _make_no_steps_error("validation", loader)


def _make_no_steps_error(name: str, loader: Loader) -> TrainError:
    return TrainError(
        f"The {name} set does not fill a step of {loader.plan.spec.global_batch_size} sequences, and last='drop' "
        "leaves out an incomplete step: give last='fill', or a smaller global_batch_size."
    )


def _adjust_batch_count(trainer: Trainer, previous_passes: int, passes: int) -> None:
    """Convert Lightning's count of micro-batches to another number of passes per step."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    ready = progress.ready
    converted_count = ready // previous_passes * passes
    for name in ("started", "processed", "completed", "ready"):
        setattr(progress, name, converted_count - (ready - getattr(progress, name)))
