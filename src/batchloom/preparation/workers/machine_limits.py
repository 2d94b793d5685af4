"""What this machine has for workers, and how many that makes."""

import math
import os
from pathlib import Path
from typing import Literal

from batchloom.core.errors import SettingsError

# What preparation takes for one worker, at most; "auto" reckons with it where no limit is given.
WORKER_MEMORY = 700 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")


def compute_worker_count(
    workers: int | Literal["auto"],
    task_count: int,
    *,
    cores: int,
    free: int | None = None,
    memory: int | None = None,
) -> int:
    """How many workers to have: arithmetic alone.

    Args:
        workers: the user's number, or ``"auto"``: one a core, as many as fit into memory.
        task_count: how many there are to do; more workers than that would have nothing to do.
        cores: as ``count_cores()`` counts them.
        free: bytes of memory that are free; None where that is not known.
        memory: bytes a worker may hold; None for what preparation takes at most.

    Raises:
        SettingsError: ``workers`` is no number of workers.
    """
    if workers == "auto":
        worker_count = cores
        if free is not None:
            worker_count = min(worker_count, free // (memory or WORKER_MEMORY))
    elif isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1:
        worker_count = workers
    else:
        raise SettingsError([f"workers: {workers!r} is no number of workers; give 1 or more, or auto"])
    return max(1, min(worker_count, task_count))


def count_cores() -> int:
    """How many processors this process may use: those given to it, and what its container gets."""
    available_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = read_cpu_quota(_PROCESS_CGROUPS, _CGROUPS)
    return max(1, min(available_cores or 1, math.ceil(quota) if quota else available_cores or 1))


def measure_free_memory() -> int:
    """Bytes of memory that workers can take: what the system has, and what the container may use."""
    import psutil  # noqa: PLC0415 - late: only who starts workers asks

    free = int(psutil.virtual_memory().available)
    cgroup_memory = read_memory_left(_PROCESS_CGROUPS, _CGROUPS)
    return free if cgroup_memory is None else min(free, cgroup_memory)


def measure_process_memory(process: int) -> int:
    """Bytes that a process holds and that nothing but its end gives back; 0 where it is gone.

    Files that are mapped count in the resident set, and the system takes them back when it must.
    """
    import psutil  # noqa: PLC0415 - late: only who limits workers asks

    try:
        memory_info = psutil.Process(process).memory_info()
    except psutil.Error:
        return 0
    return int(memory_info.rss - getattr(memory_info, "shared", 0))


def describe_memory_excess(used_memory: int, limit: int) -> str:
    """What became of a worker above its limit, in the middle of a sentence."""
    return f"used {_format_memory(used_memory)} of memory, more than the {_format_memory(limit)} that a worker may use"


def _format_memory(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def read_cpu_quota(own: Path, root: Path) -> float | None:
    """Processors that control groups (version 1 or 2) leave; None where they set no bound."""
    quotas = []
    for folder in _list_cgroup_folders(own, root, "cpu"):
        words = _read_words(folder / "cpu.max")
        if not words:
            words = [
                *_read_words(folder / "cpu.cfs_quota_us"),
                *_read_words(folder / "cpu.cfs_period_us"),
            ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def read_memory_left(own: Path, root: Path) -> int | None:
    """Bytes that control groups leave to this process and its children; None without a bound."""
    free_bytes = []
    for folder in _list_cgroup_folders(own, root, "memory"):
        for bound, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            words = [*_read_words(folder / bound), *_read_words(folder / used)]
            if len(words) == 2 and words[0].isdigit():
                # Cached files count as used, and are given back.
                cached = dict(zip(*[iter(_read_words(folder / "memory.stat"))] * 2, strict=False))
                files = int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
                free_bytes.append(max(0, int(words[0]) - int(words[1]) + files))
    return min(free_bytes, default=None)


def _list_cgroup_folders(own: Path, root: Path, controller: str) -> list[Path]:
    """The folders that may bound a process: its group's and all above it.

    Inside a container the group's own path is often not mounted; the root then stands for it.
    """
    folders = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        number, names, path = line.split(":", 2)
        if number == "0":
            top = root
        elif controller in names.split(","):
            top = root / controller
        else:
            continue
        inner = top / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return folders


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
