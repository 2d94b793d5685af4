"""The suite itself: its budget, its search for examples, and the check that nothing outlives a test."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from explore import make_pinned_examples
from index import INDEX, make_index
from leaks import find_leftovers, list_things
from record import find_budget, find_excess, list_slowest

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes and sockets in /proc")


@pytest.mark.parametrize(("seconds", "speed", "fits"), [(300, 1, True), (301, 1, False), (500, 0.5, True)])
def test_a_run_fits_the_budget_at_the_speed_of_the_machine(seconds, speed, fits):
    message = find_excess(seconds, speed, budget=300)
    assert (message is None) is fits
    if message is not None:
        assert "301 s of processor time" in message


def test_the_budget_is_named_in_the_readme():
    assert find_budget(Path(__file__).with_name("README.md").read_text()) > 0
    with pytest.raises(ValueError, match="names no budget"):
        find_budget("The budget is generous.")


def test_the_index_of_tests_is_that_of_their_imports():
    assert INDEX.read_text() == make_index(), "write it anew: python tests/index.py"


def test_the_slowest_files_are_listed():
    assert list_slowest({"a.py": 1, "b.py": 12.34}) == ["   12.3 s  b.py", "    1.0 s  a.py"]


REPORT = """
E   Failing test case: test_sizes(
E       tmp_path=PosixPath('/tmp/x'),
E       patch=<pytest.MonkeyPatch object at 0x7f>,
E       sizes=[1,
E        2],
E       name='a, b=',
E   )
E   Failing test case: test_sizes(
E       sizes=[],
E       name='',
E   )
"""


def test_failing_examples_are_printed_to_be_pinned():
    assert make_pinned_examples(REPORT) == [
        "@example(sizes=[1, 2], name='a, b=')  # test_sizes",
        "@example(sizes=[], name='')  # test_sizes",
    ]


def start_thread():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="late")
    thread.start()
    return lambda: (event.set(), thread.join())


def start_process():
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process.communicate


def connect_socket():
    import socket

    server = socket.socket()
    return server.close


def set_signal_handler():
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, previous)


def set_variable():
    os.environ["LATE"] = "1"
    return lambda: os.environ.pop("LATE")


def remove_variable():
    value = os.environ.pop("PATH")
    return lambda: os.environ.update(PATH=value)


def add_log_handler():
    handler = logging.StreamHandler()
    logging.getLogger("batchloom").addHandler(handler)
    return lambda: logging.getLogger("batchloom").removeHandler(handler)


def set_log_level():
    logging.getLogger("batchloom").setLevel(logging.DEBUG)
    return lambda: logging.getLogger("batchloom").setLevel(logging.NOTSET)


def change_folder():
    previous = os.getcwd()
    os.chdir("/")
    return lambda: os.chdir(previous)


def make_temporary_file():
    path = Path(tempfile.mkstemp(suffix=".late")[1])
    return path.unlink


@pytest.mark.parametrize(
    ("leave", "kind", "description"),
    [
        (start_thread, "thread", "late"),
        pytest.param(start_process, "process", "input()", marks=needs_proc),
        pytest.param(connect_socket, "socket", "descriptor", marks=needs_proc),
        (set_signal_handler, "signal handler", "SIGUSR1"),
        (set_variable, "variable", "LATE=1"),
        (remove_variable, "variable", "PATH is missing"),
        (add_log_handler, "log handler", "of batchloom"),
        (set_log_level, "log level", "batchloom=DEBUG"),
        (change_folder, "working directory", "/"),
        (make_temporary_file, "temporary file", ".late"),
    ],
)
def test_what_a_test_leaves_behind_is_found(leave, kind, description):
    before = list_things()
    remove = leave()
    try:
        leftovers = find_leftovers(before)
    finally:
        remove()
    assert [found for found, _ in leftovers] == [kind]
    assert description in leftovers[0][1]
    assert find_leftovers(before) == []
