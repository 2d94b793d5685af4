"""The most memory this process has had."""

import re
import resource
import sys
from pathlib import Path

import torch

_PROC_STATUS = Path("/proc/self/status")
_PEAK_PATTERN = re.compile(r"VmHWM:\s+(\d+) kB")


def measure_peak_memory() -> dict[str, int]:
    """Bytes at the most since the process began: ``resident``; ``device`` as well, of an accelerator it uses.

    ``getrusage`` alone would count what its parent had when it was started (Linux keeps that over ``exec``).
    """
    peak_bytes = {"resident": _read_resident_peak()}
    if uses_gpu():
        peak_bytes["device"] = torch.cuda.max_memory_allocated()
    return peak_bytes


def uses_gpu() -> bool:
    """Whether this process has begun to use a GPU of CUDA."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _read_resident_peak() -> int:
    if sys.platform == "linux" and (match := _PEAK_PATTERN.search(_PROC_STATUS.read_text())):
        return int(match[1]) * 1024
    # Bytes on macOS, kB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
