"""Refusal of a second division of a loader's batches among processes."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from batchloom.core.errors import TrainError

# What gives each process a part of a data set, by module and class.
_SHARDING_CLASSES = {
    "accelerate.data_loader": ("BatchSamplerShard", "DataLoaderDispatcher", "IterableDatasetShard"),
    "transformers.trainer_pt_utils": ("DistributedLengthGroupedSampler", "IterableDatasetShard"),
    "torch.utils.data.distributed": ("DistributedSampler",),
}
_LIGHTNING_REMEDY = (
    "give Trainer a batchloom.adapters.lightning.LoaderDataModule, or make it with use_distributed_sampler=False"
)
# The call that works, by the library in the call stack. Accelerate is before Lightning, which wraps all DataLoaders.
_REMEDIES = {
    "transformers": "give Trainer the parts of batchloom.adapters.hugging_face",
    "accelerate": "do not give it to accelerator.prepare, and iterate it as it is "
    "(batchloom.adapters.accelerate.attach saves its state)",
    "deepspeed": "leave training_data out of deepspeed.initialize, and iterate the loader",
    "lightning": _LIGHTNING_REMEDY,
    "pytorch_lightning": _LIGHTNING_REMEDY,
    "ray": "leave out ray.train.torch.prepare_data_loader, and iterate the loader",
    "torch": "leave the sampler out",
}
_TORCH_DATA = "torch.utils.data"
_DATA_LOADER_REMEDY = (
    "DataLoader(LoaderIterable(loader), batch_size=None) of batchloom.adapters.pytorch reads on from it; order and "
    "batch size are those of the Loader"
)


class SecondShare(NamedTuple):
    """Divider among processes: its class, their number, the call that works."""

    name: str
    processes: int
    remedy: str


def find_second_share() -> SecondShare | None:
    """Return what reads for one of several processes, by the call stack; else None."""
    for frame in _iter_callers(sys._getframe(1)):  # noqa: SLF001 - the only way to the frames
        names = _SHARDING_CLASSES.get(frame.f_globals.get("__name__", ""))
        owner = frame.f_locals.get("self") if names else None
        if owner is None or not any(base.__name__ in names for base in type(owner).__mro__):  # type: ignore[operator]
            continue
        if (processes := _count_processes(owner)) > 1:
            packages = _find_packages(frame)
            remedy = next(text for package, text in _REMEDIES.items() if package in packages)
            return SecondShare(type(owner).__name__, processes, remedy)
    return None


def refuse_second_share() -> None:
    """Raise if a caller reads for one of several processes.

    Raises:
        TrainError: names the class, and the call that works.
    """
    if (share := find_second_share()) is not None:
        raise TrainError(
            f"{share.name} gives each of {share.processes} processes a part of the batches of this loader, which are "
            f"the share of this process already: the rest would be lost. Instead, {share.remedy}."
        )


def refuse_data_loader() -> None:
    """Raise if a ``DataLoader`` or its sampler calls the calling method.

    It would read steps by number, so that the loader's position stays where it is.

    Raises:
        TrainError: names the call that works.
    """
    if str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_TORCH_DATA):  # noqa: SLF001 - as above
        refuse_second_share()
        packages = _find_packages(sys._getframe(2))  # noqa: SLF001 - as above
        remedy = _REMEDIES["transformers"] if "transformers" in packages else _DATA_LOADER_REMEDY
        raise TrainError(
            f"A DataLoader reads the steps of a Loader by number, and leaves its position unchanged. Instead, {remedy}."
        )


def _find_packages(frame: FrameType) -> set[str]:
    """Return the packages of a frame and its callers."""
    return {one.f_globals.get("__name__", "").partition(".")[0] for one in _iter_callers(frame)}


def _iter_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _count_processes(owner: Any) -> int:
    """Return the number of processes among which an object divides."""
    state = getattr(owner, "state", None)
    counts = (getattr(owner, "num_processes", None), getattr(owner, "num_replicas", None))
    return next(filter(None, (*counts, getattr(state, "num_processes", None))), 1)
