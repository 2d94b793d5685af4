"""A crew of one: orders are done in this process, when the next thing is asked for."""

from collections import deque
from collections.abc import Callable
from typing import Any, Self, final

from batchloom.preparation.workers.protocols import (
    TaskFunction,
    TaskFunctionFactory,
    TaskLoss,
    TaskMessage,
    TaskResult,
)


@final
class InlineExecutor:
    """Does orders in this process; see ``execution.seam.Crew``.

    While an order is done nothing else happens here, so what it tells would be known only after
    it. A ``listener`` is called with each ``TaskMessage`` at once, and ``next`` gives it no second time;
    what the listener raises is raised where the work tells, as if the work had raised it.
    """

    workers = 1

    def __init__(self, setup: TaskFunctionFactory, listener: Callable[[TaskMessage], None] | None = None) -> None:
        self._setup, self._listener = setup, listener
        self._task_function: TaskFunction | None = None
        self._waiting: deque[tuple[int, Any]] = deque()
        self._events: deque[TaskMessage | TaskResult | Exception] = deque()

    @property
    def unfinished(self) -> int:
        """Orders that are not done."""
        return len(self._waiting) + sum(not isinstance(event, TaskMessage) for event in self._events)

    def submit(self, number: int, task: Any) -> None:
        """Take an order; it is done by ``next``."""
        self._waiting.append((number, task))

    def next(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:  # noqa: ARG002 - nothing to wait for
        """The next thing that happened; does the first order that waits, however long it takes."""
        if not self._events and self._waiting:
            self._do(*self._waiting.popleft())
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

    def _do(self, number: int, task: Any) -> None:
        def send_message(message: Any) -> None:
            (self._listener or self._events.append)(TaskMessage(number, message))

        if self._task_function is None:
            self._task_function = self._setup()
        try:
            self._events.append(TaskResult(number, self._task_function(task, send_message)))
        except Exception as error:  # noqa: BLE001 - told in its turn, after what came before it
            self._events.append(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiting.clear()
        self._events.clear()
