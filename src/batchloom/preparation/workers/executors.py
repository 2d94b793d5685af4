"""Choice of the executor and of the number of workers."""

from pathlib import Path

from batchloom.preparation.settings.run_settings import ExecutionSettings
from batchloom.preparation.workers.inline_executor import InlineExecutor
from batchloom.preparation.workers.machine_limits import compute_worker_count, count_cores, measure_free_memory
from batchloom.preparation.workers.process_pool import PrestartedWorkers, ProcessPool
from batchloom.preparation.workers.protocols import Executor, MessageCallback, TaskFunctionFactory


def choose_worker_count(execution: ExecutionSettings, units: int) -> int:
    """Return the number of units processed at the same time on this machine."""
    if execution.workers != "auto":
        return min(execution.workers, max(1, units))
    if execution.engine == "ray":
        return max(1, units)
    free = measure_free_memory() if units > 1 else None
    return compute_worker_count(units, cores=count_cores(), free=free, memory=execution.memory_per_worker)


def runs_inline(execution: ExecutionSettings, workers: int) -> bool:
    """Return whether the coordinator process runs all tasks itself."""
    return execution.engine == "pool" and workers == 1 and execution.memory_per_worker is None


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

    ``setup`` makes the task function in another process, ``inline_setup`` in this one, where ``listener`` gets
    messages at once. Every worker must see the folder ``shared``.
    """
    if execution.engine == "ray":
        # Ray takes half a second to import.
        from batchloom.preparation.workers.ray_cluster import RayExecutor  # noqa: PLC0415

        max_workers = None if execution.workers == "auto" else execution.workers
        return RayExecutor(setup, execution.address, max_workers, execution.memory_per_worker, shared)
    if runs_inline(execution, workers):
        return InlineExecutor(inline_setup, listener)
    return ProcessPool(setup, workers, execution.memory_per_worker, prestarted)
