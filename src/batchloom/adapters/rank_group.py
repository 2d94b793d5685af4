"""Rank group of a run: setup of torch.distributed and a few collectives."""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from batchloom.adapters.agreement import all_gather_bytes
from batchloom.core.errors import BatchloomError, InputError, TrainError

# The timeout must exceed the time of preparing the data.
_COLLECTIVE_TIMEOUT = timedelta(days=30)
# Barriers at which groups were left, kept until the process ends. torch ends gloo's threads while it holds the GIL, and
# a thread that frees a reduced tensor waits for the GIL. A barrier holds all that was reduced before it.
_last_barriers: list[dist.Work] = []


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's rank in the data-parallel group.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        local_rank: rank of this process on its machine.
        device: device on which this rank computes.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True for rank 0, which writes and prints for all."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Return the sum over all ranks of each value, the same on every rank."""
        if self.world_size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.collective_errors():
            dist.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """Convert collective errors to a TrainError: another rank stopped."""
        try:
            yield
        except RuntimeError as error:
            if not _is_collective_error(error):
                raise
            raise TrainError(
                f"Rank {self.rank} lost contact with the other ranks: one of them stopped, and its own message gives "
                f"the cause ({str(error).splitlines()[0]})."
            ) from error

    def all_gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of each rank in rank order, the same on every rank."""
        if self.world_size == 1:
            return [value]
        with self.collective_errors():
            return [json.loads(message) for message in all_gather_bytes(json.dumps(value).encode())]

    def wait(self) -> None:
        """Block until every rank has called this."""
        self.total(0.0)

    def run_exclusively(self, work: Callable[[], object] | None) -> None:
        """Run work on some ranks while all others wait, without a time limit.

        Ranks with ``work`` None only wait. If another rank stops, TrainError is raised.
        """
        if self.world_size == 1:
            if work is not None:
                work()
            return
        with self.collective_errors():
            group = _make_patient_group(dist.group.WORLD)
        if work is not None:
            work()
        with self.collective_errors():
            dist.barrier(group)

    def broadcast_local_path(self, path: str) -> str:
        """Broadcast ``path`` from the first rank of each machine to its other ranks."""
        return str(self.all_gather(path)[self.rank - self.local_rank])


# When the last reference to a gloo group is freed, torch joins the group's threads while it holds the GIL. A thread
# that frees the tensors of its last collective waits for the GIL, so the process would never end. Models and the
# tracebacks of failed collectives hold such references after the group was destroyed. This cache frees no group.
@functools.cache
def _make_patient_group(_world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group of all ranks whose collectives wait while a rank works.

    Other collectives keep their timeout of minutes, because it reveals a rank that hangs.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
    return group


def _is_collective_error(error: RuntimeError) -> bool:
    """Return whether a collective failed; gloo has no exception class of its own."""
    if isinstance(error, BatchloomError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def choose_device(name: str, local_rank: int, cpu_option: str = "--device cpu") -> torch.device:
    """Return the device of a rank.

    Args:
        name: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        local_rank: index of the GPU if ``name`` has none.
        cpu_option: setting of the caller that chooses the CPU, for the error.

    Raises:
        InputError: there is no such device, or torch sees none of that kind.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise InputError(f"--device {name!r} is none of auto, cpu, cuda, cuda:N.")
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number) if number else local_rank
    count = torch.cuda.device_count()
    if index >= count:
        raise InputError(
            f"Device {name}: GPU {index} does not exist; torch {torch.__version__} sees {count}. Use {cpu_option}, "
            "start fewer ranks, or install a torch built for your GPU."
        )
    return torch.device("cuda", index)


@contextmanager
def join_ranks(
    device: str, *, alone: bool = False, print_line: Callable[[str], None] | None = None
) -> Iterator[RankGroup]:
    """Join the ranks that torchrun started, or be rank 0 of 1; leave at the end.

    An initialized process group, as of Ray Train or of the caller's own script, is used and left intact.

    Args:
        device: device name; see :func:`choose_device`.
        alone: whether to be rank 0 of 1 regardless of the environment.
        print_line: function that prints a line before waiting for other ranks.

    Raises:
        InputError: see :func:`choose_device`.
        TrainError: torchrun's variables are incomplete or invalid, or the other ranks cannot be reached.
    """
    if alone:
        yield RankGroup(0, 1, 0, choose_device(device, 0))
        return
    if dist.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch_device = choose_device(device, local_rank)
        yield RankGroup(dist.get_rank(), dist.get_world_size(), local_rank, torch_device)
        return
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        yield RankGroup(0, 1, 0, choose_device(device, 0))
        return
    rank, world_size, local_rank = _read_rank_variables()
    torch_device = choose_device(device, local_rank)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        with _exit_on_signals():
            if print_line is not None and world_size > 1:
                print_line(f"rank {rank} of {world_size} waits for the other ranks at {address}")
            dist.init_process_group("nccl" if torch_device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise TrainError(
            f"Rank {rank} of {world_size} cannot reach the other ranks at {address} ({str(error).splitlines()[0]}). "
            "Start all ranks with torchrun, and make sure that this address is reachable."
        ) from error
    try:
        # The ranks meet here once: while they make a group, a rank that waits for a killed one does not notice it.
        _make_patient_group(dist.group.WORLD)
        ranks = RankGroup(rank, world_size, local_rank, torch_device)
        yield ranks
        with ranks.collective_errors():
            wait_to_leave()
    finally:
        dist.destroy_process_group()


def wait_to_leave() -> None:
    """Wait for all ranks, before the default process group is destroyed."""
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    _last_barriers.append(barrier)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once.

    torch waits in native code, where no Python handler runs.
    """
    signal_numbers = (signal.SIGINT, signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous_handlers = {number: signal.getsignal(number) for number in signal_numbers if in_main_thread}
    # Ignored signals stay ignored, and handlers of native code are not touched.
    python_handlers = {number: handler for number, handler in previous_handlers.items() if callable(handler)}
    for number in python_handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in python_handlers.items():
            signal.signal(number, handler)


def _read_rank_variables() -> tuple[int, int, int]:
    """Return rank, world size and local rank from torchrun's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: os.environ.get(name) for name in names}
    try:
        rank, world_size, local_rank = (int(variables[name] or "") for name in names[:3])
    except ValueError:
        rank = world_size = local_rank = -1
    if 0 <= local_rank <= rank < world_size and all(variables.values()):
        return rank, world_size, local_rank
    variables_text = ", ".join(f"{name}={value!r}" for name, value in variables.items())
    raise TrainError(
        f"The environment says {variables_text}, which is not a valid rank. Start with torchrun --nproc-per-node N, "
        "or unset RANK and WORLD_SIZE."
    )
