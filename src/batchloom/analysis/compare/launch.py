"""Launch of an example in separate processes, and its witness records."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from batchloom.analysis.compare.frameworks import find_framework
from batchloom.core.errors import TrainError

_MAX_OUTPUT_CHARACTERS = 3000


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """Records of the witnesses of a run.

    Attributes:
        first: first step of the run.
        ranks: step entries by rank, see ``witness.StepHash.to_entry``.
        losses: loss of each step from ``first`` on, nats per trained token over all ranks.
    """

    first: int
    ranks: list[list[dict[str, Any]]]
    losses: list[float]


def run_example(
    name: str, job: Mapping[str, Any], record: Path, *, processes: int = 1, seconds: float = 600
) -> WitnessRecord:
    """Run an example to its end and return its record.

    Args:
        name: name of the framework.
        job: settings of ``examples.job.Job``.
        record: folder for the records; existing content is deleted.
        processes: number of ranks.
        seconds: timeout in seconds, after which the example is killed.

    Raises:
        TrainError: it failed or timed out; includes the end of its output.
    """
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir(parents=True)
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    command = [sys.executable]
    job_settings = dict(job)
    if find_framework(name).started_by == "itself":
        job_settings["workers"] = processes
    elif processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [
        "-m",
        "batchloom.analysis.compare.example_process",
        name,
        str(record),
        json.dumps(job_settings),
    ]
    code, output_tail = _run_to_end(command, name, seconds)
    if code:
        raise TrainError(f"{name} ended with {code}. {_read_fault(record) or f'Its last output: {output_tail}'}")
    missing_ranks = [str(n) for n in range(processes) if not (record / f"rank_{n}.json").exists()]
    if missing_ranks:
        raise TrainError(
            f"{name} ended without a record of what was trained on rank {', '.join(missing_ranks)}: the process "
            f"exited (os._exit) before train(model, job) returned. Its last output: {output_tail}"
        )
    return read_record(record)


def _run_to_end(command: Sequence[str], name: str, seconds: float) -> tuple[int, str]:
    """Run a command and return its exit code and the end of its stderr.

    All of its processes are killed if it does not end normally.
    """
    with tempfile.TemporaryFile() as stderr_file:
        process = subprocess.Popen(  # noqa: S603 - the command is ours
            command, stdout=subprocess.DEVNULL, stderr=stderr_file, env=_make_environment()
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TrainError(
                f"{name} did not end within {seconds:.0f} s; its last output: {_read_output(stderr_file)}"
            ) from error
        finally:
            if process.poll() is None:
                _kill_process_group(process)
        return code, _read_output(stderr_file)


def _kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants.

    Killing only a launcher would leave its ranks running.
    """
    top = psutil.Process(process.pid)
    family = [*top.children(recursive=True), top]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _read_fault(record: Path) -> str:
    """Return the error of the first rank that failed; empty if none recorded one."""
    rank_records = (json.loads(file.read_text()) for file in sorted(record.glob("rank_*.json")))
    return next(
        (
            f"Rank {rank_record['rank']}: {rank_record['fault']}"
            for rank_record in rank_records
            if rank_record.get("fault")
        ),
        "",
    )


def _make_environment() -> dict[str, str]:
    """Return an environment with one thread per process and no network access.

    With one thread, floating-point sums are reproducible and the processes share the cores.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _read_output(stderr_file: BinaryIO) -> str:
    stderr_file.seek(max(0, stderr_file.seek(0, os.SEEK_END) - _MAX_OUTPUT_CHARACTERS))
    return stderr_file.read().decode(errors="replace").strip() or "nothing"


def read_record(record: Path) -> WitnessRecord:
    """Read the records of a finished run.

    Args:
        record: folder with ``rank_N.json`` of each rank.

    Raises:
        TrainError: the run recorded no step.
    """
    files = sorted(record.glob("rank_*.json"), key=lambda file: int(file.stem[5:]))
    rank_records = [json.loads(file.read_text()) for file in files]
    losses = [tuple(step_loss) for step_loss in rank_records[0]["losses"]]
    if not losses:
        raise TrainError(f"{record} records no step: the run made none.")
    return WitnessRecord(
        losses[0][0],
        [rank_record["steps"] for rank_record in rank_records],
        [loss for _, loss in losses],
    )
