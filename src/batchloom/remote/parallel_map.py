"""Parallel prefetching of items, in order."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from batchloom.core.errors import BatchloomError

T = TypeVar("T")

_MAX_CONCURRENT = 16
_END: Any = object()


def prefetch_items(items: Iterable[T], begin: Callable[[T], object]) -> Iterator[T]:
    """Yield items in order after ``begin`` has run on each, sixteen at a time.

    Errors of ``begin`` are ignored: the work on the item meets them again and reports them.
    """
    pending: deque[tuple[T, Future[None]]] = deque()
    source = iter(items)
    pool = ThreadPoolExecutor(_MAX_CONCURRENT, "ahead")
    try:
        while True:
            while len(pending) < 2 * _MAX_CONCURRENT and (next_item := next(source, _END)) is not _END:
                pending.append((next_item, pool.submit(_run_quietly, begin, next_item)))
            if not pending:
                return
            item, future = pending.popleft()
            future.result()
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _run_quietly(begin: Callable[[T], object], item: T) -> None:
    with contextlib.suppress(BatchloomError, OSError):
        begin(item)
