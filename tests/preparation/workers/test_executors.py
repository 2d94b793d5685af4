"""Contract of the executors of this machine; test_ray_cluster.py checks Ray's."""

import os
import pickle
from functools import partial

import pytest

import batchloom.preparation
from batchloom import BatchloomError, SettingsError
from batchloom.core.document import BadRecord
from batchloom.core.errors import InvalidJsonError, RecordError, SchemaError, WorkerError
from batchloom.preparation.workers.inline_executor import InlineExecutor
from batchloom.preparation.workers.process_pool import ProcessPool
from batchloom.preparation.workers.protocols import (
    TaskFailure,
    TaskMessage,
    TaskResult,
    encode_failure,
    iter_task_events,
    restore_error,
)
from preparation.workers.executor_contract import check_contract
from preparation.workers.worker_tasks import RecordingSetup, setup

EXECUTORS = {
    "here": InlineExecutor,
    "one process": lambda setup: ProcessPool(setup, 1),
    "three processes": lambda setup: ProcessPool(setup, 3),
}


@pytest.fixture(params=EXECUTORS)
def make_executor(request):
    return EXECUTORS[request.param]


def test_the_contract_of_an_executor(make_executor):
    with make_executor(setup) as executor:
        check_contract(executor)


def test_a_setup_is_made_once_in_each_process(make_executor, tmp_path):
    with make_executor(RecordingSetup(tmp_path / "made")) as executor:
        list(iter_task_events(executor, [(number, ("square", number)) for number in range(50)], None))
        process_ids = (tmp_path / "made").read_text().split()
        assert len(process_ids) == len(set(process_ids)) <= executor.workers


def test_messages_of_the_inline_executor_are_delivered_at_once():
    messages = []
    with InlineExecutor(setup, listener=messages.append) as executor:
        executor.submit(0, ("tell", 2))
        assert executor.next(0) == TaskResult(0, "told")
        assert messages == [TaskMessage(0, 0), TaskMessage(0, 1)]

    def refuse(message):
        raise RecordError("d", 1, None, "enough")

    with InlineExecutor(setup, listener=refuse) as executor:
        executor.submit(0, ("tell", 2))
        with pytest.raises(RecordError, match="enough"):
            executor.next(0)
        assert executor.unfinished == 0


def test_the_inline_executor_runs_in_this_process():
    with InlineExecutor(setup) as executor:
        executor.submit(0, ("pid", None))
        assert executor.next(0) == TaskResult(0, os.getpid())


def list_subclasses(kind):
    return {kind}.union(*map(list_subclasses, kind.__subclasses__()))


EXAMPLES = {
    "RecordError": partial(RecordError, "d.jsonl", 5, 17, "unexpected end", 3),
    "InvalidJsonError": partial(InvalidJsonError, "d.jsonl", 5, 17, "not valid JSON: unexpected end"),
    "SchemaError": partial(SchemaError, "none fits", ("a", "b"), "--map text=a"),
    "SettingsError": partial(SettingsError, ["a: too few", "b: unknown"]),
    "OverlongError": lambda kind: kind(3, "is too long"),
    "UnusableError": lambda kind: kind(1, 2, BadRecord(3, 4, None, "is too long", "abc")),
    "UntabularError": lambda kind: kind(("a", "[]"), "is mixed"),
}


@pytest.mark.parametrize("kind", sorted(list_subclasses(BatchloomError), key=lambda kind: kind.__name__))
def test_every_error_survives_the_way_between_processes(kind):
    assert batchloom.preparation.prepare  # loads the modules of all errors that a worker can raise
    make_error = EXAMPLES.get(kind.__name__, lambda kind: kind("what, how much, what to do"))
    error = make_error() if isinstance(make_error, partial) else make_error(kind)
    restored = restore_error(pickle.loads(encode_failure(0, error)))
    assert type(restored) is type(error) is kind
    assert (str(restored), vars(restored)) == (str(error), vars(error))


def test_a_foreign_error_carries_its_traceback():
    try:
        {}["absent"]
    except KeyError as error:
        restored = restore_error(pickle.loads(encode_failure(0, error)))
    assert (type(restored), restored.args) == (KeyError, ("absent",))
    assert __file__ in restored.__notes__[0]


def test_an_error_that_cannot_be_pickled_is_reported_with_its_traceback():
    restored = restore_error(TaskFailure(0, None, "Traceback: this and that"))
    assert isinstance(restored, WorkerError)
    assert "this and that" in str(restored)
