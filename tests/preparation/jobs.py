"""Jobs as plain values, run here or in a killable process, and crashing workers."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from batchloom import BatchloomError
from batchloom.preparation import ExecutionSettings, Note, RunSettings, run_recipe
from batchloom.preparation.phases import WorkerSetup, sample_phase
from batchloom.preparation.phases.worker_setup import make_task_function
from preparation.stores import SMALL_LIMITS, make_recipe

REFUSED = 7


@dataclass(frozen=True)
class CrashingSetup:
    """Setup whose workers kill themselves at documents that contain a mark.

    Attributes:
        worker_setup: setup of the actual work.
        mark: text that kills a worker; empty for every text.
        step: ``clean``, ``encode``, ``begin`` (before a document is read) or ``make`` (at the first task).
        once_file: file that the first crash creates, and that prevents all others; empty for none.
    """

    worker_setup: WorkerSetup
    mark: str
    step: str
    once_file: str

    def __call__(self):
        context = self.worker_setup.load_context()
        if self.step == "make":
            run_task = make_task_function(context)
            return lambda task, send_message: self.crash_if_marked(["any"]) or run_task(task, send_message)
        if self.step == "begin":
            return make_task_function(replace(context, bounds=_CrashingBounds(self)))
        if self.step == "clean":
            return make_task_function(replace(context, cleaner=_CrashingCleaner(context.cleaner, self)))
        tokenizer = _CrashingTokenizer(context.encoder.tokenizer, self)
        return make_task_function(replace(context, encoder=replace(context.encoder, tokenizer=tokenizer)))

    def make_context(self, *parts):
        return self.worker_setup.make_context(*parts)

    def crash_if_marked(self, texts):
        if not any(self.mark in text for text in texts):
            return
        if self.once_file:
            try:
                Path(self.once_file).touch(exist_ok=False)
            except FileExistsError:
                return
        os.kill(os.getpid(), signal.SIGKILL)


class _CrashingBounds:
    def __init__(self, setup):
        self._setup = setup

    def find_bound(self, source, nominal):
        self._setup.crash_if_marked(["any"])


class _CrashingTokenizer:
    def __init__(self, inner, setup):
        self._inner, self._setup = inner, setup

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def encode_batch(self, texts, *, control=False):
        self._setup.crash_if_marked(texts)
        return self._inner.encode_batch(texts, control=control)


class _CrashingCleaner:
    def __init__(self, inner, setup):
        self._inner, self._setup, self.steps = inner, setup, inner.steps

    def clean(self, texts):
        self._setup.crash_if_marked(texts)
        return self._inner.clean(texts)


def make_job(inputs, out, *, execution=None, run_settings=None, unit_bytes=6000, limits=None, crash=None, **settings):
    """Make a job of plain values, as ``main`` reads it."""
    return {
        "inputs": [str(path) for path in inputs],
        "out": str(out),
        "execution": execution or {},
        "run_settings": run_settings or {},
        "unit_bytes": unit_bytes,
        "limits": limits,
        "crash": crash,
        "settings": {"tokenizer": "bytes", **settings},
    }


def run_job(job):
    """Run a job in this process and return its report, as ``wait_for_job`` does."""
    notes = []
    with _crash_workers(job["crash"]) if job["crash"] else nullcontext():
        try:
            result = run_recipe(
                make_recipe(inputs=tuple(job["inputs"]), **job["settings"]),
                Path(job["out"]),
                lambda event: notes.append(event.text) if isinstance(event, Note) else None,
                settings=RunSettings(
                    limits=SMALL_LIMITS,
                    unit_bytes=job["unit_bytes"],
                    execution=ExecutionSettings(**{"workers": 1, **job["execution"]}),
                    **job["run_settings"],
                ),
            )
        except BatchloomError as error:
            return {"error": str(error), "notes": notes}
    return {"resumed": result.resumed_units, "notes": notes}


@contextmanager
def _crash_workers(crash) -> Iterator[None]:
    # Processes of jobs import this module, and pytest would take a quarter of their start.
    sample_phase.WorkerSetup = lambda *args, **settings: CrashingSetup(WorkerSetup(*args, **settings), **crash)
    try:
        yield
    finally:
        sample_phase.WorkerSetup = WorkerSetup


def main():
    """Run the job on standard input; print ``begun``, then its report."""
    job = json.load(sys.stdin)
    if job["limits"]:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limits"], resource.RLIM_INFINITY))
    print("begun", flush=True)
    try:
        report = run_job(job)
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(report))
    sys.exit(REFUSED if "error" in report else 0)


def start_job(job, prefix=()):
    """Start a process that runs a job, its command after ``prefix``; wait for begin."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *(entry for entry in sys.path if entry)])
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", "from preparation.jobs import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # With a buffer, bytes read ahead of the first line would be missing from the later output.
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    )
    process.stdin.write(json.dumps(job).encode())
    process.stdin.close()
    process.stdin = None
    assert process.stdout.readline() == b"begun\n", process.stderr.read()
    return process


def wait_for_job(process, seconds=300):
    """Wait for a job and return its report; None if it was killed."""
    out, err = process.communicate(timeout=seconds)
    if process.returncode < 0:
        return None
    assert process.returncode in (0, REFUSED), err.decode()
    # Ray also writes to standard output.
    return json.loads(out.splitlines()[-1])


def run_until_killed(events, count, function):
    """Run a function in a fork killed at the count-th audit event; return whether."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork while other threads sleep
        child = os.fork()
    if not child:
        count_seen = 0

        def hook(name, _):
            nonlocal count_seen
            if name in events:
                count_seen += 1
                if count_seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            function()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
