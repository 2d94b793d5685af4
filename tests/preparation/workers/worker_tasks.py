"""Setups and tasks for tests of executors, importable by worker processes."""

import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchloom.core.errors import RecordError
from waiting import wait_until


class UnpicklableError(Exception):
    """Error that cannot be restored from its pickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def _sleep_without_gil(seconds):
    ctypes.CDLL(None).sleep(int(seconds))  # ctypes releases the GIL


def run_task(task: Any, send) -> Any:
    """Run one task: a tuple of a kind and a value."""
    kind, value = task
    match kind:
        case "square":
            return value * value
        case "pid":
            return os.getpid()
        case "tell":
            for number in range(value):
                send(number)
            return "told"
        case "tell then die":
            for number in range(3):
                send(number)
            os.kill(os.getpid(), value)
        case "exit":
            os._exit(value)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise value
        case "awkward":
            raise UnpicklableError("this", "that")
        case "bad record":
            raise RecordError("d.jsonl", 5, 17, "unexpected end")
        case "hold":
            buffer = bytearray(value)
            send(len(buffer))
            time.sleep(60)
        case "no memory":
            raise MemoryError
        case "bytes":
            return b"x" * value
        case "lambda":
            return lambda: None
        case "sleep":
            send("begun")
            time.sleep(value)
            return "slept"
        case "wait":
            send("begun")
            wait_until(Path(value).exists, f"file {value}")
            return "waited"
        case "sleep in C":
            send(os.getpid())
            _sleep_without_gil(value)
        case "write":
            return _write(Path(value), send)
        case "flaky":
            time.sleep(0.005)
            send(value)
            return value * 3
        case "once":
            return _die_once(Path(value))
        case "print":
            print(value)
            return "printed"
        case "environment":
            return os.environ.get(value)
    return None


def _write(path, send):
    with path.open("a") as file:
        sent = False
        while True:
            file.write("x")
            file.flush()
            if not sent:  # after the first write, so that the file exists when the test kills this process
                send(os.getpid())
                sent = True
            time.sleep(0.01)


def _die_once(path):
    """Kill this process at the first call."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second time"


def setup():
    return run_task


@dataclass
class RecordingSetup:
    """Setup that records the processes that call it."""

    path: Path

    def __call__(self):
        with self.path.open("a") as file:
            file.write(json.dumps(os.getpid()) + "\n")
        return run_task


def failing_setup():
    raise RecordError("d.jsonl", 5, 17, "the setup does not like it")


def dying_setup():
    os._exit(7)


def greedy_setup():
    buffer = bytearray(120 << 20)
    time.sleep(5)
    return buffer and run_task


def set_environment():
    os.environ["CALLED"] = "before the fork"


def slow_setup():
    time.sleep(0.1)
    return run_task
