"""Transfer of batches from DataLoader workers through reused shared memory.

A worker owns segments of shared memory, one for each of its batches that the DataLoader or the training loop holds. It
copies a batch into a free segment and sends only a description through the DataLoader's queue. The consumer's arrays
and tensors are views of the segment, which is free again when the last of them is freed.

If all segments are in use, or there is no memory for one, the batch itself goes through the queue. So a worker never
waits for a consumer that keeps batches, and these are never overwritten.
"""

import copyreg
import functools
import io
import logging
import mmap
import multiprocessing
import os
import pickle
import sys
import time
import weakref
from multiprocessing.resource_sharer import DupFd
from typing import Any, NamedTuple, final

import numpy as np
import torch

from batchloom.core.files import describe_os_error
from batchloom.core.wording import format_size

# Limits the memory and the open files of a worker whose consumer keeps batches.
_MAX_SEGMENTS = 16 if sys.platform == "linux" else 0
# Arrays begin at multiples of a cache line. The first line of a segment holds its flag: 1 while it is in use.
_ALIGNMENT = 64
_LOG = logging.getLogger("batchloom")


@final
class SharedDict(dict[str, Any]):
    """Dict that a worker sends through shared memory; it arrives as a plain dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        buffers = list[pickle.PickleBuffer]()
        pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduce_tensor}
        pickler.dump(dict(self))
        return _load, (file.getvalue(), _get_sender().send([buffer.raw() for buffer in buffers]))


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):
        # numpy lacks the dtype (bfloat16), or the tensor needs a gradient.
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


class _SentSegment(NamedTuple):
    """Description of a segment that holds a batch.

    Attributes:
        sender: process id of the worker, and the time of its first batch.
        number: number of the segment.
        descriptor: file of the segment; None if the consumer has it.
        ranges: begin and end of each buffer in the segment.
    """

    sender: tuple[int, int]
    number: int
    descriptor: DupFd | None
    ranges: list[tuple[int, int]]


@final
class _SegmentSender:
    """Segments of this worker."""

    def __init__(self) -> None:
        self._name = os.getpid(), time.monotonic_ns()
        self._segments: list[mmap.mmap] = []
        self._has_memory = True

    def send(self, buffers: list[memoryview]) -> _SentSegment | list[bytearray]:
        """Copy buffers into a free segment; if there is none, return copies of them."""
        ranges = list[tuple[int, int]]()
        end = 1
        for buffer in buffers:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + buffer.nbytes
            ranges.append((begin, end))
        reserved = self._reserve(end)
        if reserved is None:
            return [bytearray(buffer) for buffer in buffers]
        number, descriptor = reserved
        segment = self._segments[number]
        segment[0] = 1
        for (begin, end), buffer in zip(ranges, buffers, strict=True):
            segment[begin:end] = buffer
        return _SentSegment(self._name, number, descriptor, ranges)

    def _reserve(self, size: int) -> tuple[int, DupFd | None] | None:
        """Return the number of a free segment, and its file if it is new."""
        free = [number for number, segment in enumerate(self._segments) if not segment[0]]
        for number in free:
            if len(self._segments[number]) >= size:
                return number, None
        if not self._has_memory or (not free and len(self._segments) == _MAX_SEGMENTS):
            return None
        # A new segment replaces a free one, which is too small.
        number = free[0] if free else len(self._segments)
        try:
            # Later batches may be a little larger.
            segment, descriptor = _make_segment(size + size // 8)
        except OSError as error:
            self._has_memory = False
            _LOG.warning(
                "A DataLoader worker could not reserve %s of shared memory for a batch (%s). Batches now go through "
                "a pipe, which takes longer. Use fewer workers, or iterate the Loader, which needs none.",
                format_size(size),
                describe_os_error(error),
            )
            return None
        self._segments[number : number + 1] = [segment]
        return number, descriptor


@functools.cache
def _get_sender() -> _SegmentSender:
    return _SegmentSender()


def _make_segment(size: int) -> tuple[mmap.mmap, DupFd]:
    # A memfd has no name that a killed process could leave behind, and takes nothing of /dev/shm, which is small in
    # containers.
    descriptor = os.memfd_create("batchloom-batch")
    try:
        # If memory is short, this raises; a later write would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size), DupFd(descriptor)
    finally:
        os.close(descriptor)


# Segments by their sender; an entry lives as long as the worker's Process object.
_RECEIVED: dict[tuple[int, int], dict[int, mmap.mmap]] = {}
# A new worker does not need the segments of others.
os.register_at_fork(after_in_child=_RECEIVED.clear)


def _load(data: bytes, source: _SentSegment | list[bytearray]) -> dict[str, Any]:
    """Rebuild a dict from its pickle and the buffers of its arrays."""
    buffers = _view_buffers(source) if isinstance(source, _SentSegment) else source
    result: dict[str, Any] = pickle.loads(data, buffers=buffers)  # noqa: S301 - this program's worker wrote it
    return result


def _view_buffers(sent: _SentSegment) -> list[memoryview]:
    """Return the buffers in a segment, which is free when they are freed."""
    if sent.descriptor is not None:
        _map_segment(sent, sent.descriptor)
    segment = _RECEIVED[sent.sender][sent.number]
    # Arrays made of these buffers hold this one, as do their views and tensors.
    array = np.frombuffer(segment, np.uint8)
    weakref.finalize(array, _free_segment, segment, os.getpid()).atexit = False
    view = array.data
    return [view[begin:end] for begin, end in sent.ranges]


def _free_segment(segment: mmap.mmap, pid: int) -> None:
    # A forked process frees its copy of an array, while the original is in use.
    if os.getpid() == pid:
        segment[0] = 0


def _map_segment(sent: _SentSegment, descriptor: DupFd) -> None:
    if sent.sender not in _RECEIVED:
        _RECEIVED[sent.sender] = {}
        for worker in multiprocessing.active_children():
            if worker.pid == sent.sender[0]:
                weakref.finalize(worker, _RECEIVED.pop, sent.sender, None)
    file = descriptor.detach()
    try:
        _RECEIVED[sent.sender][sent.number] = mmap.mmap(file, 0)
    finally:
        os.close(file)
