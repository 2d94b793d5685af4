"""The frameworks that can be compared, and runs of their examples in processes."""

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, BinaryIO

import xxhash

from batchloom.adapters.requirements import (
    ACCELERATE,
    DATASETS,
    DEEPSPEED,
    LIGHTNING,
    MEGATRON,
    PANDAS,
    RAY,
    TORCH,
    TRANSFORMERS,
    TRL,
    Requirement,
    find_requirement_problem,
    require_installed,
)
from batchloom.core.errors import InputError, SettingsError, TrainError
from batchloom.core.settings import (
    Setting,
    convert_int_settings,
    is_positive_number,
    quote_value,
    raise_problems,
    suggest,
)

# Room for the stacks of two ranks that hang.
_MAX_OUTPUT_CHARACTERS = 8000
_MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSpec:
    """Settings of a comparison.

    Attributes:
        store: a store's folder or URL, or a name of synthetic data; None with ``synthetic`` for the default.
    """

    store: str | None = None
    frameworks: Annotated[
        tuple[str, ...],
        Setting(
            help="Comma-separated frameworks to run; also a module or a .py file with train(model, job).",
            option_type=str,
            shown_default="all that are installed",
        ),
    ] = ()
    processes: Annotated[int, Setting(help="Number of ranks of each run.", minimum=1, maximum=64)] = 1
    steps: Annotated[int, Setting(help="Number of steps of each run.", minimum=1, maximum=1_000_000)] = 50
    seq_len: Annotated[int, Setting(help="Number of tokens of a sequence.", minimum=2, maximum=_MAX_SIZE)] = 128
    global_batch_size: Annotated[
        int, Setting(help="Number of sequences of a step over all ranks.", minimum=1, maximum=_MAX_SIZE)
    ] = 8
    batch_size: Annotated[
        int, Setting(help="Number of sequences of a rank's forward pass.", minimum=1, maximum=_MAX_SIZE)
    ] = 2
    seed: Annotated[
        int, Setting(help="Seed of the data order and of the initial weights.", minimum=0, maximum=1 << 31)
    ] = 0
    tolerance: Annotated[
        float,
        Setting(
            help="Largest relative difference of losses that agree.",
            shown_default="1e-4; with --runs, losses are not compared with each other",
        ),
    ] = 1e-4
    synthetic: Annotated[
        bool, Setting(help="Measure throughput on synthetic data; the output is marked as synthetic.")
    ] = False
    seconds: Annotated[float, Setting(help="Seconds after which a framework's run is killed.")] = 600

    def __post_init__(self) -> None:
        problems = convert_int_settings(self)
        for name in ("tolerance", "seconds"):
            if not is_positive_number(getattr(self, name)):
                problems.append(f"{name}: {quote_value(getattr(self, name))} is not a number above 0")
        if not problems:
            problems += self._find_contradictions()
        raise_problems(problems)

    def _find_contradictions(self) -> list[str]:
        if self.store is None and not self.synthetic:
            return ["store: missing; give a store, or --synthetic for a throughput run on generated data"]
        pass_size = self.processes * self.batch_size
        if self.global_batch_size % pass_size:
            size = -(-self.global_batch_size // pass_size) * pass_size
            problem = f"cannot be distributed to {self.processes} processes in passes of {self.batch_size}"
            remedy = f"give a multiple of {pass_size}, such as {size}"
            return [f"global_batch_size: {self.global_batch_size} sequences {problem}: {remedy}"]
        return []


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with an example.

    Attributes:
        name: name as ``--frameworks`` accepts it.
        module: module of the example in ``batchloom.examples``, or a user's own dotted name or file (``.py``); its
            ``train(model, job)`` is called.
        requirements: packages that must be installed.
        started_by: ``torchrun``, or ``itself`` if the example starts its own processes.
    """

    name: str
    module: str
    requirements: tuple[Requirement, ...]
    started_by: str = "torchrun"


# The model of the examples comes from transformers.
_TORCH_PACKAGES = (TORCH, TRANSFORMERS)
_TRAINER_PACKAGES = (*_TORCH_PACKAGES, ACCELERATE, DATASETS)

FRAMEWORKS = (
    Framework("pytorch", "pytorch", _TORCH_PACKAGES),
    Framework("hf-trainer", "hf_trainer", _TRAINER_PACKAGES),
    Framework("trl-sft", "sft_trainer", (*_TRAINER_PACKAGES, TRL)),
    Framework("lightning", "with_lightning", (*_TORCH_PACKAGES, LIGHTNING)),
    Framework("megatron", "with_megatron", (*_TORCH_PACKAGES, MEGATRON)),
    Framework("fsdp2", "fsdp2", _TORCH_PACKAGES),
    Framework("fsdp2-trainer", "fsdp2_sft", _TORCH_PACKAGES),
    Framework("accelerate", "with_accelerate", (*_TORCH_PACKAGES, ACCELERATE)),
    Framework("deepspeed", "with_deepspeed", (*_TORCH_PACKAGES, DEEPSPEED)),
    Framework("ray-train", "with_ray", (*_TORCH_PACKAGES, RAY, PANDAS), started_by="itself"),
)


def require_compare_packages() -> None:
    """Check that the training and plotting packages are installed before any run.

    Raises:
        MissingDependencyError: names the missing package.
    """
    require_installed(TORCH, Requirement("matplotlib", "3.9", "train"))


def find_framework(name: str) -> Framework:
    """Return the framework of a name, or of a user's own example module or file."""
    for framework in FRAMEWORKS:
        if framework.name == name:
            return framework
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise SettingsError([f"frameworks: there is no file {name}"])
        return Framework(name, str(Path(name).resolve()), _TORCH_PACKAGES)
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return Framework(name, name, _TORCH_PACKAGES)
    framework_names = [framework.name for framework in FRAMEWORKS]
    problem = f"frameworks: {name!r} is neither one of {', '.join(framework_names)} nor a module or file of an example"
    raise SettingsError([problem + suggest(name, framework_names)])


def _get_module_name(framework: Framework) -> str:
    return f"batchloom.examples.{framework.module}" if framework in FRAMEWORKS else framework.module


def import_example(framework: Framework) -> ModuleType:
    """Import the module of an example; it must have ``train``."""
    module = framework.module
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        if spec is None or spec.loader is None:
            raise InputError(f"{module} cannot be imported as a module")
        example_module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example_module)
    else:
        example_module = importlib.import_module(_get_module_name(framework))
    if not callable(getattr(example_module, "train", None)):
        raise InputError(f"{module} is not an example: it has no train(model, job). See examples/pytorch.py.")
    return example_module


def hash_example(framework: Framework) -> str | None:
    """Return the hash of an example's file; None if its module cannot be found."""
    file: str | None = framework.module
    if not framework.module.endswith(".py"):
        try:
            spec = importlib.util.find_spec(_get_module_name(framework))
        except ImportError:
            return None
        file = spec.origin if spec else None
    return xxhash.xxh3_64_hexdigest(Path(file).read_bytes()) if file else None


def find_missing_packages(framework: Framework) -> list[str]:
    """Return a message per package that is missing or unsuitable."""
    return [problem for requirement in framework.requirements if (problem := find_requirement_problem(requirement))]


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """Entries of each rank's steps, and the mean loss of each step from ``first`` on."""

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
        "batchloom.analysis.compare.frameworks",
        name,
        str(record),
        json.dumps(job_settings),
        str(seconds),
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
    # With one thread, floating-point sums are reproducible and the processes share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Ray would join a cluster of another program on this machine, which may end first.
    environment["RAY_ADDRESS"] = "local"
    with tempfile.TemporaryFile() as stderr_file:
        process = subprocess.Popen(  # noqa: S603 - the command is ours
            command, stdout=subprocess.DEVNULL, stderr=stderr_file, env=environment
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
    """Kill a process and its descendants, since the ranks of a launcher survive it."""
    import psutil

    top = psutil.Process(process.pid)
    family = [*top.children(recursive=True), top]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _read_fault(record: Path) -> str:
    """Return the error of the first rank that failed; empty if none recorded one."""
    for file in sorted(record.glob("rank_*.json")):
        rank_record = json.loads(file.read_text())
        if rank_record.get("fault"):
            return f"Rank {rank_record['rank']}: {rank_record['fault']}"
    return ""


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


def run_example_process(name: str, record: str, job_settings: str, seconds: str) -> None:
    """Run an example in this process and write its record, even if it fails.

    After three quarters of its time it writes the stacks of its threads, which show where it hangs.

    Args:
        name: name of the framework.
        record: folder in which each rank writes ``rank_N.json`` when it ends.
        job_settings: settings of ``examples.job.Job`` as a JSON object.
        seconds: time after which the launcher kills the process.
    """
    from batchloom import open_store
    from batchloom.analysis.compare.witness import WitnessRecorder
    from batchloom.examples.job import Job, tiny_model

    faulthandler.dump_traceback_later(0.5 * float(seconds))
    recorder = WitnessRecorder(Path(record))
    framework = find_framework(name)
    job = Job(**json.loads(job_settings), tell=recorder.record_loss, within=recorder.observe)
    model = tiny_model(open_store(job.data), job.seed)
    is_rank_process = framework.started_by == "torchrun"
    with recorder.observe(model) if is_rank_process else contextlib.nullcontext():
        import_example(framework).train(model, job)


if __name__ == "__main__":
    # A launcher of ranks runs ``python -m batchloom.analysis.compare.frameworks NAME RECORD JOB SECONDS``.
    run_example_process(*sys.argv[1:])
