"""Nothing outlives its test: what a test leaves behind changes the result of another one, by chance.

A fixture lists threads, child processes, sockets, signal handlers, environment variables, log handlers, temporary files
and the working directory before and after each test. What fixtures of a module or session hold existed before.
"""

import gc
import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import psutil
import pytest
from fsspec.asyn import get_loop

# What may stay, by kind and start of the description, with the reason.
JUSTIFIED = {
    ("process", "multiprocessing.forkserver"): "The server of processes.py serves all tests of a session.",
    ("process", "multiprocessing.resource_tracker"): "Python starts it once per process, for shared memory.",
    ("process", "batchloom.sources.formats.table_probe"): "It opens all tables of this process, and ends with it.",
    ("process", "raylet"): "A test may add a node to the Ray cluster of its module.",
    ("signal handler", "SIGTERM: <function Node."): "Ray sets it with each node.",
    ("signal handler", "SIGCHLD"): "torch sets it when a DataLoader has its first workers.",
    ("temporary file", "pymp-"): "Python keeps the socket of the fork server in it.",
    ("temporary file", "ray"): "Ray keeps the logs of its sessions.",
    ("temporary file", "torchelastic_"): "torchrun keeps the error files of its processes.",
    ("temporary file", "torchinductor_"): "torch makes it when its compiler is imported.",
    ("thread", "tqdm_monitor"): "tqdm starts it with its first progress bar, and it never ends.",
    ("thread", "AnyIO worker thread"): "A server of pages, which serves several tests, keeps its pool.",
    ("thread", "asyncio_"): "Pool of the event loop in which fsspec runs all requests; it never ends.",
    ("variable", "FASTOKENS_BPE_THREADS"): "fastokens reads it late; batchloom sets it once, and processes inherit it.",
    ("variable", "PYTORCH_NVML_BASED_CUDA_CHECK"): "Frameworks set it when they are imported.",
    ("variable", "TORCHINDUCTOR_CACHE_DIR"): "torch sets it when its compiler is imported.",
}

# pytest-timeout sets and resets the handler of SIGALRM.
_SIGNALS = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM}
# Generous: another process may have the processor.
_LIMIT_S = 30.0
_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5
_OLDEST_GENERATION = 2

# Libraries configure their own loggers when they are imported. These two carry messages of batchloom.
_LOGGERS = (logging.root, logging.getLogger("batchloom"))

# Things of one kind that exist, each with its description.
Things = dict[Hashable, str]


@pytest.fixture(autouse=True)
def nothing_outlives_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind."""
    before = list_things()
    yield
    leftovers = find_leftovers(before)
    if leftovers:
        # pytest holds the values of all fixtures, though this one is the last that is torn down.
        request.node.funcargs.clear()
        _close_connections()
    deadline = time.monotonic() + _LIMIT_S
    # First wait for threads that are about to end. Then a reference cycle may hold a loader, a client or an open file;
    # and a thread that ends, another cycle. Most are young, and a collection of all objects takes long.
    generation = -1
    pause = _PAUSE_S
    while leftovers and any(kind in _ENDING for kind, _ in leftovers) and time.monotonic() < deadline:
        if generation >= 0:
            gc.collect(generation)
        time.sleep(pause)
        leftovers = find_leftovers(before)
        pause = min(2 * pause, _MAX_PAUSE_S) if generation == _OLDEST_GENERATION else pause
        generation = min(generation + 1, _OLDEST_GENERATION)
    assert not leftovers, "left behind: " + "; ".join(f"{kind} {description}" for kind, description in leftovers)


def list_things() -> dict[str, Things]:
    """List what exists, by kind."""
    return {kind: list_kind() for kind, list_kind in _KINDS.items()}


def find_leftovers(before: dict[str, Things]) -> list[tuple[str, str]]:
    """Return kind and description of what exists now and did not before, or is changed, and is not justified."""
    leftovers = []
    for kind, things in list_things().items():
        if things.keys() != before[kind].keys():
            leftovers += [(kind, description) for key, description in things.items() if key not in before[kind]]
            if kind == "variable":
                missing = {key[0] for key in before[kind]} - {key[0] for key in things}
                leftovers += [(kind, f"{name} is missing") for name in missing]
    if any(kind == "socket" for kind, _ in leftovers):
        accepted = _list_accepted_sockets()
        leftovers = [leftover for leftover in leftovers if leftover not in accepted]
    justified = [leftover for leftover in leftovers if _is_justified(*leftover)]
    # Python and batchloom speak to their own processes through a socket each.
    pipes = sum(kind == "process" for kind, _ in justified)
    sockets = [leftover for leftover in leftovers if leftover[0] == "socket"]
    return [leftover for leftover in leftovers if leftover not in [*justified, *sockets[:pipes]]]


def _is_justified(kind: str, description: str) -> bool:
    return any(kind == justified and description.startswith(start) for justified, start in JUSTIFIED)


def _close_connections() -> None:
    """Close connections that fsspec keeps for the next user of the same address."""
    if spec := sys.modules.get("fsspec.spec"):
        classes = [spec.AbstractFileSystem]
        while classes:
            classes += classes[0].__subclasses__()
            classes.pop(0).clear_instance_cache()


def _list_threads() -> Things:
    return {thread: thread.name for thread in threading.enumerate()}


def _list_processes() -> Things:
    processes: Things = {}
    for thread in os.listdir("/proc/self/task"):
        for number in _read_proc(f"self/task/{thread}/children").split():
            command = _read_proc(f"{number}/cmdline").replace("\0", " ")
            module = next((start for kind, start in JUSTIFIED if kind == "process" and start in command), "")
            processes[number] = f"{module} {number} {command[:200]}".strip()
    return processes


def _read_proc(path: str) -> str:
    """Return a file of /proc; empty if its process or thread has just ended."""
    try:
        return Path("/proc", path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _list_sockets() -> Things:
    sockets: Things = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            sockets[target] = f"descriptor {descriptor}"
    return sockets


def _list_accepted_sockets() -> set[tuple[str, str]]:
    """Return the connections to servers of this process: they belong to the server, which serves several tests."""
    connections = psutil.Process().net_connections("inet")
    ports = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return {
        ("socket", f"descriptor {connection.fd}")
        for connection in connections
        if connection.status != psutil.CONN_LISTEN and connection.laddr.port in ports
    }


def _list_signal_handlers() -> Things:
    handlers = ((number, signal.getsignal(number)) for number in _SIGNALS)
    return {(number, handler): f"{number.name}: {handler}" for number, handler in handlers}


def _list_variables() -> Things:
    # pytest changes its own between the phases of a test.
    items = [item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST"]
    return {(name, value): f"{name}={value}" for name, value in items}


def _list_log_handlers() -> Things:
    return {
        (logger.name, id(handler)): f"{handler} of {logger.name}"
        for logger in _LOGGERS
        for handler in logger.handlers
        # pytest changes its own between the phases of a test.
        if not type(handler).__module__.startswith("_pytest")
    }


def _list_log_levels() -> Things:
    return {(logger.name, logger.level): f"{logger.name}={logging.getLevelName(logger.level)}" for logger in _LOGGERS}


def _list_working_directory() -> Things:
    return {os.getcwd(): os.getcwd()}


def _list_temporary_files() -> Things:
    return {name: name for name in os.listdir(tempfile.gettempdir())}


_KINDS: dict[str, Callable[[], Things]] = {
    "thread": _list_threads,
    "signal handler": _list_signal_handlers,
    "variable": _list_variables,
    "log handler": _list_log_handlers,
    "log level": _list_log_levels,
    "working directory": _list_working_directory,
    "temporary file": _list_temporary_files,
}
if sys.platform == "linux":
    _KINDS |= {"process": _list_processes, "socket": _list_sockets}
# Kinds that end a little later, with a thread that holds the last reference.
_ENDING = ("thread", "process", "socket", "temporary file")


def pytest_configure(config: pytest.Config) -> None:
    """Give a process that runs tests a folder of its own for temporary files."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    # pytest's own folder stays where it is: it keeps the files of failed tests.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="batchloom-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing has removed its own folder in it, which it does with priority -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-200)
    # The event loop of fsspec runs in a thread that never ends: start it before all tests.
    get_loop()
