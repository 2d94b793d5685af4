"""The loop over a crew: orders whose worker is gone are given again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchloom.preparation.workers.protocols import Executor, TaskLoss, TaskMessage, TaskResult

# A crew says nothing for as long as an order takes; this only bounds how long nobody looks.
_POLL_SECONDS = 1.0


def iter_task_events(
    crew: Executor,
    orders: Iterable[tuple[int, Any]],
    lost: Callable[[int, Any, str], Any | None],
) -> Iterator[TaskMessage | TaskResult]:
    """What is told of all orders and what comes of each, in any order.

    Where a worker is gone, ``lost(number, order, reason)`` gives the order to do under the same
    number in its place, or None for none; it may raise instead.
    """
    given = {}
    for number, order in orders:
        given[number] = order
        crew.give(number, order)
    while given:
        event = crew.next(_POLL_SECONDS)
        if isinstance(event, TaskLoss):
            again = lost(event.number, given.pop(event.number), event.reason)
            if again is not None:
                given[event.number] = again
                crew.give(event.number, again)
        elif event is not None:
            if isinstance(event, TaskResult):
                del given[event.number]
            yield event
