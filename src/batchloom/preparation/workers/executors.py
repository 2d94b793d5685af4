"""Settings of a run, and the choice of its executor."""

from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Literal

from batchloom.core.settings import as_int, quote_value, raise_problems, suggest
from batchloom.preparation.units.units import UNIT_BYTES
from batchloom.preparation.workers.inline_executor import InlineExecutor
from batchloom.preparation.workers.machine_limits import compute_worker_count, count_cores, measure_free_memory
from batchloom.preparation.workers.process_pool import PrestartedWorkers, ProcessPool
from batchloom.preparation.workers.protocols import Executor, MessageCallback, TaskFunctionFactory
from batchloom.sources import ReadLimits

ExecutorName = Literal["pool", "ray"]
_EXECUTOR_NAMES = ("pool", "ray")
_MAX_WORKERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    """Execution settings of a job; they do not affect the output.

    Attributes:
        workers: number of units processed at the same time; ``auto`` uses as many as cores, memory and units allow.
        engine: ``pool`` (processes of this machine) or ``ray``.
        address: address of a Ray cluster; None starts one on this machine.
        memory: maximum bytes of a worker; None for no limit.
    """

    workers: int | Literal["auto"] = 1
    engine: ExecutorName = "pool"
    address: str | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        problems = []
        count = as_int(self.workers)
        if self.workers != "auto" and (count is None or not 1 <= count <= _MAX_WORKERS):
            problems.append(
                f"workers: {quote_value(self.workers)} is neither 'auto' nor a number from 1 to {_MAX_WORKERS:,}"
            )
        if self.engine not in _EXECUTOR_NAMES:
            hint = suggest(self.engine, _EXECUTOR_NAMES) if isinstance(self.engine, str) else ""
            problems.append(f"engine: {quote_value(self.engine)} is none of {', '.join(_EXECUTOR_NAMES)}{hint}")
        if self.address is not None and self.engine != "ray":
            problems.append("address: applies to Ray clusters only; give --engine ray with it")
        if self.memory is not None and (as_int(self.memory) is None or self.memory < 1):
            problems.append(f"memory: {quote_value(self.memory)} is not a number of bytes above 0")
        raise_problems(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Run settings of a job.

    Attributes:
        execution: execution settings.
        append: add the new inputs to an existing store as a new generation.
        restart: replace the work of another recipe or of other inputs; identical units are reused.
        streaming: read remote Hub datasets without downloading them; None: only large ones.
        work: folder in which a store for a remote target is made; None for one below the user's cache.
        hash_inputs: identify inputs by content, not by mtime.
        dry_run: stop before shards are written, after counting what would be dropped.
        limits: read limits, which affect documents.
        unit_bytes: listed input bytes of a unit.
    """

    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    append: bool = False
    restart: bool = False
    streaming: bool | None = None
    work: Path | None = None
    hash_inputs: bool = False
    dry_run: bool = False
    limits: ReadLimits = field(default_factory=ReadLimits)
    unit_bytes: int = UNIT_BYTES

    @property
    def constants(self) -> list[int]:
        """Sizes that affect documents and units."""
        return [*astuple(self.limits)[:-1], self.unit_bytes]


def choose_worker_count(execution: ExecutionSettings, units: int) -> int:
    """Return the number of units processed at the same time on this machine."""
    if execution.workers != "auto":
        return min(execution.workers, max(1, units))
    if execution.engine == "ray":
        return max(1, units)
    free = measure_free_memory() if units > 1 else None
    return compute_worker_count(units, cores=count_cores(), free=free, memory=execution.memory)


def runs_inline(execution: ExecutionSettings, workers: int) -> bool:
    """Return whether the coordinator process runs all tasks itself."""
    return execution.engine == "pool" and workers == 1 and execution.memory is None


def prestart_workers(execution: ExecutionSettings, workers: int) -> PrestartedWorkers:
    """Start worker processes before their setup is known; none without a pool."""
    if execution.engine != "pool" or runs_inline(execution, workers):
        workers = 0
    return PrestartedWorkers(workers, "batchloom.preparation.phases.worker_setup")


def make_executor(
    execution: ExecutionSettings,
    workers: int,
    shared: Path,
    setup: TaskFunctionFactory,
    inline_setup: TaskFunctionFactory,
    listener: MessageCallback,
    prestarted: PrestartedWorkers,
) -> Executor:
    """Make the executor of a job.

    Args:
        execution: execution settings.
        workers: number of units processed at the same time.
        shared: folder that every worker must see.
        setup: makes the task function in another process.
        inline_setup: makes it in this process, where components may already be loaded.
        listener: called at once with the messages of tasks in this process.
        prestarted: processes that are already started.
    """
    if execution.engine == "ray":
        # Ray takes half a second to import.
        from batchloom.preparation.workers.ray_cluster import RayClusterSettings, RayExecutor  # noqa: PLC0415

        max_workers = None if execution.workers == "auto" else execution.workers
        return RayExecutor(setup, RayClusterSettings(execution.address, max_workers, execution.memory, shared=shared))
    if runs_inline(execution, workers):
        return InlineExecutor(inline_setup, listener)
    return ProcessPool(setup, workers, execution.memory, prestarted)
