"""Protocols of execution: an executor runs tasks and reports results in any order.

The effect of a task depends on the task alone, so an executor may run it on any worker, and again on another
one if the first is lost. Tasks, messages and results are pickled in transit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

# Sends a message of a running task; messages sent before a worker dies still arrive.
MessageCallback = Callable[[Any], None]
# Runs one task; made once per worker process by a setup. A MemoryError counts as a lost worker.
TaskFunction = Callable[[Any, MessageCallback], Any]
# Picklable; makes the task function in the worker process.
TaskFunctionFactory = Callable[[], TaskFunction]


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """Message of a running task."""

    number: int
    message: Any


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of a finished task."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """Task whose worker was lost; it has no result and sends no more messages.

    Attributes:
        number: number of the task.
        reason: why the worker ended, as a verb phrase.
    """

    number: int
    reason: str


class Executor(Protocol):
    """Executor of tasks on workers; a context manager that ends the workers."""

    @property
    def workers(self) -> int:
        """Maximum number of tasks run at the same time."""
        ...

    @property
    def unfinished(self) -> int:
        """Number of submitted tasks without a reported result or loss."""
        ...

    def submit(self, number: int, task: Any) -> None:
        """Queue a task until a worker is free."""
        ...

    def next(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:
        """Return the next event; None after ``seconds`` without one.

        Messages of a task arrive before its end. An exception of a task ends the task and is raised here; the
        executor stays usable.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
