"""``torch.utils.data`` faces: the same batches in any number of worker processes.

Both are used with ``batch_size=None``, since an item is a whole batch of this rank:

    DataLoader(LoaderIterable(loader), batch_size=None, num_workers=4)
    StatefulDataLoader(LoaderIterable(loader), batch_size=None, num_workers=4)
    DataLoader(LoaderDataset(loader), batch_size=None, num_workers=4)
"""

from batchloom.adapters.requirements import TORCH, require

require(TORCH)

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, final

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from batchloom.batches.assemble import Batch
from batchloom.batches.augment import with_augment, without_augment
from batchloom.batches.loader import Loader
from batchloom.batches.spec import BatchSpec
from batchloom.core.errors import InputError, StateError
from batchloom.plan.lane_plan import refuse_lanes
from batchloom.plan.plan import Plan


@final
class _Twin:
    """A loader that each process makes its own of, since locks and maps do not cross a fork."""

    def __init__(self, loader: Loader) -> None:
        if loader.streamed:
            raise InputError(
                "A stream goes through no DataLoader: it has worker processes of its own (stream(workers=...)). "
                "Iterate the Loader, or prepare the data."
            )
        if loader.spec.device is not None:
            # Also of the CPU: what works without a GPU is to work with one.
            raise InputError(
                f"device={loader.spec.device!r} goes through no DataLoader, whose workers hand batches on in memory: "
                "iterate the Loader, which copies ahead by itself, or leave device out and move each batch."
            )
        plan = loader.plan
        refuse_lanes(plan, "goes through no DataLoader")
        self._plan = (plan.data, plan.spec, plan.edits)
        self._batch_spec = loader.spec
        self._state = plan.state(plan.positions_of(loader.next_step)[0])
        self._augment = loader.augmentation.settings if loader.augmentation else None
        self._made: tuple[int, Loader] | None = None
        # Here, since each worker would tell it again.
        loader.announce()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def loader(self) -> Loader:
        """This process's loader, made when first asked for; it knows where the run goes on."""
        if self._made is None or self._made[0] != os.getpid():
            plan = Plan(*self._plan)
            plan.resume(self._state)
            options = {**_options(self._batch_spec), "augment": self._augment}
            self._made = (os.getpid(), Loader(plan, **options))
        return self._made[1]


def _options(spec: BatchSpec) -> dict[str, Any]:
    """The settings of batches as ``Loader`` takes them, without a thread of its own."""
    options = {field.name: getattr(spec, field.name) for field in fields(spec)}
    # What stands in a list of lost media is in the plan's journal.
    return {**options, "prefetch": 0, "media": replace(spec.media, replace=())}


@final
class LoaderDataset(Dataset[Batch]):
    """Map-style face: item s is the batch of step s. Its length waits for the table of a large store.

    It has the plan as it is when it is made: after an edit of the loader make it anew.
    """

    def __init__(self, loader: Loader) -> None:
        self._length = len(loader)
        self._twin = _Twin(loader)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self._length:
            raise IndexError(f"step {step} of a run of {self._length} steps")
        return self._twin.loader().batch(step)


@final
class LoaderIterable(IterableDataset[Batch]):
    """Iterable face: worker w of n gives steps w, w + n, ...; a DataLoader puts them in order.

    It has the plan as it is when it is made: after an edit of the loader make it anew. Every iteration
    begins where the loader it was made of would have: at step 0, or at a loaded state's step. Its own
    ``state_dict`` is what torchdata's StatefulDataLoader keeps for each worker; after
    ``load_state_dict`` the next iteration, and only that, goes on there.
    """

    def __init__(self, loader: Loader) -> None:
        self._twin = _Twin(loader)
        self._first = loader.next_step
        self._loaded: int | None = None
        self._next: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        number, workers = _worker()
        step = self._first + number if self._loaded is None else self._loaded
        self._loaded = None
        loader = self._twin.loader()
        while loader.plan.has_step(step):
            self._next = step + workers
            yield loader.batch(step)
            step += workers
        self._next = step

    def state_dict(self) -> dict[str, Any]:
        """The next step of this worker as a plan's state, and the number of workers."""
        number, workers = _worker()
        loader = self._twin.loader()
        step = self._first + number if self._next is None else self._next
        state = loader.plan.state(loader.plan.positions_of(step)[0])
        return {"workers": workers, "state": with_augment(state, loader.augmentation)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a worker's own state.

        Raises:
            StateError: not such a state, another plan or augmentation (names each field that differs), or
                another number of workers (for that, keep the state of the ``Loader`` itself: it belongs to
                no number of workers).
        """
        _, workers = _worker()
        if not isinstance(state, dict) or not {"workers", "state"} <= set(state):
            raise StateError("This is not a worker's state. Give what state_dict() returned.")
        loader = self._twin.loader()
        position = loader.plan.resume(without_augment(state["state"], loader.augmentation))
        if state["workers"] != workers:
            raise StateError(
                f"The state was taken with {state['workers']} workers, here are {workers}. Keep "
                "loader.state_dict() instead: it goes on with any number of workers."
            )
        self._loaded = self._next = loader.plan.course.step_at(position)[0]


def _worker() -> tuple[int, int]:
    """(number, workers) of the DataLoader worker this runs in; (0, 1) outside of one."""
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)
