"""Peak memory of this process."""

import re
import resource
import sys
from pathlib import Path

import torch

_PROC_STATUS = Path("/proc/self/status")
_PEAK_PATTERN = re.compile(r"VmHWM:\s+(\d+) kB")


def measure_peak_memory() -> dict[str, int]:
    """Return peak bytes of this process: ``resident``, and ``device`` with a GPU.

    ``getrusage`` alone would include the peak of the parent process (Linux keeps it over ``exec``).
    """
    peak_bytes = {"resident": _read_resident_peak()}
    if uses_gpu():
        peak_bytes["device"] = torch.cuda.max_memory_allocated()
    return peak_bytes


def uses_gpu() -> bool:
    """Return whether this process has initialized CUDA."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _read_resident_peak() -> int:
    if sys.platform == "linux" and (match := _PEAK_PATTERN.search(_PROC_STATUS.read_text())):
        return int(match[1]) * 1024
    # ru_maxrss is in bytes on macOS and in kB on other systems.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
