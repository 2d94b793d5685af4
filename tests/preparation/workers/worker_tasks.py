"""Setups and orders for tests of crews: module level, so that worker processes can import them."""

import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchloom.core.errors import RecordError


class Awkward(Exception):
    """Cannot be made again from its pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def _sleep_without_gil(seconds):
    ctypes.CDLL(None).sleep(int(seconds))  # ctypes lets go of the interpreter


def do(order: Any, tell) -> Any:
    """One order: a tuple of what to do and with what."""
    kind, value = order
    match kind:
        case "square":
            return value * value
        case "pid":
            return os.getpid()
        case "tell":
            for one in range(value):
                tell(one)
            return "told"
        case "tell then die":
            for one in range(3):
                tell(one)
            os.kill(os.getpid(), value)
        case "exit":
            os._exit(value)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise value
        case "awkward":
            raise Awkward("this", "that")
        case "bad record":
            raise RecordError("d.jsonl", 5, 17, "unexpected end")
        case "hold":
            held = bytearray(value)
            tell(len(held))
            time.sleep(60)
        case "no memory":
            raise MemoryError
        case "bytes":
            return b"x" * value
        case "lambda":
            return lambda: None
        case "sleep":
            tell("begun")
            time.sleep(value)
            return "slept"
        case "sleep in C":
            tell(os.getpid())
            _sleep_without_gil(value)
        case "write":
            return _write(Path(value), tell)
        case "flaky":
            time.sleep(0.005)
            tell(value)
            return value * 3
        case "once":
            return _once(Path(value))
        case "print":
            print(value)
            return "printed"
        case "environment":
            return os.environ.get(value)
    return None


def _write(path, tell):
    with path.open("a") as file:
        told = False
        while True:
            file.write("x")
            file.flush()
            if not told:  # of a file that is there, whoever kills it now
                tell(os.getpid())
                told = True
            time.sleep(0.01)


def _once(path):
    """Dies the first time."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second time"


def setup():
    return do


@dataclass
class Noted:
    """A setup that notes where it was made."""

    path: Path

    def __call__(self):
        with self.path.open("a") as file:
            file.write(json.dumps(os.getpid()) + "\n")
        return do


def failing_setup():
    raise RecordError("d.jsonl", 5, 17, "the setup does not like it")


def dying_setup():
    os._exit(7)


def greedy_setup():
    held = bytearray(120 << 20)
    time.sleep(5)
    return held and do


def slow_setup():
    time.sleep(0.1)
    return do
