"""Inputs that can be read only once, kept in a file: standard input, web servers without ranges.

The modification time of such a file is made of its content, so that the same bytes given again
are the same input, and a job that was stopped can go on.
"""

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Self, final

import xxhash

from batchloom.core.addresses import shown
from batchloom.core.errors import InputError, OutputError
from batchloom.core.files import because
from batchloom.remote import KEPT, fault_of, patience, their_errors, told, whole

_CHUNK = 1 << 20
_WEB_TRIES = 3
# Archives are told by their names, and standard input has none: where these stand, and the ending.
_ARCHIVES = {(0, b"PK\x03\x04"): ".zip", (257, b"ustar"): ".tar"}


@final
class Spool:
    """A folder of its own for such files, gone at the end; use as a context manager.

    Args:
        folder: where to make it; None: where the system keeps its temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._own = folder, Path()
        self._made: list[Path] = []
        self._standard_input = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        KEPT.forget()
        if self._own.name:
            shutil.rmtree(self._own, ignore_errors=True)
        for folder in self._made:
            # What was made for it alone goes with it; what others filled since then stays.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def standard_input(self) -> str:
        """The path of a copy of standard input, which is read to its end when first asked for.

        Raises:
            InputError: there is none, or a person sits at it.
            OutputError: there is no room for the copy.
        """
        if not self._standard_input:
            if sys.stdin is None or sys.stdin.closed:
                raise InputError("Standard input is closed; name a file, or pipe data in.")
            if sys.stdin.isatty():
                raise InputError("Standard input is a terminal; name a file, or pipe data in.")
            chunks = iter(lambda: sys.stdin.buffer.read(_CHUNK), b"")
            self._standard_input = self._keep("stdin", chunks)
        return self._standard_input

    def web_file(self, url: str) -> str:
        """The path of a copy of a file on the web, for servers that give no stretches of it.

        Raises:
            DownloadError: it did not come whole.
            OutputError: there is no room for the copy.
        """
        for tries in range(1, _WEB_TRIES + 1):
            try:
                return self._keep(PurePosixPath(shown(url)).name or "download", whole(url))
            except OutputError:
                raise
            except their_errors() as error:
                fault = fault_of(error)
            if fault.what != "passing" or tries == _WEB_TRIES:
                break
            time.sleep(patience(tries))
        raise told(fault, url) from None

    def holds(self, path: str) -> bool:
        """Whether a path is one of these copies, which nobody knows by its path."""
        return bool(self._own.name) and path.startswith(f"{self._own}{os.sep}")

    def sweep(self) -> None:
        """Delete what killed runs left beside this spool; only one run may be at work there."""
        if self._folder is not None and self._folder.is_dir():
            for left in self._folder.iterdir():
                if left != self._own:
                    shutil.rmtree(left, ignore_errors=True)

    def _keep(self, name: str, chunks: Iterable[bytes]) -> str:
        stream = iter(chunks)
        first = next(stream, b"")
        archives = _ARCHIVES.items()
        ending = next((end for (at, magic), end in archives if first.startswith(magic, at)), "")
        path = self._place(name if PurePosixPath(name).suffix else name + ending)
        digest = xxhash.xxh3_64()
        with _room(path):
            file = path.open("wb")
        with file:
            for chunk in itertools.chain([first], stream):
                digest.update(chunk)
                with _room(path):
                    file.write(chunk)
            with _room(path):
                file.flush()
        stamp = digest.intdigest() >> 4
        os.utime(path, ns=(stamp, stamp))
        return str(path)

    def _place(self, name: str) -> Path:
        if not self._own.name:
            with _room(self._folder or Path(tempfile.gettempdir())):
                if self._folder is not None:
                    missing = [
                        one for one in (self._folder, *self._folder.parents) if not one.exists()
                    ]
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._made = missing
                self._own = Path(tempfile.mkdtemp(prefix="batchloom-", dir=self._folder))
        place = self._own / str(len(list(self._own.iterdir())))
        place.mkdir()
        return place / name


@contextlib.contextmanager
def _room(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"Cannot keep a copy of an input in {path.parent}: {because(error)}; make room there, or name files."
        ) from error
