"""What every crew does, whichever it is."""

import pytest

from batchloom.core.errors import RecordError, WorkerError
from batchloom.preparation.workers import TaskMessage, TaskResult, iter_task_events


def results(crew, orders, lost=None):
    """The results of orders by number; each came once."""
    found = {}
    for event in iter_task_events(crew, list(enumerate(orders)), lost):
        if isinstance(event, TaskResult):
            assert event.number not in found
            found[event.number] = event.result
    return found


def until(crew, kind, seconds=30.0):
    """The next event of a kind; those before it are passed over."""
    while True:
        event = crew.next(seconds)
        assert event is not None
        if isinstance(event, kind):
            return event


def check_contract(crew):
    """Results, what is told before them, errors; and nothing where nothing is."""
    assert (crew.unfinished, crew.next(0)) == (0, None)
    assert results(crew, [("square", one) for one in range(40)]) == {n: n * n for n in range(40)}
    for number in range(3):
        crew.submit(number, ("tell", 4))
    assert crew.unfinished == 3
    events = []
    while crew.unfinished:
        events.append(crew.next(30))
    for number in range(3):
        assert [one for one in events if one.number == number] == [
            *(TaskMessage(number, message) for message in range(4)),
            TaskResult(number, "told"),
        ]
    # More than a pipe holds, both ways.
    assert results(crew, [("bytes", 3_000_000)]) == {0: b"x" * 3_000_000}
    check_errors(crew)
    assert results(crew, [("square", 7)]) == {0: 49}


def check_errors(crew):
    """What the work raises is raised once, as it is, and ends its order alone."""
    for order, kind, words in [
        (("raise", KeyError("absent")), KeyError, "absent"),
        (("bad record", None), RecordError, "d.jsonl, line 5, column 17: unexpected end"),
    ]:
        crew.submit(9, order)
        with pytest.raises(kind, match=words):
            until(crew, TaskResult)
        assert crew.unfinished == 0
    crew.submit(9, ("awkward", None))
    with pytest.raises(Exception, match="this and that") as caught:
        until(crew, TaskResult)
    assert type(caught.value).__name__ in ("Awkward", WorkerError.__name__)
