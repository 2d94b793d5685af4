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


def run_task(number: int, work: TaskFunction, order: Any, tell: MessageCallback) -> bytes:
    """Do an order: its Done or Failed, pickled.

    Raises:
        MemoryError: as the work did; the process should say so and end.
    """
    try:
        return pickle.dumps(TaskResult(number, work(order, tell)), protocol=5)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the edge of a process: everything is told
        return encode_failure(number, error)


def encode_failure(number: int, error: Exception) -> bytes:
    """An exception as a pickled Failed, which opens in another process whatever it holds."""
    text = "".join(traceback.format_exception(error))
    try:
        whole = pickle.dumps(TaskFailure(number, error, text), protocol=5)
        again = pickle.loads(whole).error  # noqa: S301 - our own bytes
        if type(again) is type(error) and str(again) == str(error):
            return whole
    except Exception:  # noqa: BLE001, S110 - whatever its own pickling does, its text is told
        pass
    return pickle.dumps(TaskFailure(number, None, text))


def restore_error(failed: TaskFailure) -> Exception:
    """What to raise in the coordinator; where it is no error of ours it carries the traceback."""
    if failed.error is None:
        return WorkerError(
            f"A worker raised what cannot be sent on as it is; this is its text:\n{failed.text}"
        )
    if not isinstance(failed.error, BatchloomError):
        failed.error.add_note(f"In a worker process:\n{failed.text}")
    return failed.error
