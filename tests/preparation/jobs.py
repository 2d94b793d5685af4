"""Jobs as plain values, here or in a process that can be killed, and workers that die of a document."""

import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from batchloom import BatchloomError
from batchloom.preparation import ExecutionSettings, Note, RunSettings, run_recipe
from batchloom.preparation.phases import WorkerSetup, phase_runner as making
from batchloom.preparation.phases.worker_setup import make_task_function
from preparation.stores import SMALL, recipe_of

REFUSED = 7


@dataclass(frozen=True)
class Mortal:
    """A setup whose workers die of documents that hold a mark.

    Attributes:
        worker_setup: makes what would be done.
        mark: the text they die of; empty for any.
        step: where: ``clean``, ``encode``, ``begin`` (before a document is read) or ``make`` (at their first order).
        once: a file that is made by the first who dies, and spares all others; empty for none.
    """

    worker_setup: WorkerSetup
    mark: str
    step: str
    once: str

    def __call__(self):
        task = self.worker_setup.load_context()
        if self.step == "make":
            return make_task_function(lambda: self.look(["any"]) or task)
        if self.step == "begin":
            return make_task_function(lambda: replace(task, bounds=_Bounds(self)))
        if self.step == "clean":
            return make_task_function(lambda: replace(task, cleaner=_Steps(task.cleaner, self)))
        return make_task_function(lambda: replace(task, tokenizer=_Words(task.tokenizer, self)))

    def make_context(self, *parts):
        return self.worker_setup.make_context(*parts)

    def look(self, texts):
        if not any(self.mark in text for text in texts):
            return
        if self.once:
            try:
                Path(self.once).touch(exist_ok=False)
            except FileExistsError:
                return
        os.kill(os.getpid(), signal.SIGKILL)


class _Bounds:
    def __init__(self, mortal):
        self._mortal = mortal

    def tell(self, cuts):
        self._mortal.look(["any"])


class _Words:
    def __init__(self, inner, mortal):
        self._inner, self._mortal = inner, mortal

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def encode_batch(self, texts, *, control=False):
        self._mortal.look(texts)
        return self._inner.encode_batch(texts, control=control)


class _Steps:
    def __init__(self, inner, mortal):
        self._inner, self._mortal, self.steps = inner, mortal, inner.steps

    def clean(self, texts):
        self._mortal.look(texts)
        return self._inner.clean(texts)


def job(inputs, out, *, execution=None, how=None, unit_bytes=6000, limits=None, mortal=None, **settings):
    """What ``main`` takes: a job as plain values."""
    return {
        "inputs": [str(path) for path in inputs],
        "out": str(out),
        "execution": execution or {},
        "how": how or {},
        "unit_bytes": unit_bytes,
        "limits": limits,
        "mortal": mortal,
        "settings": {"tokenizer": "bytes", **settings},
    }


def run_job(told):
    """Carry out a job in this process: what came of it, as ``end`` returns it."""
    notes = []
    with pytest.MonkeyPatch.context() as patch:
        if told["mortal"]:
            patch.setattr(
                making,
                "WorkerSetup",
                lambda *args, **settings: Mortal(WorkerSetup(*args, **settings), **told["mortal"]),
            )
        try:
            result = run_recipe(
                recipe_of(inputs=tuple(told["inputs"]), **told["settings"]),
                Path(told["out"]),
                lambda event: notes.append(event.text) if isinstance(event, Note) else None,
                settings=RunSettings(
                    limits=SMALL,
                    unit_bytes=told["unit_bytes"],
                    execution=ExecutionSettings(**told["execution"]),
                    **told["how"],
                ),
            )
        except BatchloomError as error:
            return {"error": str(error), "notes": notes}
    return {"resumed": result.resumed_units, "notes": notes}


def main():
    """Carry out the job on standard input; says ``begun``, then what came of it."""
    told = json.load(sys.stdin)
    if told["limits"]:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (told["limits"], resource.RLIM_INFINITY))
    print("begun", flush=True)
    try:
        done = run_job(told)
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(done))
    sys.exit(REFUSED if "error" in done else 0)


def start(told, before=()):
    """A process that carries out a job; it has begun. ``before``: what runs it."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *(one for one in sys.path if one)])
    process = subprocess.Popen(
        [*before, sys.executable, "-c", "from preparation.jobs import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Else what is read ahead of a line would be lost to whoever reads the rest.
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    )
    process.stdin.write(json.dumps(told).encode())
    process.stdin.close()
    process.stdin = None
    assert process.stdout.readline() == b"begun\n", process.stderr.read()
    return process


def end(process, seconds=300):
    """What a job said at its end; None where it was killed."""
    out, err = process.communicate(timeout=seconds)
    if process.returncode < 0:
        return None
    assert process.returncode in (0, REFUSED), err.decode()
    # Ray, too, has its say on standard output.
    return json.loads(out.splitlines()[-1])


def killed_at(events, count, work):
    """Do something in a forked process that is killed at the count-th of these audit events; whether it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside sleeping threads
        child = os.fork()
    if not child:
        seen = 0

        def hook(name, _):
            nonlocal seen
            if name in events:
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
