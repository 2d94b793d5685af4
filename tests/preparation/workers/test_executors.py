"""What every crew on this machine does alike; test_ray.py asks the same of a cluster."""

import os
import pickle
from functools import partial

import pytest

import batchloom.preparation
from batchloom import BatchloomError, SettingsError
from batchloom.core.document import BadRecord
from batchloom.core.errors import InvalidJsonError, RecordError, SchemaError, WorkerError
from batchloom.preparation.workers import (
    InlineExecutor,
    ProcessPool,
    TaskFailure,
    TaskMessage,
    TaskResult,
    encode_failure,
    iter_task_events,
    restore_error,
)
from preparation.workers.contract import check_contract
from preparation.workers.works import Noted, setup

CREWS = {
    "here": InlineExecutor,
    "one process": lambda setup: ProcessPool(setup, 1),
    "three processes": lambda setup: ProcessPool(setup, 3),
}


@pytest.fixture(params=CREWS)
def crew_of(request):
    return CREWS[request.param]


def test_the_contract_of_a_crew(crew_of):
    with crew_of(setup) as crew:
        check_contract(crew)


def test_a_setup_is_made_once_in_each_process(crew_of, tmp_path):
    with crew_of(Noted(tmp_path / "made")) as crew:
        list(iter_task_events(crew, [(number, ("square", number)) for number in range(50)], None))
        made = (tmp_path / "made").read_text().split()
        assert len(made) == len(set(made)) <= crew.workers


def test_what_is_told_here_can_be_heard_at_once():
    heard = []
    with InlineExecutor(setup, listener=heard.append) as crew:
        crew.submit(0, ("tell", 2))
        assert crew.next(0) == TaskResult(0, "told")
        assert heard == [TaskMessage(0, 0), TaskMessage(0, 1)]

    def refuse(told):
        raise RecordError("d", 1, None, "enough")

    with InlineExecutor(setup, listener=refuse) as crew:
        crew.submit(0, ("tell", 2))
        with pytest.raises(RecordError, match="enough"):
            crew.next(0)
        assert crew.unfinished == 0


def test_work_here_is_of_this_process():
    with InlineExecutor(setup) as crew:
        crew.submit(0, ("pid", None))
        assert crew.next(0) == TaskResult(0, os.getpid())


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


EXAMPLES = {
    "RecordError": partial(RecordError, "d.jsonl", 5, 17, "unexpected end", 3),
    "InvalidJsonError": partial(InvalidJsonError, "d.jsonl", 5, 17, "not valid JSON: unexpected end"),
    "SchemaError": partial(SchemaError, "none fits", ("a", "b"), "--map text=a"),
    "SettingsError": partial(SettingsError, ["a: too few", "b: unknown"]),
    "OverlongError": lambda kind: kind(3, "is too long"),
    "UnusableError": lambda kind: kind(1, 2, BadRecord(3, 4, None, "is too long", "abc")),
    "UntabularError": lambda kind: kind(("a", "[]"), "is mixed"),
}


@pytest.mark.parametrize("kind", sorted(subclasses(BatchloomError), key=lambda kind: kind.__name__))
def test_every_error_survives_the_way_between_processes(kind):
    assert batchloom.preparation.prepare  # all that a worker can raise is loaded
    make = EXAMPLES.get(kind.__name__, lambda kind: kind("what, how much, what to do"))
    error = make() if isinstance(make, partial) else make(kind)
    again = restore_error(pickle.loads(encode_failure(0, error)))
    assert type(again) is type(error) is kind
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_an_error_of_no_tree_of_ours_carries_its_traceback():
    try:
        {}["absent"]
    except KeyError as error:
        again = restore_error(pickle.loads(encode_failure(0, error)))
    assert (type(again), again.args) == (KeyError, ("absent",))
    assert __file__ in again.__notes__[0]


def test_an_error_that_cannot_be_pickled_is_told_with_its_traceback():
    again = restore_error(TaskFailure(0, None, "Traceback: this and that"))
    assert isinstance(again, WorkerError)
    assert "this and that" in str(again)
