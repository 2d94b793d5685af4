"""The loop over a crew: orders whose worker is gone are given again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchloom.preparation.workers.protocols import Crew, Done, Lost, Told

# A crew says nothing for as long as an order takes; this only bounds how long nobody looks.
_LOOK_SECONDS = 1.0


def carry_out(
    crew: Crew,
    orders: Iterable[tuple[int, Any]],
    lost: Callable[[int, Any, str], Any | None],
) -> Iterator[Told | Done]:
    """What is told of all orders and what comes of each, in any order.

    Where a worker is gone, ``lost(number, order, reason)`` gives the order to do under the same
    number in its place, or None for none; it may raise instead.
    """
    given = {}
    for number, order in orders:
        given[number] = order
        crew.give(number, order)
    while given:
        event = crew.next(_LOOK_SECONDS)
        if isinstance(event, Lost):
            again = lost(event.number, given.pop(event.number), event.reason)
            if again is not None:
                given[event.number] = again
                crew.give(event.number, again)
        elif event is not None:
            if isinstance(event, Done):
                del given[event.number]
            yield event
