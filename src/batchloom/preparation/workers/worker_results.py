"""What a worker process answers of an order, as bytes."""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from batchloom.core.errors import BatchloomError, WorkerError
from batchloom.preparation.workers.protocols import MessageCallback, TaskFunction, TaskResult

# Of a worker whose work raised a MemoryError: it ends, since what is left of it is not to be trusted.
OUT_OF_MEMORY = "ran out of memory"


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """What the work of an order (or the setup, under number -1) raised.

    Attributes:
        number: of the order.
        error: the exception itself; None where it does not survive the way between processes.
        text: its traceback, as Python prints it.
    """

    number: int
    error: Exception | None
    text: str


def run_task(number: int, task_function: TaskFunction, task: Any, send_message: MessageCallback) -> bytes:
    """Do an order: its Done or Failed, pickled.

    Raises:
        MemoryError: as the work did; the process should say so and end.
    """
    try:
        return pickle.dumps(TaskResult(number, task_function(task, send_message)), protocol=5)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the edge of a process: everything is told
        return encode_failure(number, error)


def encode_failure(number: int, error: Exception) -> bytes:
    """An exception as a pickled Failed, which opens in another process whatever it holds."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled_failure = pickle.dumps(TaskFailure(number, error, text), protocol=5)
        restored_error = pickle.loads(pickled_failure).error  # noqa: S301 - our own bytes
        if type(restored_error) is type(error) and str(restored_error) == str(error):
            return pickled_failure
    except Exception:  # noqa: BLE001, S110 - whatever its own pickling does, its text is told
        pass
    return pickle.dumps(TaskFailure(number, None, text))


def restore_error(failure: TaskFailure) -> Exception:
    """What to raise in the coordinator; where it is no error of ours it carries the traceback."""
    if failure.error is None:
        return WorkerError(f"A worker raised what cannot be sent on as it is; this is its text:\n{failure.text}")
    if not isinstance(failure.error, BatchloomError):
        failure.error.add_note(f"In a worker process:\n{failure.text}")
    return failure.error
