"""A producer thread that runs ahead of its consumer: bounded and in order.

Errors reach the consumer at their position in the order.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import numpy as np

from batchloom.batches.background import BackgroundThread

T = TypeVar("T")
R = TypeVar("R")

# glibc retains no larger blocks than this (DEFAULT_MMAP_THRESHOLD_MAX).
_MAX_RETAINED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PendingItem(Generic[T]):
    """An item that has been started."""

    finish: Callable[[], T]  # waits for the item and returns it; called once
    drop: Callable[[], None] = lambda: None  # cancels an unwanted item; called instead of ``finish``

    def then(self, transform: Callable[[T], R]) -> "PendingItem[R]":
        """Return a pending item with a transform applied on finish."""
        return PendingItem(lambda: transform(self.finish()), self.drop)


# Starts the item of a number; returns None after the last.
ItemStarter = Callable[[int], PendingItem[T] | None]


@final
class PrefetchWindow(Generic[T]):
    """Maker of ordered items that starts several together to keep workers busy."""

    def __init__(self, begin: ItemStarter[T], size: int) -> None:
        self._begin = begin
        self._size = size
        self._pending: deque[PendingItem[T]] = deque()
        self._exhausted = False

    def make(self, number: int) -> T | None:
        """Return the item of the next number; None after the last."""
        while not self._exhausted and len(self._pending) < self._size:
            self._begin_item(number + len(self._pending))
        return self._pending.popleft().finish() if self._pending else None

    def _begin_item(self, number: int) -> None:
        try:
            pending = self._begin(number)
        except Exception as error:  # noqa: BLE001 - raised in order: earlier items are complete
            pending = _make_failed_item(error)
            self._exhausted = True
        if pending is None:
            self._exhausted = True
        else:
            self._pending.append(pending)

    def drop(self) -> None:
        """Cancel started items that are not wanted."""
        while self._pending:
            self._pending.popleft().drop()


def _make_failed_item(error: Exception) -> PendingItem[Any]:
    def finish() -> Any:
        raise error

    return PendingItem(finish)


@dataclass(slots=True)
class _ProducedItem(Generic[T]):
    """A made item, or None after the last one, with the error that ended the items."""

    item: T | None
    error: BaseException | None
    ahead: bool


@final
class PrefetchIterator(Generic[T, R]):
    """Iterator over ``take(make(n))`` from ``n = first`` on, until make returns None.

    The thread makes items, and the consumer takes them.

    A consumer that finds no ready item makes the next one itself instead of waiting for
    the thread. While the consumer is faster than the producer, the thread gets no room to run:
    handing over every item would cost a quarter of the throughput, and the thread would gain nothing.
    """

    def __init__(
        self,
        make: Callable[[int], T | None],
        take: Callable[[T], R],
        first: int,
        depth: int,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._make = make
        self._take = take
        self._number = first
        self._end = end
        self._ready: deque[_ProducedItem[T]] = deque()
        self._ended = False
        self._seconds = 0.0
        self._turn = threading.Lock()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._release_items(depth)
        BackgroundThread("batchloom-producer", self._produce, self.end).start()

    def __iter__(self) -> Iterator[R]:
        slots_to_release = 0
        use_time = 0.0
        try:
            while True:
                if not self._ready:
                    with self._turn:
                        if not self._ready:
                            self._make_item(ahead=False)
                produced_item = self._ready.popleft()
                if produced_item.error is not None:
                    raise produced_item.error
                if produced_item.item is None:
                    return
                slots_to_release += produced_item.ahead
                item = self._take(produced_item.item)
                # The thread resumes only now: it would compete with the consumer for the interpreter.
                if use_time > self._seconds / 8:
                    self._release_items(slots_to_release)
                    slots_to_release = 0
                yield_time = time.perf_counter()
                yield item
                use_time = time.perf_counter() - yield_time
        finally:
            # Do not join the thread: this may run inside a garbage collection, in that very thread, or while a
            # lock that it needs is held. The thread ends by itself after its item.
            self.end()

    def end(self) -> None:
        """Tell the thread to end after its current item."""
        self._ended = True
        self._release_items(1)

    def _release_items(self, items: int) -> None:
        for _ in range(items):
            self._room.put(None)

    def _produce(self) -> None:
        while not self._ended:
            self._room.get()
            with self._turn:
                if not self._ended:
                    self._make_item(ahead=True)
        self._end()

    def _make_item(self, *, ahead: bool) -> None:
        begin = time.perf_counter()
        try:
            produced_item = _ProducedItem(self._make(self._number), None, ahead)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it, in order
            produced_item = _ProducedItem(None, error, ahead)
        if produced_item.item is None:
            self._ended = True
        self._seconds = time.perf_counter() - begin
        self._number += 1
        self._ready.append(produced_item)


def iter_in_order(
    begin: ItemStarter[T], take: Callable[[T], R], first: int, ahead: int, *, together: bool
) -> Iterator[R]:
    """Yield ``take(item)`` of each item from a number on, until begin returns None."""
    size = ahead if ahead and together else 1
    window = PrefetchWindow(begin, size)
    if ahead:
        yield from PrefetchIterator(window.make, take, first, ahead + 1 - size, window.drop)
        return
    number = first
    while (item := window.make(number)) is not None:
        yield take(item)
        number += 1


def reserve_allocator_blocks(size: int) -> None:
    """Make the allocator retain blocks of ``size`` bytes instead of returning them.

    glibc learns from the largest block freed so far which sizes to retain (mallopt(3),
    M_MMAP_THRESHOLD): without this, freed items are returned to the system and every reuse
    causes page faults. The block is never touched, so it costs no memory.
    """
    np.empty(min(size, _MAX_RETAINED_BYTES), np.uint8)
