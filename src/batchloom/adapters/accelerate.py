"""Accelerate: each process's share of the data, loss scaling and checkpoints."""

from batchloom.adapters.requirements import ACCELERATE, TORCH, require_installed

require_installed(TORCH)

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final
from weakref import WeakKeyDictionary, proxy

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import (
    find_newest_checkpoint,
    parse_checkpoint_step,
    resume_loader,
    unusable_checkpoint_error,
    writing_checkpoint,
)
from batchloom.adapters.isolation_check import check_no_leak
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.batches import Batch, Loader
from batchloom.batches.loading import make_run_share
from batchloom.core.errors import BatchloomError, TrainError


def attach(accelerator: Any, loader: Loader) -> None:
    """Save and load a loader's state with an accelerator's; all processes call it.

    The loader reads this process's share by itself. Do not pass it to ``accelerator.prepare``, which would
    distribute its batches a second time. :func:`save_checkpoint` saves the state before the given step, without
    prefetched batches. ``accelerator.save_state`` alone, or a stream, saves the state after the last batch
    returned.

    Args:
        accelerator: an ``accelerate.Accelerator`` whose ``gradient_accumulation_steps`` are the passes of a step.
        loader: loader made with ``rank=accelerator.process_index, world_size=accelerator.num_processes`` and a
            ``micro_batch_size``.

    Raises:
        MissingDependencyError: accelerate is older than required.
        PlanError: edits change the number of passes per step, which an Accelerator cannot do.
        TrainError: the loader reads another share; its rows make another number of passes (the error names it);
            its batches went through ``prepare``; the accelerator has a loader already; or it is a stream of several
            processes: Accelerate would save only the lanes of the first.
    """
    require_installed(ACCELERATE)
    if accelerator in _LOADER_STATES:
        raise TrainError(
            "This Accelerator already has a loader attached: attach only the loader of the training data; another "
            "run needs its own Accelerator."
        )
    spec = loader.spec
    loader_share = (spec.rank, spec.world_size)
    process_share = (accelerator.process_index, accelerator.num_processes)
    if loader_share != process_share:
        raise TrainError(
            f"The loader reads the share of rank {loader_share[0]} of {loader_share[1]} and this is process "
            f"{process_share[0]} of "
            f"{process_share[1]}: make it after the Accelerator, with rank=accelerator.process_index and "
            "world_size=accelerator.num_processes."
        )
    if loader.streamed and accelerator.num_processes > 1:
        raise TrainError(
            f"The loader reads a stream in {accelerator.num_processes} processes, each with its own lanes, and "
            "Accelerate saves only the state of the first: prepare the data, or save the state yourself "
            "(batchloom.streaming.merge_states of every process's loader.state_dict())."
        )
    _check_not_prepared(accelerator)
    loader_state = _LoaderState(accelerator, loader)
    loader_state.check_accumulation()
    require_agreement(loader)
    _LOADER_STATES[accelerator] = loader_state
    accelerator.register_for_checkpointing(loader_state)


def require_isolation(accelerator: Any, model: Any, loader: Loader) -> None:
    """Reject a model in which packed documents of a loader attend to each other.

    Every process calls it before the first step, with the prepared model.

    Raises:
        TrainError: the model ignores ``position_ids``, or rejects the batches; the error names the change to make.
    """
    half = accelerator.mixed_precision in ("fp16", "bf16", "fp8")
    check_no_leak(model, loader, _merge_parts, loader.spec.micro_batch_size or 1, half=half)


def _merge_parts(parts: list[Batch]) -> dict[str, Any]:
    return {**parts[0], "use_cache": False}


def _check_not_prepared(accelerator: Any) -> None:
    for dataloader in accelerator._dataloaders:  # noqa: SLF001 - no public accessor
        dataset = dataloader.dataset
        # With several processes Accelerate wraps an iterable dataset in one of its own.
        if isinstance(getattr(dataset, "dataset", dataset), LoaderDataset | LoaderIterable):
            raise TrainError(
                "accelerator.prepare was given a DataLoader of a Loader's batches, which it would distribute again, "
                "each to a single process: they are already this process's share. Leave it out of prepare and "
                "iterate it as it is."
            )


@final
class _LoaderState:
    """Loader state that Accelerate saves, with a check of the passes per step."""

    def __init__(self, accelerator: Any, loader: Loader) -> None:
        # A weak reference: the registry holds this object as long as its accelerator lives.
        self._accelerator = proxy(accelerator)
        self._loader = loader
        self.step: int | None = None
        self.steps_done = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state before the step."""
        if self.step is None:
            return self._loader.state_dict()
        if not self._loader.streamed:
            return self._loader.state_at(self.step)
        state = self._loader.state_dict()
        stream_step = state["position"] // self._loader.plan.spec.global_batch_size
        if stream_step != self.step:
            raise TrainError(
                f"checkpoint-{self.step} is to be saved, but the stream has returned {stream_step} steps: save it "
                "with the number of trained steps, before the next batch is requested."
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the loader from a state."""
        if self.step is None:
            self._loader.load_state_dict(state)
        else:
            self.steps_done = resume_loader(self._loader, state, f"checkpoint-{self.step}", self.step)
        self.check_accumulation()

    def check_accumulation(self) -> None:
        share = make_run_share(self._loader, self._loader.next_step)
        if (accumulation_steps := self._accelerator.gradient_accumulation_steps) != share.passes:
            raise TrainError(
                f"A step takes {share.passes} passes of {share.micro_batch_size} of this process's {share.rows} "
                f"rows, and the Accelerator was made with gradient_accumulation_steps={accumulation_steps}: the "
                f"optimizer would step at the wrong passes. Give it {share.passes}, or the loader another "
                "micro_batch_size."
            )


# Errors of torch and pickle for truncated, missing or overwritten files.
_DAMAGED_STATE_ERRORS = (EOFError, KeyError, OSError, RuntimeError, UnicodeDecodeError, UnpicklingError)

# State of each accelerator, which has no public way to look up registered objects.
_LOADER_STATES: WeakKeyDictionary[Any, _LoaderState] = WeakKeyDictionary()


@contextmanager
def _at_step(accelerator: Any, step: int) -> Iterator[_LoaderState]:
    """Set the step of an accelerator's loader state for a save or a load."""
    loader_state = _get_loader_state(accelerator)
    loader_state.step = step
    try:
        yield loader_state
    finally:
        loader_state.step = None


def _get_loader_state(accelerator: Any) -> _LoaderState:
    if accelerator not in _LOADER_STATES:
        raise TrainError(
            "This Accelerator has no loader, so checkpoints would hold no loader state: call "
            "batchloom.adapters.accelerate.attach(accelerator, loader) first."
        )
    _check_not_prepared(accelerator)
    return _LOADER_STATES[accelerator]


def get_loss_scale(accelerator: Any) -> int:
    """Return the factor for a loss that is divided by the step's trained tokens.

    Accelerate divides it by the accumulation steps and averages gradients over processes, where a sum is required.
    """
    return int(accelerator.gradient_accumulation_steps * accelerator.num_processes)


def save_checkpoint(accelerator: Any, folder: Path, step: int) -> Path:
    """Write ``folder/checkpoint-N`` after N steps, atomically; every process calls it.

    The loader's state is the one before step N.

    Raises:
        OutputError: the folder cannot be written.
        TrainError: no loader is attached, its batches went through ``prepare``, or a stream is at another step.
    """
    with _at_step(accelerator, step), writing_checkpoint(folder, step) as partial_folder:
        accelerator.save_state(str(partial_folder))
    return folder / f"checkpoint-{step}"


def load_newest_checkpoint(accelerator: Any, folder: Path) -> int:
    """Resume from the newest complete checkpoint, if any, and return the steps done.

    Call it after ``accelerator.prepare`` and :func:`attach`.

    Raises:
        StateError: the checkpoint belongs to another plan, store (names each field that differs) or model,
            its loader is at another step than in its name, or it is damaged.
        PlanError, TrainError: with its edits, the passes per step differ from the accelerator's; or as in
            :func:`save_checkpoint`.
    """
    from safetensors import SafetensorError

    _get_loader_state(accelerator)
    checkpoint = find_newest_checkpoint(folder)
    if checkpoint is None:
        return 0
    with _at_step(accelerator, parse_checkpoint_step(checkpoint)) as loader_state:
        try:
            accelerator.load_state(str(checkpoint))
        except BatchloomError:
            raise
        except (*_DAMAGED_STATE_ERRORS, SafetensorError) as error:
            raise unusable_checkpoint_error(checkpoint, error) from error
    return loader_state.steps_done
