"""``WorkerConfig`` and ``WorkerClient``: asyncio calls for ``batchloom worker``."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, final

from batchloom.core.errors import TrainError
from batchloom.train import LeaveEvent, WorkerConfig, require_train_packages

if TYPE_CHECKING:
    from batchloom.train import WorkerReport

_WORKER = "batchloom.train.elastic_worker"

__all__ = ["WorkerClient", "WorkerConfig"]


@final
class WorkerClient:
    """Worker of a run that does not block the event loop.

    Args:
        config: settings of the worker: model, data and run.
        print_line: called with each line of the run, from a separate thread.
    """

    def __init__(self, config: WorkerConfig, print_line: Callable[[str], None] = print) -> None:
        self.config = config
        self._print_line = print_line
        self._started = False
        self._leave = LeaveEvent()
        self._running: asyncio.Task[WorkerReport] | None = None

    async def start(self) -> None:
        """Load the modules that training needs.

        Raises:
            MissingDependencyError: the error names every missing package.
        """
        require_train_packages()
        await asyncio.to_thread(import_module, _WORKER)
        self._started = True

    async def run_training(self, use_distributed: bool = True) -> "WorkerReport":  # noqa: FBT001, FBT002
        """Train until the run is done or is left; see ``batchloom.train.run_worker``.

        Args:
            use_distributed: whether to find the other workers (torchrun's variables, a worker of Ray Train), or
                to train alone.

        Raises:
            TrainError: ``start`` was not called, or training is in progress; or an error of ``run_worker``.
        """
        if not self._started or self._running is not None:
            problem = "is already training" if self._started else "was not started"
            raise TrainError(
                f"The worker {self.config.worker_id} {problem}: await start() once, then run_training() once at a time."
            )
        # A separate task completes its step when the awaiting caller is cancelled.
        self._running = asyncio.create_task(asyncio.to_thread(self._train, alone=not use_distributed))
        try:
            return await asyncio.shield(self._running)
        except asyncio.CancelledError:
            await self.stop()
            raise
        finally:
            self._running = None
            self._leave.clear()

    async def stop(self) -> None:
        """Stop all workers of the run after their current step, save it, and wait."""
        running = self._running
        if running is not None:
            self._leave.set()
            await asyncio.wait([running])

    def _train(self, *, alone: bool) -> "WorkerReport":
        from batchloom.train import run_worker

        return run_worker(self.config, self._print_line, self._leave, alone=alone)
