"""Processes forked from a warm interpreter: torch is imported once per session.

A separate Python process spends five to ten seconds on imports if it needs torch and transformers.
``run_module``, ``run_ranks`` and ``start_processes`` fork from a server that has imported them and
nothing else, so that a process starts in milliseconds with an interpreter no test has used.
"""

import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["warm_modules"])
_HERE = str(Path(__file__).parent)
_TIMEOUT_S = 300.0
_STACKS_AFTER_S = 240.0


@dataclass(frozen=True)
class ProcessResult:
    """Exit code and printed text of a process."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class RunningProcess:
    """A process that may still run, and the files of its output."""

    process: ForkServerProcess
    out: Path
    err: Path

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def wait(self) -> ProcessResult:
        """Wait for the process to end."""
        self.process.join(_TIMEOUT_S)
        assert not self.process.is_alive(), self.describe_hang()
        return ProcessResult(self.process.exitcode, self.out.read_text(), self.err.read_text())

    def describe_hang(self) -> str:
        """Report that the process did not end, with the stacks of its threads."""
        return f"a process did not end within {_TIMEOUT_S:.0f} s:\n{self.err.read_text()[-8000:]}"


def run_module(module: str, *words: object, env: dict[str, str] | None = None) -> ProcessResult:
    """Run ``python -m module words...`` in a separate process."""
    with start_processes("-m", module, *words, environments=[env or {}]) as (one,):
        return one.wait()


def run_ranks(*command: object, ranks: int = 2) -> list[ProcessResult]:
    """Run a script, or ``-m`` and a module, on several ranks, as torchrun does.

    ``command`` is the path of the script, or ``"-m"`` and the module, then its arguments.
    """
    with start_processes(*command, environments=rank_environments(ranks)) as processes:
        _join(processes)
        return [one.wait() for one in processes]


def run_two_ranks(*command: object) -> str:
    """Run two ranks that must succeed; return their output."""
    done = run_ranks(*command)
    failed = [one.stderr[-4000:] for one in done if one.returncode]
    assert not failed, "\n".join(failed)
    return "".join(one.stdout for one in done)


def rank_environments(ranks: int = 2) -> list[dict[str, str]]:
    """Return per rank the environment variables of torch.distributed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    return [{**place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@contextmanager
def start_processes(*command: object, environments: Sequence[dict[str, str]] = ({},)) -> Iterator[list[RunningProcess]]:
    """Start a process per environment; kill all at the end of the block.

    ``command`` is as for ``run_ranks``. ``environments`` holds variables to add to the current environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        # The server finds the modules to import through PYTHONPATH only.
        patch.setenv("PYTHONPATH", _HERE, prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    words, place = list(map(str, command)), (sys.path, os.getcwd())
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number, env in enumerate(environments):
            output = Path(folder, f"{number}.out"), Path(folder, f"{number}.err")
            for file in output:
                file.touch()
            given = (words, {**os.environ, **env}, *place, *output)
            processes.append(RunningProcess(_CONTEXT.Process(target=_main, args=given), *output))
        try:
            for one in processes:
                one.process.start()
            yield processes
        finally:
            for one in processes:
                if one.process.pid is not None:
                    one.process.kill()
                    one.process.join()


def _join(running: list[RunningProcess]) -> None:
    """Wait for all ranks; if one fails, terminate the others, as torchrun does."""
    processes = [one.process for one in running]
    waiting = list(processes)
    while waiting:
        ready = multiprocessing.connection.wait([one.sentinel for one in waiting], _TIMEOUT_S)
        assert ready, "\n".join(one.describe_hang() for one in running if one.process.is_alive())
        waiting = [one for one in waiting if one.sentinel not in ready]
        if any(one.exitcode for one in processes):
            for one in waiting:
                one.terminate()
            for one in waiting:
                one.join(10)
                one.kill()
            return


def _main(words: list[str], environment: dict[str, str], path: list[str], cwd: str, out: Path, err: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = path
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.dump_traceback_later(_STACKS_AFTER_S)
    sys.argv = words[1:] if words[0] == "-m" else words
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
