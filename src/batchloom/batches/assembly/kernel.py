"""The library of the native kernel.

``kernel.c`` defines what each address points to. ctypes releases the interpreter lock during a call.
"""

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from batchloom.batches.assembly.kernel_build import LIBRARY_NAME, SOURCE, compute_kernel_version

_LOG = logging.getLogger("batchloom")
# ``Batch`` of kernel.c.
BATCH = struct.Struct("=12q")
_SLOWER = "Batches are assembled by numpy, which is slower and gives the same bytes"

# ``batchloom_fill``, with its arrays as bytes: taking the address of a numpy array costs more than their copies.
Kernel = Callable[[bytes, bytes, bytes, bytes | None, bytes, bytes, bytes, bytes], int]


def load_kernel(path: Path) -> Kernel:
    """Load a library that was built from this version's source.

    Args:
        path: the library, as ``compile_kernel`` returns it.

    Returns:
        The function ``batchloom_fill`` of ``kernel.c``.

    Raises:
        OSError: the file is missing, damaged, or belongs to another platform or version.
    """
    library = ctypes.CDLL(str(path))
    try:
        version, fill = library.batchloom_kernel_version, library.batchloom_fill
    except AttributeError as error:
        raise OSError(str(error)) from error
    version.restype = ctypes.c_int64
    if version() != compute_kernel_version():
        raise OSError(f"{path} was built from another version of {SOURCE.name}")
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

    Returns:
        The kernel, as :func:`load_kernel` returns it, or None.
    """
    path = SOURCE.with_name(LIBRARY_NAME)
    if not path.exists():
        _LOG.info(
            "%s: %s was not built, for which installation needs a C compiler. With one, python -m "
            "batchloom.batches.assembly.kernel_build builds it.",
            _SLOWER,
            path.name,
        )
        return None
    if sys.byteorder != "little":
        _LOG.info("%s: the kernel is for little-endian machines.", _SLOWER)
        return None
    try:
        return load_kernel(path)
    except OSError as error:
        _LOG.warning("%s: the native kernel cannot be used: %s. Install batchloom again.", _SLOWER, error)
        return None
