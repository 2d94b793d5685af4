"""The loop over a crew: orders whose worker is gone are given again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchloom.preparation.workers.protocols import Executor, TaskLoss, TaskMessage, TaskResult

# A crew says nothing for as long as an order takes; this only bounds how long nobody looks.
_POLL_SECONDS = 1.0


def iter_task_events(
    executor: Executor,
    tasks: Iterable[tuple[int, Any]],
    handle_crash: Callable[[int, Any, str], Any | None],
) -> Iterator[TaskMessage | TaskResult]:
    """What is told of all orders and what comes of each, in any order.

    Where a worker is gone, ``lost(number, order, reason)`` gives the order to do under the same
    number in its place, or None for none; it may raise instead.
    """
    active_tasks = {}
    for number, task in tasks:
        active_tasks[number] = task
        executor.submit(number, task)
    while active_tasks:
        event = executor.next(_POLL_SECONDS)
        if isinstance(event, TaskLoss):
            retried_task = handle_crash(event.number, active_tasks.pop(event.number), event.reason)
            if retried_task is not None:
                active_tasks[event.number] = retried_task
                executor.submit(event.number, retried_task)
        elif event is not None:
            if isinstance(event, TaskResult):
                del active_tasks[event.number]
            yield event
