"""Cached copies of read-once inputs: standard input and web files without ranges.

The modification time of a copy is derived from its content, so that the same bytes are the same
input again, and a stopped job can resume.
"""

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Self, final

import xxhash

from batchloom.core.addresses import redact_url
from batchloom.core.errors import InputError
from batchloom.core.files import wrap_os_errors
from batchloom.remote import PAGE_CACHE, RemoteFault, iter_web_file, make_remote_error, retry_transient

_CHUNK_BYTES = 1 << 20
_MAX_WEB_ATTEMPTS = 3
# Archives are detected by name, and standard input has none: (offset, magic bytes) give the suffix.
_ARCHIVE_MAGIC = {(0, b"PK\x03\x04"): ".zip", (257, b"ustar"): ".tar"}


@final
class Spool:
    """Context manager with a temporary folder for the copies, removed at the end.

    Args:
        folder: parent folder; None: the system's temporary folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._spool_folder = folder, Path()
        self._created_folders: list[Path] = []
        self._standard_input = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        PAGE_CACHE.forget()
        if self._spool_folder.name:
            shutil.rmtree(self._spool_folder, ignore_errors=True)
        for folder in self._created_folders:
            # Folders created for the spool are removed with it, unless others have put files there since.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def copy_standard_input(self) -> str:
        """Return the path of a copy of standard input, which the first call reads.

        Raises:
            InputError: standard input is closed or a terminal.
            OutputError: there is no room for the copy.
        """
        if not self._standard_input:
            if sys.stdin is None or sys.stdin.closed:
                raise InputError("Standard input is closed; name a file, or pipe data in.")
            if sys.stdin.isatty():
                raise InputError("Standard input is a terminal; name a file, or pipe data in.")
            chunks = iter(lambda: sys.stdin.buffer.read(_CHUNK_BYTES), b"")
            self._standard_input = self._store_copy("stdin", chunks)
        return self._standard_input

    def copy_web_file(self, url: str) -> str:
        """Return the path of a copy of a web file from a server without range requests.

        Raises:
            DownloadError: the download is incomplete.
            OutputError: there is no room for the copy.
        """
        name = PurePosixPath(redact_url(url)).name or "download"
        result = retry_transient(lambda: self._store_copy(name, iter_web_file(url)), _MAX_WEB_ATTEMPTS)
        if isinstance(result, RemoteFault):
            raise make_remote_error(result, url)
        return result

    def holds(self, path: str) -> bool:
        """Return whether a path is one of these copies; users do not know their paths."""
        return bool(self._spool_folder.name) and path.startswith(f"{self._spool_folder}{os.sep}")

    def sweep(self) -> None:
        """Delete leftovers of killed runs in the parent folder; only one run may use it."""
        if self._folder is not None and self._folder.is_dir():
            for leftover in self._folder.iterdir():
                # From Python 3.12 on, mkdtemp returns an absolute path for a relative folder.
                if leftover.name != self._spool_folder.name:
                    shutil.rmtree(leftover, ignore_errors=True)

    def _store_copy(self, name: str, chunks: Iterable[bytes]) -> str:
        stream = iter(chunks)
        first = next(stream, b"")
        archives = _ARCHIVE_MAGIC.items()
        ending = next((end for (at, magic), end in archives if first.startswith(magic, at)), "")
        path = self._make_path(name if PurePosixPath(name).suffix else name + ending)
        digest = xxhash.xxh3_64()
        with wrap_os_errors("write", path):
            file = path.open("wb")
        with file:
            for chunk in itertools.chain([first], stream):
                digest.update(chunk)
                with wrap_os_errors("write", path):
                    file.write(chunk)
            with wrap_os_errors("write", path):
                file.flush()
        stamp = digest.intdigest() >> 4
        os.utime(path, ns=(stamp, stamp))
        return str(path)

    def _make_path(self, name: str) -> Path:
        if not self._spool_folder.name:
            with wrap_os_errors("write", self._folder or Path(tempfile.gettempdir())):
                if self._folder is not None:
                    missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._created_folders = missing
                self._spool_folder = Path(tempfile.mkdtemp(prefix="batchloom-", dir=self._folder))
        subfolder = self._spool_folder / str(len(list(self._spool_folder.iterdir())))
        subfolder.mkdir()
        return subfolder / name
