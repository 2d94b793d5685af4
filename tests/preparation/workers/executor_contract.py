"""Contract that every executor fulfils."""

import pytest

from batchloom.core.errors import RecordError, WorkerError
from batchloom.preparation.workers.protocols import TaskMessage, TaskResult, iter_task_events
from waiting import LIMIT_S


def run_tasks(executor, tasks, handle_crash=None):
    """Run tasks and return their results by number; check that each arrives once."""
    results_by_number = {}
    for event in iter_task_events(executor, list(enumerate(tasks)), handle_crash):
        if isinstance(event, TaskResult):
            assert event.number not in results_by_number
            results_by_number[event.number] = event.result
    return results_by_number


def next_event(executor):
    """Return the next event."""
    event = executor.next(LIMIT_S)
    assert event is not None
    return event


def wait_for(executor, kind):
    """Return the next event of a kind; skip those before it."""
    while True:
        event = next_event(executor)
        if isinstance(event, kind):
            return event


def check_contract(executor):
    """Check results, messages before them, errors, and an idle executor."""
    assert (executor.unfinished, executor.next(0)) == (0, None)
    assert run_tasks(executor, [("square", number) for number in range(40)]) == {n: n * n for n in range(40)}
    for number in range(3):
        executor.submit(number, ("tell", 4))
    assert executor.unfinished == 3
    events = []
    while executor.unfinished:
        events.append(next_event(executor))
    for number in range(3):
        assert [event for event in events if event.number == number] == [
            *(TaskMessage(number, message) for message in range(4)),
            TaskResult(number, "told"),
        ]
    # The result exceeds the capacity of a pipe.
    assert run_tasks(executor, [("bytes", 3_000_000)]) == {0: b"x" * 3_000_000}
    check_errors(executor)
    assert run_tasks(executor, [("square", 7)]) == {0: 49}


def check_errors(executor):
    """Check that an error of a task is raised once, unchanged, and ends only its task."""
    for task, kind, message in [
        (("raise", KeyError("absent")), KeyError, "absent"),
        (("bad record", None), RecordError, "d.jsonl, line 5, column 17: unexpected end"),
    ]:
        executor.submit(9, task)
        with pytest.raises(kind, match=message):
            wait_for(executor, TaskResult)
        assert executor.unfinished == 0
    executor.submit(9, ("awkward", None))
    with pytest.raises(Exception, match="this and that") as caught:
        wait_for(executor, TaskResult)
    assert type(caught.value).__name__ in ("UnpicklableError", WorkerError.__name__)
