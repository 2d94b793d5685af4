"""CPU and memory available to workers, and the worker count they allow."""

import math
import os
from pathlib import Path

# Maximum memory of one worker of preparation; "auto" assumes it if no limit is given.
WORKER_MEMORY = 700 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")


def compute_worker_count(task_count: int, *, cores: int, free: int | None = None, memory: int | None = None) -> int:
    """Compute the number of workers that cores, tasks and free memory allow."""
    fitting = cores if free is None else min(cores, free // (memory or WORKER_MEMORY))
    return max(1, min(fitting, task_count))


def count_cores() -> int:
    """Count the cores this process may use, by CPU affinity and container quota."""
    available_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = read_cpu_quota(_PROCESS_CGROUPS, _CGROUPS)
    return max(1, min(available_cores or 1, math.ceil(quota) if quota else available_cores or 1))


def measure_free_memory() -> int:
    """Return the bytes of memory for workers, by system and container limits."""
    import psutil

    free = int(psutil.virtual_memory().available)
    cgroup_memory = read_memory_left(_PROCESS_CGROUPS, _CGROUPS)
    return free if cgroup_memory is None else min(free, cgroup_memory)


def measure_process_memory(process: int) -> int:
    """Return the bytes a process holds until it ends; 0 if it does not exist.

    Mapped files count in the resident set, but the system can reclaim them, so they are subtracted.
    """
    import psutil

    try:
        memory_info = psutil.Process(process).memory_info()
    except psutil.Error:
        return 0
    return int(memory_info.rss - getattr(memory_info, "shared", 0))


def describe_memory_excess(used_memory: int, limit: int) -> str:
    """Describe the end of a worker above its memory limit, as a verb phrase."""
    return f"used {_format_memory(used_memory)} of memory, more than the {_format_memory(limit)} that a worker may use"


def _format_memory(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def read_cpu_quota(own: Path, root: Path) -> float | None:
    """Return the CPU quota of control groups (version 1 or 2); None without a limit."""
    quotas = []
    for folder in _list_cgroup_folders(own, root, "cpu"):
        words = _read_words(folder / "cpu.max")
        if not words:
            words = [*_read_words(folder / "cpu.cfs_quota_us"), *_read_words(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def read_memory_left(own: Path, root: Path) -> int | None:
    """Return the bytes of memory left by control groups; None without a limit."""
    free_bytes = []
    for folder in _list_cgroup_folders(own, root, "memory"):
        for bound, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            words = [*_read_words(folder / bound), *_read_words(folder / used)]
            if len(words) == 2 and words[0].isdigit():
                # Page cache counts as used, but the kernel can reclaim it.
                cached = dict(zip(*[iter(_read_words(folder / "memory.stat"))] * 2, strict=False))
                files = int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
                free_bytes.append(max(0, int(words[0]) - int(words[1]) + files))
    return min(free_bytes, default=None)


def _list_cgroup_folders(own: Path, root: Path, controller: str) -> list[Path]:
    """List the folders of a process's control group and its ancestors.

    Inside a container the group's own path is often not mounted; the root then replaces it.
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
