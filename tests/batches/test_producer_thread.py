"""Items that are begun together and returned in order."""

import threading
import time

import pytest

from batchloom.batches.producer_thread import PendingItem, iter_in_order
from processes import run_python
from waiting import wait_until


class BuildError(RuntimeError):
    pass


class Work:
    """Recorder of begun, finished and dropped items.

    There are ``count`` items, and ``bad`` cannot be begun.
    """

    def __init__(self, count, bad=None):
        self.count, self.bad = count, bad
        self.begun, self.finished, self.dropped = [], [], []

    def begin(self, number):
        assert number == len(self.begun)
        self.begun.append(number)
        if number == self.bad:
            raise BuildError(number)
        if number >= self.count:
            return None
        return PendingItem(lambda: self.finished.append(number) or number, lambda: self.drop(number))

    def drop(self, number):
        self.dropped.append(number)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_all_come_in_order(ahead, together):
    work = Work(7)
    assert list(iter_in_order(work.begin, int, 0, ahead, together=together)) == list(range(7))
    assert work.finished == list(range(7))
    assert work.begun == list(range(8))
    assert not work.dropped


@pytest.mark.parametrize(("ahead", "together", "limit"), [(0, True, 1), (4, False, 1), (1, True, 1), (4, True, 4)])
def test_so_many_are_begun_together(ahead, together, limit):
    work, pending_counts = Work(40), []

    def begin(number):
        pending_counts.append(len(work.begun) - len(work.finished) + 1)
        return work.begin(number)

    for _ in iter_in_order(begin, int, 0, ahead, together=together):
        # The thread works only while the consumer does something else.
        time.sleep(0.001)
    assert max(pending_counts[:40]) == limit


@pytest.mark.parametrize("together", [False, True])
def test_no_more_are_made_than_an_edit_counts_with(together):
    work = Work(100)
    items = iter_in_order(work.begin, int, 0, 4, together=together)
    for number in range(20):
        assert next(items) == number
        time.sleep(0.005)
        # The next item and the ones that are made ahead.
        assert len(work.begun) <= number + 1 + 4
    items.close()


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_comes_behind_the_items_before_it(ahead):
    received, work = [], Work(9, bad=5)
    items = iter_in_order(work.begin, int, 0, ahead, together=True)
    with pytest.raises(BuildError, match="5"):
        while True:
            received.append(next(items))
    assert received == [0, 1, 2, 3, 4]
    assert work.begun == [0, 1, 2, 3, 4, 5]
    with pytest.raises(StopIteration):
        next(items)


def test_an_error_of_finishing_ends_those_behind_it():
    dropped, received = [], []

    def begin(number):
        def finish():
            if number == 2:
                raise BuildError(number)
            return number

        return PendingItem(finish, lambda: dropped.append(number))

    items = iter_in_order(begin, int, 0, 4, together=True)
    with pytest.raises(BuildError, match="2"):
        while True:
            received.append(next(items))
    assert received == [0, 1]
    wait_until(lambda: dropped == [3, 4, 5], "the items behind it are dropped")


def test_what_is_begun_is_dropped_by_who_leaves():
    work = Work(100)
    items = iter_in_order(work.begin, int, 0, 4, together=True)
    assert [next(items), next(items)] == [0, 1]
    items.close()
    wait_until(lambda: sorted(work.finished + work.dropped) == work.begun, "all items are finished or dropped")
    assert work.dropped
    # The thread ends shortly after it has dropped them.
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "batchloom-producer"], "the producer thread ends"
    )


LEAVING_CODE = """
import atexit, threading, time
# Handlers run in the reverse order of their registration: this one after those of batchloom.
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
from batchloom.batches.producer_thread import PendingItem, iter_in_order

class Source:
    def begin(self, number):
        return PendingItem(lambda: number)

    def __del__(self):
        time.sleep(0.2)
        print("released")

items = iter_in_order(Source().begin, str, 0, 3, together=False)
print(next(items))
del items
"""


def test_the_thread_ends_before_the_interpreter_with_all_that_it_holds():
    """Inside C++ code, a thread that the interpreter stops aborts the process."""
    result = run_python(LEAVING_CODE)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\nreleased\n['MainThread']\n", "")
