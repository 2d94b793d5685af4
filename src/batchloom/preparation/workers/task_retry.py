"""Event loop over an executor that retries tasks of lost workers."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchloom.preparation.workers.protocols import Executor, TaskLoss, TaskMessage, TaskResult

# An executor may be silent for as long as a task takes; this only bounds one wait.
_POLL_SECONDS = 1.0


def iter_task_events(
    executor: Executor, tasks: Iterable[tuple[int, Any]], handle_crash: Callable[[int, Any, str], Any | None]
) -> Iterator[TaskMessage | TaskResult]:
    """Yield the messages and results of all tasks, in any order.

    If a worker is lost, ``handle_crash(number, task, reason)`` returns the task to run under the same
    number instead, or None for none; it may also raise.
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
