"""Compilation and loading of the native libraries.

Each C source is in the folder of the module that calls it through ctypes.

The build hook runs this file by its path, with the standard library alone.

``python -m batchloom.core.native`` compiles the libraries of an installed package again.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_LOG = logging.getLogger("batchloom")
_PACKAGE = Path(__file__).parents[1]
KERNEL_SOURCE = _PACKAGE / "batches/assembly/kernel.c"
WORDS_SOURCE = _PACKAGE / "text/words.c"
MAPPED_FILES_SOURCE = _PACKAGE / "store/format/mapped_files.c"
SOURCES = (KERNEL_SOURCE, WORDS_SOURCE, MAPPED_FILES_SOURCE)


def get_library_path(source: Path, folder: Path) -> Path:
    """Return the path of the library of a source in a folder."""
    return folder / f"libbatchloom_{source.stem}.so"


def compute_library_version(source: Path) -> int:
    """Return a number that identifies a source and its libraries."""
    return int.from_bytes(hashlib.blake2b(source.read_bytes(), digest_size=4).digest(), "little") >> 1


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler: ``$CC``, or one on ``PATH``; None without."""
    if command := os.environ.get("CC"):
        return shlex.split(command)
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compile_library(source: Path, folder: Path) -> Path:
    """Compile a source to a folder, and return the path of the library.

    Args:
        source: the C source.
        folder: existing folder of the library.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("there is no C compiler (cc, gcc, clang or $CC)")
    library = get_library_path(source, folder)
    # The new library replaces the old one by a rename, since processes may have that one mapped.
    new_library = library.with_suffix(f".{os.getpid()}")
    options = ["-std=c11", "-O3", "-fPIC", "-shared", f"-DKERNEL_VERSION={compute_library_version(source)}"]
    # The wheel of a universal Python on macOS is tagged for both architectures.
    if sysconfig.get_platform().endswith("universal2"):
        options += ["-arch", "arm64", "-arch", "x86_64"]
    result = subprocess.run(  # noqa: S603 - the compiler that the user chose
        [*compiler, *options, "-o", str(new_library), str(source)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise OSError(f"{compiler[0]} failed: {result.stderr.strip()}")
    new_library.replace(library)
    return library


def load_library(path: Path, source: Path) -> ctypes.CDLL:
    """Load a library that was built from this version's source.

    Args:
        path: the library, as ``compile_library`` returns it.
        source: its C source.

    Raises:
        OSError: the file is missing, damaged, or belongs to another platform or version.
    """
    library = ctypes.CDLL(str(path))
    try:
        version = library.batchloom_kernel_version
    except AttributeError as error:
        raise OSError(str(error)) from error
    version.restype = ctypes.c_int64
    if version() != compute_library_version(source):
        raise OSError(f"{path} was built from another version of {source.name}")
    return library


def find_library(source: Path, fallback: str) -> ctypes.CDLL | None:
    """Return the library of this installation; None without a usable one.

    The reason is logged.

    Args:
        source: the C source, which the library is next to.
        fallback: what happens without the library, for the log.
    """
    path = get_library_path(source, source.parent)
    if not path.exists():
        _LOG.info(
            "%s: %s is missing, because the installation had no C compiler. Install one and run python -m "
            "batchloom.core.native.",
            fallback,
            path.name,
        )
        return None
    if sys.byteorder != "little":
        _LOG.info("%s: the native library is for little-endian machines.", fallback)
        return None
    try:
        return load_library(path, source)
    except OSError as error:
        _LOG.warning(
            "%s: the native library cannot be used: %s. Run python -m batchloom.core.native, or install batchloom "
            "again.",
            fallback,
            error,
        )
        return None


if __name__ == "__main__":
    try:
        for path in SOURCES:
            compile_library(path, path.parent)
    except OSError as error:
        sys.exit(f"The native libraries are not built: {error}")
