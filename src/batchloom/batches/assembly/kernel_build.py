"""Compilation of the native kernel.

The build hook runs this file by its path, with the standard library alone.

``python -m batchloom.batches.assembly.kernel_build`` builds the kernel of an installed package again.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY_NAME = "libbatchloom_kernel.so"


def compute_kernel_version() -> int:
    """Return a number that identifies the source and its libraries."""
    return int.from_bytes(hashlib.blake2b(SOURCE.read_bytes(), digest_size=4).digest(), "little") >> 1


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler: ``$CC``, or one on ``PATH``; None without."""
    if command := os.environ.get("CC"):
        return shlex.split(command)
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compile_kernel(folder: Path) -> Path:
    """Compile the kernel to a folder, and return the path of the library.

    Args:
        folder: existing folder of the library.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("there is no C compiler (cc, gcc, clang or $CC)")
    library = folder / LIBRARY_NAME
    # The new library replaces the old one by a rename, since processes may have that one mapped.
    new_library = library.with_suffix(f".{os.getpid()}")
    options = ["-std=c11", "-O3", "-fPIC", "-shared", f"-DKERNEL_VERSION={compute_kernel_version()}"]
    # The wheel of a universal Python on macOS is tagged for both architectures.
    if sysconfig.get_platform().endswith("universal2"):
        options += ["-arch", "arm64", "-arch", "x86_64"]
    result = subprocess.run(  # noqa: S603 - the compiler that the user chose
        [*compiler, *options, "-o", str(new_library), str(SOURCE)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise OSError(f"{compiler[0]} failed: {result.stderr.strip()}")
    new_library.replace(library)
    return library


if __name__ == "__main__":
    compile_kernel(SOURCE.parent)
