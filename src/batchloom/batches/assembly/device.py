"""Batches as torch tensors, in this process's memory or on a GPU.

This is the first module that may import torch.
"""

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.core.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    import torch

# CUDA's allocator aligns to 512 bytes; compiled kernels use wide loads only on aligned data.
_ALIGNMENT = 512
# While one block is being copied, the next batch is packed into the other.
_PINNED_BLOCKS = 2
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Location of an array in a block."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    stop: int


def plan_array_layout(batch: Mapping[str, Any]) -> list[ArrayLayout]:
    """Lay out a batch's arrays back to back in a block; plain numbers take no space."""
    parts: list[ArrayLayout] = []
    for name, array in batch.items():
        if isinstance(array, np.ndarray):
            begin = -(-parts[-1].stop // _ALIGNMENT) * _ALIGNMENT if parts else 0
            parts.append(ArrayLayout(name, array.dtype, array.shape, begin, begin + array.nbytes))
    return parts


def pack_arrays(batch: Mapping[str, Any], parts: list[ArrayLayout], block: NDArray[np.uint8]) -> None:
    for part in parts:
        destination = block[part.begin : part.stop].view(part.dtype).reshape(part.shape)
        np.copyto(destination, batch[part.name])


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch whose tensors may still be in transfer to their device."""

    batch: Batch
    arrive: Callable[[], None] | None = None

    def take_batch(self) -> Batch:
        """Return the batch, safe to use on this thread's current stream."""
        if self.arrive is not None:
            self.arrive()
        return self.batch


BatchStager = Callable[[Batch], StagedBatch]


def make_stager(spec: BatchSpec) -> BatchStager:
    """Return a function that converts a batch of numpy arrays to the requested output."""
    if spec.output == "numpy":
        return StagedBatch
    require_torch()
    if spec.device is None:
        return _stage_shared
    if spec.device == "cpu":
        return _stage_packed
    return _CudaStager(find_gpu(spec.device)).stage


def require_torch() -> None:
    """Raise MissingDependencyError when torch cannot be imported."""
    try:
        import torch  # noqa: F401 - torch is optional and slow to import
    except ImportError as error:
        raise MissingDependencyError(
            "output='torch' needs torch, which is not installed: pip install 'batchloom[train]', "
            "or give output='numpy'."
        ) from error


def find_gpu(name: str) -> "torch.device":
    import torch

    _, _, number = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    current = torch.cuda.current_device() if count and not number else 0
    index = int(number) if number else current
    if index >= count:
        raise InputError(
            f"device={name!r}: GPU {index} was requested, but torch {torch.__version__} sees {count}. Give "
            "device='cpu', start fewer ranks, or install a torch built for your GPU."
        )
    return torch.device("cuda", index)


def to_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with tensors that share the arrays' memory; plain numbers stay."""
    import torch

    return {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in arrays.items()}


def _stage_shared(batch: Batch) -> StagedBatch:
    batch.update(to_torch(batch))
    return StagedBatch(batch)


def _stage_packed(batch: Batch) -> StagedBatch:
    """Pack the batch into one block of CPU memory, like a GPU batch before its copy."""
    import torch

    parts = plan_array_layout(batch)
    block = torch.empty(parts[-1].stop, dtype=torch.uint8, device="cpu")
    pack_arrays(batch, parts, block.numpy())
    batch.update(_view_tensors(block, parts))
    return StagedBatch(batch)


def _view_tensors(block: "torch.Tensor", parts: list[ArrayLayout]) -> "dict[str, torch.Tensor]":
    """Return the arrays of a packed block as tensors in its memory.

    They are not autograd views: a compiled model guards on the base of a view.
    """
    import torch

    storage = block.untyped_storage()
    tensors = {}
    for part in parts:
        empty_tensor = torch.empty(0, dtype=getattr(torch, part.dtype.name), device=block.device)
        element_offset = part.begin // part.dtype.itemsize
        tensors[part.name] = empty_tensor.set_(storage, element_offset, part.shape)  # type: ignore[call-overload]
    return tensors


@dataclass(slots=True)
class _PinnedBlock:
    """A block of pinned memory, and the event of the last copy out of it."""

    memory: "torch.Tensor | None" = None
    copied: "torch.cuda.Event | None" = None

    def reserve(self, size: int) -> "torch.Tensor":
        """Return ``size`` bytes that no copy reads any more."""
        import torch

        if self.copied is not None:
            self.copied.synchronize()
        if self.memory is None or len(self.memory) < size:
            # torch pins powers of two anyway, so a block grows a few times in a run and not every step.
            capacity = 1 << (size - 1).bit_length()
            self.memory = torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self.memory[:size]


@final
class _CudaStager:
    """Copies batches to a GPU on a stream of its own.

    The GPU memory belongs to this stream in torch's allocator. Each stream that takes a batch is recorded, so
    that the memory is not reused before the work on that stream ends.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._device = device
        self._pid = os.getpid()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._blocks = [_PinnedBlock() for _ in range(_PINNED_BLOCKS)]
        self._turn = threading.Lock()
        weakref.finalize(self, _close_stager, self._turn, self._pid)

    def stage(self, batch: Batch) -> StagedBatch:
        """Start to copy a batch; its arrays may be changed after this returns."""
        import torch

        if os.getpid() != self._pid:
            raise InputError(
                f"device='{self._device}': this process was forked from the one that made the loader, and CUDA does "
                "not work on both sides of a fork. Start it by spawn and make the loader there, or leave device out."
            )
        parts = plan_array_layout(batch)
        size = parts[-1].stop
        # Set the device first: leaving a stream context alone opens a context on GPU 0 in a thread without a
        # device.
        with self._turn, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pinned = self._blocks[0]
            room = pinned.reserve(size)
            pack_arrays(batch, parts, room.numpy())
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
            block.copy_(room, non_blocking=True)
            # One event per batch: a consumer must not wait for later batches.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            pinned.copied = copied
            self._blocks.append(self._blocks.pop(0))
        batch.update(_view_tensors(block, parts))
        device = self._device

        def arrive() -> None:
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            block.record_stream(current)

        return StagedBatch(batch, arrive)


def _close_stager(turn: threading.Lock, pid: int) -> None:
    """Block further copies: no producer thread may be in CUDA at interpreter shutdown."""
    if os.getpid() == pid:
        turn.acquire(timeout=_CLOSE_TIMEOUT_S)
