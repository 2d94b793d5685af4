"""Executor that runs tasks in this process, when the next event is requested."""

from collections import deque
from collections.abc import Callable
from typing import Any, Self, final

from batchloom.preparation.workers.protocols import TaskFunction, TaskFunctionFactory, TaskLoss, TaskMessage, TaskResult


@final
class InlineExecutor:
    """Executor of tasks in this process; see :class:`Executor`.

    Nothing else runs here during a task, so its messages would arrive only after it. A ``listener`` gets each
    ``TaskMessage`` at once, and ``next`` does not return it again; an exception of the listener is raised inside
    the task, as if the task had raised it.
    """

    workers = 1

    def __init__(self, setup: TaskFunctionFactory, listener: Callable[[TaskMessage], None] | None = None) -> None:
        self._setup = setup
        self._listener = listener
        self._task_function: TaskFunction | None = None
        self._waiting: deque[tuple[int, Any]] = deque()
        self._events: deque[TaskMessage | TaskResult | Exception] = deque()

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + sum(not isinstance(event, TaskMessage) for event in self._events)

    def submit(self, number: int, task: Any) -> None:
        self._waiting.append((number, task))

    def next(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:
        """Return the next event; runs the first queued task, however long it takes."""
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
        except Exception as error:  # noqa: BLE001 - raised by next, after the earlier events
            self._events.append(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiting.clear()
        self._events.clear()
