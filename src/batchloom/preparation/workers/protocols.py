"""Protocol of executors, and the loop that runs tasks on any of them.

The effect of a task depends on the task alone, so an executor may run it on any worker, and again on another
one if the first is lost. Tasks, messages and results are pickled in transit.
"""

import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from batchloom.core.errors import BatchloomError, WorkerError

T = TypeVar("T")

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
    """Task whose worker was lost; ``reason`` is a verb phrase."""

    number: int
    reason: str


class Executor(Protocol):
    """Executor of tasks on workers; a context manager that ends the workers."""

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


# Reason of a worker that ends after a MemoryError, because its state can no longer be trusted.
OUT_OF_MEMORY = "ran out of memory"


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """Exception of a task (or of the setup, with number -1), with its traceback."""

    number: int
    # None if it cannot be pickled.
    error: Exception | None
    text: str


def run_task(number: int, task_function: TaskFunction, task: Any, send_message: MessageCallback) -> bytes:
    """Run a task and return its pickled TaskResult or TaskFailure.

    A MemoryError is raised again; the process should report it and end.
    """
    try:
        return pickle.dumps(TaskResult(number, task_function(task, send_message)), protocol=5)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - process boundary: every error is reported
        return encode_failure(number, error)


def encode_failure(number: int, error: Exception) -> bytes:
    """Return a pickled TaskFailure that any process can unpickle."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled_failure = pickle.dumps(TaskFailure(number, error, text), protocol=5)
        restored_error = pickle.loads(pickled_failure).error
        if type(restored_error) is type(error) and str(restored_error) == str(error):
            return pickled_failure
    except Exception:  # noqa: BLE001, S110 - pickling may raise anything; the text is sent instead
        pass
    return pickle.dumps(TaskFailure(number, None, text))


def restore_error(failure: TaskFailure) -> Exception:
    """Return the exception to raise in the coordinator.

    An error that is no :class:`BatchloomError` carries the traceback of the worker.
    """
    if failure.error is None:
        return WorkerError(f"A worker raised an error that cannot be pickled; its text:\n{failure.text}")
    if not isinstance(failure.error, BatchloomError):
        failure.error.add_note(f"In a worker process:\n{failure.text}")
    return failure.error


# An executor may be silent for as long as a task takes; this only bounds one wait.
_POLL_SECONDS = 1.0
# No single document can crash most tasks, so deaths come from the machine.
_MAX_TASK_DEATHS = 3


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


def run_tasks(
    executor: Executor,
    tasks: Mapping[int, Callable[[str], T]],
    attempt: str,
    on_done: Callable[[int], None] = lambda _: None,
) -> dict[int, T]:
    """Run picklable functions of an attempt name, and return their results by number.

    Tasks of lost workers are retried; repeated deaths at one task raise WorkerError. A worker reported dead may
    still be running and writing, so every attempt has another name, which its files bear.
    """
    deaths: Counter[int] = Counter()

    def handle_crash(number: int, _: Any, reason: str) -> Any:
        deaths[number] += 1
        if deaths[number] > _MAX_TASK_DEATHS:
            raise WorkerError(
                f"A worker {reason}, {deaths[number]} times at the same task. Give workers more memory (fewer of "
                "them: --workers 1), then give the same command again to resume."
            )
        return partial(tasks[number], f"{attempt}-{deaths[number]}")

    results: dict[int, T] = {}
    first_attempts = ((number, partial(task, attempt)) for number, task in tasks.items())
    for event in iter_task_events(executor, first_attempts, handle_crash):
        if isinstance(event, TaskResult):
            results[event.number] = event.result
            on_done(event.number)
    return results
