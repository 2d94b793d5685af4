"""The seam of execution: a crew is given orders, and says what came of each, in any order.

What an order does is a function of the order alone, so a crew may give it to any worker, and
to another one when the first is gone. Orders, what is told and results are pickled on their way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

# Told by a worker on its way; what is told before a worker dies arrives.
MessageCallback = Callable[[Any], None]
# Does one order; made once in every worker process by a setup. A MemoryError is a lost worker.
TaskFunction = Callable[[Any, MessageCallback], Any]
# Picklable; makes the function that does orders, in the process that will do them.
TaskFunctionFactory = Callable[[], TaskFunction]


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """Something that the worker of an order said before it was done."""

    number: int
    message: Any


@dataclass(frozen=True, slots=True)
class TaskResult:
    """An order is done, and this came of it."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """The worker of an order is gone: nothing came of it, and nothing more will.

    Attributes:
        number: of the order.
        reason: what became of the worker, in the middle of a sentence.
    """

    number: int
    reason: str


class Executor(Protocol):
    """Workers that take orders; use as a context manager, which ends them."""

    @property
    def workers(self) -> int:
        """How many orders are done at the same time, at most."""
        ...

    @property
    def unfinished(self) -> int:
        """Orders that were given, and of which neither Done nor Lost was said."""
        ...

    def submit(self, number: int, task: Any) -> None:
        """Take an order; it waits until a worker is free."""
        ...

    def next(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:
        """The next thing that happened; None where nothing did for so long.

        What is told of an order comes before its end. What the work of an order raises ends the
        order and is raised here; the crew can go on.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
