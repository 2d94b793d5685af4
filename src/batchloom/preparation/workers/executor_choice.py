"""Choice of a job's executor and of the number of its workers."""

from pathlib import Path

from batchloom.preparation.settings.run_settings import ExecutionSettings
from batchloom.preparation.workers.fork_server import ForkServer
from batchloom.preparation.workers.inline_executor import InlineExecutor
from batchloom.preparation.workers.machine_limits import compute_worker_count, count_cores, measure_free_memory
from batchloom.preparation.workers.process_pool import ProcessPool
from batchloom.preparation.workers.protocols import Executor, MessageCallback, TaskFunctionFactory

# The first worker takes about as long to start as to tokenize this many bytes; others take milliseconds.
_MIN_POOL_BYTES = 64 << 20


def choose_worker_count(execution: ExecutionSettings, units: int, total_bytes: int) -> int:
    """Return the number of units processed at the same time on this machine."""
    if execution.workers != "auto":
        return min(execution.workers, max(1, units))
    if execution.engine == "ray":
        return max(1, units)
    useful = units if total_bytes > _MIN_POOL_BYTES else 1
    free = measure_free_memory() if useful > 1 else None
    return compute_worker_count(useful, cores=count_cores(), free=free, memory=execution.memory_per_worker)


def runs_inline(execution: ExecutionSettings, workers: int) -> bool:
    """Return whether the coordinator process runs all tasks itself."""
    return execution.engine == "pool" and workers == 1 and execution.memory_per_worker is None


def make_executor(
    execution: ExecutionSettings,
    workers: int,
    shared: Path,
    setup: TaskFunctionFactory,
    inline_setup: TaskFunctionFactory,
    listener: MessageCallback,
    server: ForkServer | None,
) -> Executor:
    """Make the executor of a job.

    ``setup`` makes the task function in another process, ``inline_setup`` in this one, where ``listener`` gets
    messages at once. Every worker must see the folder ``shared``.
    """
    if execution.engine == "ray":
        # Ray takes half a second to import.
        from batchloom.preparation.workers.ray_cluster import RayExecutor

        max_workers = None if execution.workers == "auto" else execution.workers
        return RayExecutor(setup, execution.address, max_workers, execution.memory_per_worker, shared)
    if runs_inline(execution, workers):
        return InlineExecutor(inline_setup, listener)
    return ProcessPool(setup, workers, execution.memory_per_worker, server)
