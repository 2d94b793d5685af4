"""The native kernel that fills batches.

``kernel.c`` defines what each address points to. ctypes releases the interpreter lock during a call.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from batchloom.core.native import KERNEL_SOURCE, find_library

# ``Batch`` of kernel.c.
BATCH = struct.Struct("=12q")

# ``batchloom_fill``, with its arrays as bytes: taking the address of a numpy array costs more than their copies.
Kernel = Callable[[bytes, bytes, bytes, bytes | None, bytes, bytes, bytes, bytes], int]


def get_kernel(library: ctypes.CDLL) -> Kernel:
    """Return the function ``batchloom_fill`` of a library of ``kernel.c``."""
    fill: Any = library.batchloom_fill
    fill.argtypes, fill.restype = [ctypes.c_char_p] * 8, ctypes.c_int64
    kernel: Kernel = fill
    return kernel


def get_output_address(array: NDArray[Any] | None) -> int:
    """Return the address of a writable array; 0 for None."""
    return 0 if array is None else ctypes.addressof(ctypes.c_char.from_buffer(array.data))


@functools.cache
def find_kernel() -> Kernel | None:
    """Return the kernel of this installation; None without a usable one.

    The reason is logged, once.
    """
    library = find_library(KERNEL_SOURCE, "Batches are assembled by numpy, which is slower and gives the same bytes")
    return None if library is None else get_kernel(library)
