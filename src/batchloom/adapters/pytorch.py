"""``torch.utils.data`` datasets: the same batches with any number of workers.

Use both with ``batch_size=None``, since an item is a complete batch of this rank:

    DataLoader(LoaderIterable(loader), batch_size=None, num_workers=4)
    StatefulDataLoader(LoaderIterable(loader), batch_size=None, num_workers=4)
    DataLoader(LoaderDataset(loader), batch_size=None, num_workers=4)
"""

import copy

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, final
from weakref import WeakValueDictionary

from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from batchloom.adapters.worker_memory import SharedDict
from batchloom.batches import Batch, Loader, add_augment_state
from batchloom.batches.assembly import remove_augment_state
from batchloom.batches.loading import (
    PlanFeed,
    copy_settings,
    iter_step_numbers,
    refuse_second_share,
    reopen_loader,
    require_plan_feed,
)
from batchloom.core.errors import InputError, StateError, TrainError
from batchloom.store.format import install_short_file_handler

# Loaders of this process whose batches are made by workers, by the token in those batches.
_LIVE_LOADERS: WeakValueDictionary[str, Loader] = WeakValueDictionary()
_LOADER_NUMBERS = count()


@final
class _WorkerLoader:
    """Loader that each process copies, since locks and maps do not survive a fork.

    Attributes:
        original: copied loader, only in its own process; None in others.
        first: step at which iterations begin.
    """

    def __init__(self, loader: Loader) -> None:
        feed = loader.feed
        if not isinstance(feed, PlanFeed):
            raise InputError(
                "A DataLoader cannot read a stream, which has its own worker processes (stream(workers=...)). "
                "Iterate the Loader, or prepare the data."
            )
        if loader.spec.device is not None:
            # A CPU device is rejected too, so that scripts behave the same with and without a GPU.
            raise InputError(
                f"device={loader.spec.device!r} cannot be used with a DataLoader, whose workers return batches in "
                "memory: iterate the Loader, which copies batches ahead by itself, or leave device out and move each "
                "batch."
            )
        self.original: Loader | None = loader
        self.first = loader.next_step
        plan, spec, augment = copy_settings(feed)
        self._settings = copy.copy(plan), replace(spec, prefetch=0), augment
        self._state = loader.state_at(self.first)
        self._token = f"{os.getpid()}-{next(_LOADER_NUMBERS)}"
        self._copy: tuple[int, Loader] | None = None
        _LIVE_LOADERS[self._token] = loader
        # Announce it here, since otherwise each worker would do it.
        feed.announce()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "original": None, "_copy": None}

    def loader(self) -> Loader:
        """Return this process's copy, made on first use."""
        if self._copy is None or self._copy[0] != os.getpid():
            # A worker of a DataLoader begins with torch's handler, which names no file.
            install_short_file_handler()
            self._copy = (os.getpid(), reopen_loader(*self._settings, self._state))
        return self._copy[1]

    def batch(self, step: int) -> Batch:
        """Return the batch of a step; a worker's batch notifies the loader on arrival."""
        batch = self.loader().batch(step)
        return batch if get_worker_info() is None else _WorkerBatch(batch, self._token)


class _WorkerBatch(Batch):
    """Batch sent by a worker; unpickling makes it a plain batch."""

    def __init__(self, batch: Batch, token: str) -> None:
        super().__init__(batch, batch.step, batch.origin, batch.layout)
        self._token = token

    def __copy__(self) -> "_WorkerBatch":
        # A DataLoader copies an item before it sends it, and copying by __reduce__ would count as its arrival.
        return _WorkerBatch(self, self._token)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self._token, SharedDict(self), self.step, self.origin, self.layout)


def _receive(token: str, *parts: Any) -> Batch:
    """Rebuild a worker's batch.

    A DataLoader receives batches ahead of the training loop and out of order, so the loader cannot
    know which one was trained last.
    """
    if (loader := _LIVE_LOADERS.get(token)) is not None:
        loader.feed.iterations.untracked = True
    return Batch(*parts)


@final
class LoaderDataset(Dataset[Batch]):
    """Map-style dataset: item s is the batch of step s.

    Its length waits for the table of a large store. The plan is copied: after an edit of the loader make it
    again. Once items were read, ``loader.state_dict()`` raises, since reads by number have no order: use
    ``loader.state_at(batch.step + 1)``.
    """

    def __init__(self, loader: Loader) -> None:
        self._length = len(loader)
        self._source = _WorkerLoader(loader)

    def __len__(self) -> int:
        refuse_second_share()
        return self._length

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self._length:
            raise IndexError(f"step {step} of a run of {self._length} steps")
        _refuse_stacking(self)
        if self._source.original is not None:
            self._source.original.feed.iterations.untracked = True
        return self._source.batch(step)


@final
class LoaderIterable(IterableDataset[Batch]):
    """Iterable dataset: worker w of n gives steps w, w + n, ..., which torch merges.

    The plan is copied: after an edit of the loader make it again. Every iteration begins at the loader's first
    step: step 0, or that of a loaded state.

    Without workers ``loader.state_dict()`` is that of the last batch returned. It raises with workers and in the
    loops of Accelerate and Lightning, which prefetch a batch: use ``loader.state_at(batch.step + 1)``.
    Its own ``state_dict`` is the one that torchdata's StatefulDataLoader saves for each worker. After
    ``load_state_dict`` only the next iteration resumes there.
    """

    def __init__(self, loader: Loader) -> None:
        self._source = _WorkerLoader(loader)
        self._loaded: int | None = None
        self._next: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the plan has the epochs."""
        refuse_second_share()

    def __iter__(self) -> Iterator[Batch]:
        refuse_second_share()
        _refuse_stacking(self)
        number, workers = _get_worker_info()
        first = self._source.first + number if self._loaded is None else self._loaded
        self._loaded = None
        for step in self._steps(first, workers):
            self._next = step + workers
            yield self._source.batch(step)

    def _steps(self, first: int, workers: int) -> Iterator[int]:
        """Yield the step numbers of this process; without workers the loader tracks them."""
        original = self._source.original if get_worker_info() is None else None
        if original is not None and not _is_fetched_ahead():
            yield from iter_step_numbers(require_plan_feed(original.feed, first), first)
            return
        loader = self._source.loader()
        step = first
        while loader.plan.has_step(step):
            if original is not None:
                original.feed.iterations.untracked = True
            yield step
            step += workers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker's next step, and the number of workers."""
        number, workers = _get_worker_info()
        loader = self._source.loader()
        step = self._source.first + number if self._next is None else self._next
        state = loader.plan.state(loader.plan.positions_of(step)[0])
        return {"workers": workers, "state": add_augment_state(state, loader.feed.augmentation)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a worker's own state.

        Raises:
            StateError: the state is invalid, of another plan or augmentation (names each field that differs), or of
                another number of workers (then use the state of the ``Loader`` itself, which is independent of
                workers).
        """
        _, workers = _get_worker_info()
        if not isinstance(state, dict) or not {"workers", "state"} <= set(state):
            raise StateError("This is not the state of a worker. Give the value that state_dict() returned.")
        loader = self._source.loader()
        position = loader.plan.resume(remove_augment_state(state["state"], loader.feed.augmentation))
        if state["workers"] != workers:
            raise StateError(
                f"The state was taken with {state['workers']} workers, but there are {workers}. Save "
                "loader.state_at(batch.step + 1) instead: it resumes with any number of workers."
            )
        self._loaded = self._next = loader.plan.step_at(position)[0]


# Modules whose loops request the next batch before they return the current one.
_PREFETCHING_MODULES = {
    "accelerate.data_loader",
    "lightning.pytorch.loops.fetchers",
    "pytorch_lightning.loops.fetchers",
}


def _is_fetched_ahead() -> bool:
    """Return whether the caller, by the call stack, is a loop that prefetches."""
    return any(frame.f_globals.get("__name__") in _PREFETCHING_MODULES for frame, _ in traceback.walk_stack(None))


def _refuse_stacking(dataset: LoaderDataset | LoaderIterable) -> None:
    """Raise if a ``DataLoader`` that reads from a data set stacks its items."""
    for frame, _ in traceback.walk_stack(sys._getframe()):  # noqa: SLF001 - without it, walk_stack skips frames
        fetcher: Any = frame.f_locals.get("self")
        if getattr(fetcher, "dataset", None) is not dataset or not hasattr(fetcher, "auto_collation"):
            continue
        if fetcher.auto_collation and fetcher.collate_fn is default_collate:
            name = type(dataset).__name__
            raise TrainError(
                f"An item of a {name} is the batch of a step, and this DataLoader would stack batches. Instead, "
                f"DataLoader({name}(loader), batch_size=None) gives them; their size is that of the Loader."
            )
        return


def _get_worker_info() -> tuple[int, int]:
    """Return (number, workers) of this DataLoader worker; (0, 1) outside of one."""
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)
