"""Who does the work of a job: this process, a pool of processes, or a Ray cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchloom.core.settings import nearest, raise_problems, shown, whole
from batchloom.preparation.workers.inline_executor import Here
from batchloom.preparation.workers.machine_limits import cores, free_memory, workers_for
from batchloom.preparation.workers.process_pool import Pool, Ready
from batchloom.preparation.workers.protocols import Crew, Setup, Tell

EngineName = Literal["pool", "ray"]
_ENGINES = ("pool", "ray")
_MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a job is carried out; it decides no byte.

    Attributes:
        workers: how many units are done at the same time; ``auto``: as many as there are cores, memory
            and units for.
        engine: ``pool`` (processes of this machine) or ``ray``.
        address: of a Ray cluster; None starts one on this machine.
        memory: bytes that a worker may hold; None for any number.
    """

    workers: int | Literal["auto"] = 1
    engine: EngineName = "pool"
    address: str | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        problems = []
        count = whole(self.workers)
        if self.workers != "auto" and (count is None or not 1 <= count <= _MOST_WORKERS):
            problems.append(
                f"workers: {shown(self.workers)} is neither 'auto' nor a number from 1 to {_MOST_WORKERS:,}"
            )
        if self.engine not in _ENGINES:
            hint = nearest(self.engine, _ENGINES) if isinstance(self.engine, str) else ""
            problems.append(f"engine: {shown(self.engine)} is none of {', '.join(_ENGINES)}{hint}")
        if self.address is not None and self.engine != "ray":
            problems.append("address: is that of a Ray cluster; give --engine ray with it")
        if self.memory is not None and (whole(self.memory) is None or self.memory < 1):
            problems.append(f"memory: {shown(self.memory)} is no number of bytes above 0")
        raise_problems(problems)


@dataclass(frozen=True, slots=True)
class Crewed:
    """A job that wants a crew.

    Attributes:
        execution: how it is carried out.
        folder: every worker must see it.
        ready: processes that have begun.
    """

    execution: Execution
    folder: Path
    ready: Ready | None = None


def workers_of(execution: Execution, units: int) -> int:
    """How many units are done at the same time on this machine."""
    if execution.workers != "auto":
        return min(execution.workers, max(1, units))
    if execution.engine == "ray":
        return max(1, units)
    free = free_memory() if units > 1 else None
    return workers_for("auto", units, cores=cores(), free=free, memory=execution.memory)


def alone(execution: Execution, workers: int) -> bool:
    """Whether the process that leads a job does all of it."""
    return execution.engine == "pool" and workers == 1 and execution.memory is None


def ready_for(execution: Execution, workers: int) -> Ready:
    """Processes that begin while it is found out what they will need; none where no pool does the work."""
    if execution.engine != "pool" or alone(execution, workers):
        workers = 0
    return Ready(workers, "batchloom.preparation.phases.worker_setup")


def crew_for(job: Crewed, setup: Setup, here: Setup, workers: int, listener: Tell) -> Crew:
    """The crew of a job.

    Args:
        job: what was asked for, and where.
        setup: makes what does orders, in another process.
        here: makes it in this one, where more of it may be at hand.
        workers: how many units are done at the same time.
        listener: is told at once what orders tell in this process.
    """
    execution = job.execution
    if execution.engine == "ray":
        # Ray takes half a second to import.
        from batchloom.preparation.workers.ray_cluster import RayCluster, RayCrew  # noqa: PLC0415

        asked = None if execution.workers == "auto" else execution.workers
        memory, shared = execution.memory, job.folder
        return RayCrew(setup, RayCluster(execution.address, asked, memory, shared=shared))
    if alone(execution, workers):
        return Here(here, listener)
    return Pool(setup, workers, execution.memory, job.ready)
