"""Processes forked from a warm interpreter: torch is imported once per session.

A separate Python process that needs torch and transformers imports them for five to ten seconds.
``run_module``, ``run_ranks`` and ``start_processes`` fork from a server that has imported them. A
process then starts in milliseconds, and no test has used its interpreter before.
"""

import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["warm_modules"])
_TESTS_FOLDER = str(Path(__file__).parent)
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
    with start_processes("-m", module, *words, environments=[env or {}]) as (process,):
        return process.wait()


def run_python(
    code: str, *words: object, missing: Sequence[str] = (), env: dict[str, str] | None = None
) -> ProcessResult:
    """Run Python code in a new process, in which some modules may be impossible to import.

    In this process, what fails to import could stay half imported, and later tests would meet it.
    """
    prelude = f"import sys; sys.modules |= dict.fromkeys({list(missing)!r})\n" if missing else ""
    command = [sys.executable, "-c", prelude + code, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return ProcessResult(done.returncode, done.stdout, done.stderr)


def run_ranks(*command: object, ranks: int = 2) -> list[ProcessResult]:
    """Run a script, or ``-m`` and a module, on several ranks, as torchrun does.

    ``command`` is the path of the script, or ``"-m"`` and the module, then its arguments.
    """
    with start_processes(*command, environments=make_rank_environments(ranks)) as processes:
        _join(processes)
        return [process.wait() for process in processes]


def run_two_ranks(*command: object) -> str:
    """Run two ranks that must succeed; return their output."""
    results = run_ranks(*command)
    failed = [result.stderr[-4000:] for result in results if result.returncode]
    assert not failed, "\n".join(failed)
    return "".join(result.stdout for result in results)


def make_rank_environments(ranks: int = 2) -> list[dict[str, str]]:
    """Return per rank the environment variables of torch.distributed."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    return [{**address, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def have_ended(pids: Sequence[int], seconds: float = 2.0) -> bool:
    """Return whether processes end (or become zombies) within some seconds."""
    deadline = time.monotonic() + seconds
    while any(map(_is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_free_port() -> int:
    """Find a port that a process can listen on a little later.

    It is below the range from which the kernel takes the ports of connections, and above Ray's. The kernel could
    give one of its range to another connection in between.
    """
    while True:
        # The random module has the same seed in all processes of pytest.
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@contextmanager
def start_processes(*command: object, environments: Sequence[dict[str, str]] = ({},)) -> Iterator[list[RunningProcess]]:
    """Start a process per environment; kill all at the end of the block.

    ``command`` is as for ``run_ranks``. ``environments`` holds variables to add to the current environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        # The server finds the modules to import through PYTHONPATH only.
        patch.setenv("PYTHONPATH", _TESTS_FOLDER, prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    words, location = list(map(str, command)), (sys.path, os.getcwd())
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number, env in enumerate(environments):
            output = Path(folder, f"{number}.out"), Path(folder, f"{number}.err")
            for file in output:
                file.touch()
            arguments = (words, {**os.environ, **env}, *location, *output)
            processes.append(RunningProcess(_CONTEXT.Process(target=_main, args=arguments), *output))
        try:
            for running in processes:
                running.process.start()
            yield processes
        finally:
            for running in processes:
                if running.process.pid is not None:
                    running.process.kill()
                    running.process.join()


def _join(running: list[RunningProcess]) -> None:
    """Wait for all ranks; if one fails, terminate the others, as torchrun does."""
    processes = [process.process for process in running]
    unfinished = list(processes)
    while unfinished:
        ended = multiprocessing.connection.wait([process.sentinel for process in unfinished], _TIMEOUT_S)
        assert ended, "\n".join(process.describe_hang() for process in running if process.process.is_alive())
        unfinished = [process for process in unfinished if process.sentinel not in ended]
        if any(process.exitcode for process in processes):
            for process in unfinished:
                process.terminate()
            for process in unfinished:
                process.join(10)
                process.kill()
            return


def _main(words: list[str], environment: dict[str, str], path: list[str], cwd: str, out: Path, err: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    # The server has looked up its own.
    tempfile.tempdir = None
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
