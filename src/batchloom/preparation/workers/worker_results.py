"""Pickled results that a worker process returns for a task."""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from batchloom.core.errors import BatchloomError, WorkerError
from batchloom.preparation.workers.protocols import MessageCallback, TaskFunction, TaskResult

# Reason of a worker that ends after a MemoryError, because its state can no longer be trusted.
OUT_OF_MEMORY = "ran out of memory"


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """Exception of a task (or of the setup, with number -1).

    Attributes:
        number: number of the task.
        error: the exception; None if it cannot be pickled.
        text: its traceback as text.
    """

    number: int
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
        restored_error = pickle.loads(pickled_failure).error  # noqa: S301 - bytes pickled just above
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
