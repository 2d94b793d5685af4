"""Examples in processes that are forked from a warm interpreter."""

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchloom.analysis.compare import read_record
from batchloom.analysis.compare.frameworks import WitnessRecord, find_framework, import_example, run_example_process
from processes import run_ranks

MODULE = "batchloom.analysis.compare.frameworks"
_SECONDS = "250"


def run_warm(name: str, job: Mapping[str, Any], record: Path, processes: int = 1) -> WitnessRecord:
    """Run an example like ``run_example``, without a launcher."""
    record.mkdir()
    Path(job["out"]).mkdir(exist_ok=True)
    # Without workers Ray trains in the calling process.
    settings = {**job, "workers": 0} if name == "ray-train" else job
    _run(MODULE, name, record, json.dumps(settings), _SECONDS, ranks=processes)
    return read_record(record)


def run_warm_in_turn(name: str, jobs: Sequence[Mapping[str, Any]], folder: Path) -> list[WitnessRecord]:
    """Run an example once per job, each in a process of its own; its framework is imported once for all."""
    records = [folder / str(number) for number in range(len(jobs))]
    for record, job in zip(records, jobs, strict=True):
        record.mkdir()
        Path(job["out"]).mkdir(exist_ok=True)
    words = [word for record, job in zip(records, jobs, strict=True) for word in (record, json.dumps(job))]
    _run("analysis.compare.warm_examples", name, *words, ranks=1)
    return [read_record(record) for record in records]


def _run(module: str, *words: object, ranks: int) -> None:
    failed = [result.stderr[-4000:] for result in run_ranks("-m", module, *words, ranks=ranks) if result.returncode]
    assert not failed, "\n".join(failed)


def main(name: str, *words: str) -> None:
    """Import the framework of an example; run the example in a forked process per pair of a record and a job."""
    # DeepSpeed reads it on import. The example imports DeepSpeed later, after the same line.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import_example(find_framework(name))
    if name == "deepspeed":
        importlib.import_module(name)
    # Its thread does not exist in a forked process, which would wait for it when it sets a time of its own.
    faulthandler.cancel_dump_traceback_later()
    for record, job in zip(words[::2], words[1::2], strict=True):
        if not (pid := os.fork()):
            code = 1
            with contextlib.suppress(BaseException):
                code = _run_here(name, record, job)
            os._exit(code)
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)


def _run_here(name: str, record: str, job: str) -> int:
    try:
        run_example_process(name, record, job, _SECONDS)
    except BaseException:  # noqa: BLE001 - also an exit is a failure, whose cause the test prints
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
