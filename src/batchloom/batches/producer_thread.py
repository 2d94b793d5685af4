"""One producer thread ahead of its consumer: bounded, in order, errors passed on in place."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import numpy as np

T = TypeVar("T")
R = TypeVar("R")

# glibc keeps no larger blocks than this (DEFAULT_MMAP_THRESHOLD_MAX).
_MAX_RETAINED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PendingItem(Generic[T]):
    """An item whose making has begun.

    Attributes:
        finish: waits for what it takes and gives it; called once.
        drop: ends what nobody waits for any more, in place of ``finish``.
    """

    finish: Callable[[], T]
    drop: Callable[[], None] = lambda: None

    def then(self, transform: Callable[[T], R]) -> "PendingItem[R]":
        """What is made of the item when it is finished."""
        return PendingItem(lambda: transform(self.finish()), self.drop)


# Begins the item of a number; None behind the last.
ItemStarter = Callable[[int], PendingItem[T] | None]


@final
class PrefetchWindow(Generic[T]):
    """Makes items in their order, of which so many are begun together: who makes parts of one goes on with the next.

    Args:
        begin: begins the item of a number.
        size: items that may be begun, at least 1.
    """

    def __init__(self, begin: ItemStarter[T], size: int) -> None:
        self._begin, self._size = begin, size
        self._pending: deque[PendingItem[T]] = deque()
        self._exhausted = False

    def make(self, number: int) -> T | None:
        """The item of a number, the one after the last that was made; None behind the last."""
        while not self._exhausted and len(self._pending) < self._size:
            self._begin_item(number + len(self._pending))
        return self._pending.popleft().finish() if self._pending else None

    def _begin_item(self, number: int) -> None:
        try:
            pending = self._begin(number)
        except Exception as error:  # noqa: BLE001 - raised in place: the items before it are whole
            pending, self._exhausted = _make_failed_item(error), True
        if pending is None:
            self._exhausted = True
        else:
            self._pending.append(pending)

    def drop(self) -> None:
        """End what was begun and is not wanted."""
        while self._pending:
            self._pending.popleft().drop()


def _make_failed_item(error: Exception) -> PendingItem[Any]:
    def finish() -> Any:
        raise error

    return PendingItem(finish)


@dataclass(slots=True)
class _ProducedItem(Generic[T]):
    """One made item: None after the last, with the error that ended them, if one did."""

    item: T | None
    error: BaseException | None
    ahead: bool


@final
class PrefetchIterator(Generic[T]):
    """Iterates ``make(first)``, ``make(first + 1)``, ... until it gives None.

    A consumer that finds nothing ready makes the next item itself rather than sleeping until
    the thread is done with it, and one that comes back at once gets no thread beside it:
    handing over every item costs a quarter of the throughput of a consumer that is faster than
    the producer, and the thread gains nothing there.

    Args:
        make: makes the item of a number; None ends. Called by one thread at a time.
        first: the first number.
        depth: items that may wait, at least 1.
        end: called when nothing is made any more, by the thread.
    """

    def __init__(
        self,
        make: Callable[[int], T | None],
        first: int,
        depth: int,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._make, self._number, self._end = make, first, end
        self._ready: deque[_ProducedItem[T]] = deque()
        self._ended = False
        self._seconds = 0.0
        self._turn = threading.Lock()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._release_items(depth)
        self._thread = threading.Thread(target=self._produce, name="batchloom-producer", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        slots_to_release = 0
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
                yield_time = time.perf_counter()
                yield produced_item.item
                if time.perf_counter() - yield_time > self._seconds / 8:
                    self._release_items(slots_to_release)
                    slots_to_release = 0
        finally:
            # The thread is not waited for: this may run inside a garbage collection, in that very
            # thread or while a lock is held that it needs. It ends by itself, after its item.
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
        except BaseException as error:  # noqa: BLE001 - the consumer raises it, in place
            produced_item = _ProducedItem(None, error, ahead)
        if produced_item.item is None:
            self._ended = True
        self._seconds = time.perf_counter() - begin
        self._number += 1
        self._ready.append(produced_item)


def iter_in_order(begin: ItemStarter[T], first: int, ahead: int, *, together: bool) -> Iterator[T]:
    """Items from a number on until ``begin`` gives None.

    Args:
        begin: begins the item of a number.
        first: that number.
        ahead: items that are made ahead; with 0 each is begun when it is asked for.
        together: whether those are all begun before the first of them is finished.
    """
    size = ahead if ahead and together else 1
    window = PrefetchWindow(begin, size)
    if ahead:
        yield from PrefetchIterator(window.make, first, ahead + 1 - size, window.drop)
        return
    number = first
    while (item := window.make(number)) is not None:
        yield item
        number += 1


def reserve_allocator_blocks(size: int) -> None:
    """Let the allocator keep blocks that items of so many bytes are made of, instead of giving them back each time.

    glibc learns from the largest block freed so far which sizes to keep (mallopt(3),
    M_MMAP_THRESHOLD): without this, freed items go back to the system and come again as
    page faults. The block is never touched, so it costs no memory.
    """
    np.empty(min(size, _MAX_RETAINED_BYTES), np.uint8)
