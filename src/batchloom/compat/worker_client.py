"""``WorkerConfig`` and ``WorkerClient``: the calls of asynchronous worker scripts, over ``batchloom worker``."""

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
    """One worker of a run, beside which the event loop goes on.

    Args:
        config: what it trains on what.
        print_line: told each line of the run, from a thread of its own.
    """

    def __init__(self, config: WorkerConfig, print_line: Callable[[str], None] = print) -> None:
        self.config, self._print_line = config, print_line
        self._started = False
        self._leave = LeaveEvent()
        self._running: asyncio.Task[WorkerReport] | None = None

    async def start(self) -> None:
        """Make ready: what training needs is loaded.

        Raises:
            MissingDependencyError: names everything that is missing.
        """
        require_train_packages()
        await asyncio.to_thread(import_module, _WORKER)
        self._started = True

    async def run_training(self, use_distributed: bool = True) -> "WorkerReport":  # noqa: FBT001, FBT002
        """Train until the run is done or somebody leaves it; see ``train.worker.run_worker``.

        Args:
            use_distributed: whether to find the other workers (torchrun's variables, a worker of Ray Train), or to be
                alone.

        Raises:
            TrainError: it was not started, or trains already; or what ``run_worker`` raises.
        """
        if not self._started or self._running is not None:
            problem = "trains already" if self._started else "was not started"
            raise TrainError(
                f"The worker {self.config.worker_id} {problem}: await start() once, then run_training() once at a time."
            )
        # A task of its own: it goes on to the end of a step when whoever waits for it is cancelled.
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
        """End the training of all workers of the run after the step they are at, and save it; wait for that."""
        running = self._running
        if running is not None:
            self._leave.set()
            await asyncio.wait([running])

    def _train(self, *, alone: bool) -> "WorkerReport":
        from batchloom.train import run_worker  # noqa: PLC0415 - torch takes seconds

        return run_worker(self.config, self._print_line, self._leave, alone=alone)
