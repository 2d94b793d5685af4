"""Probe process that opens Parquet and Arrow files first, as parsing may crash.

pyarrow is native code: a damaged file can end its process without an exception. A worker's death is
reported by its coordinator. Every other process lets a probe process open each table and read its
first rows before it opens the table itself. The probe requests the bytes it needs, so a remote
file is transferred once.
"""

import atexit
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import BinaryIO, cast, final

from batchloom.core.errors import DamagedFileError, InputError
from batchloom.core.files import RangeFile
from batchloom.core.process_state import is_worker
from batchloom.sources.files.part_stream import ReadRules, Source

# The search path is set before anything of batchloom is imported.
_START_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from batchloom.sources.formats.table_probe import main; main(int(sys.argv[1]))"
)


def require_no_crash(source: Source, file: BinaryIO) -> None:
    """Check that opening a table does not crash the process; workers skip this.

    Exceptions of pyarrow pass, as the caller gets them again.
    """
    if not is_worker():
        _probe.check(source, file)
        file.seek(0)


@final
class _ProbeProcess:
    """Probe process of this process, started for the first table."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._survived: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()

    def check(self, source: Source, file: BinaryIO) -> None:
        key = (source.path, source.size, source.mtime_ns)
        with self._lock:
            if key in self._survived:
                return
            status = self._ask(source, file)
            if status == -signal.SIGKILL:
                # A parser does not kill its own process, so something else did.
                raise InputError(
                    f"{source.name} cannot be read: the process that opened it was killed (out of memory?). Give the "
                    "job more memory, then the same command again."
                )
            if status is not None:
                raise DamagedFileError(
                    f"{source.name} is damaged or has encrypted columns: the parser of {source.kind} files crashed "
                    f"on it ({signal.Signals(-status).name if status < 0 else f'exit code {status}'}). "
                    "Write the file again from its source, without encryption, or leave it out."
                )
            self._survived.add(key)

    def _ask(self, source: Source, file: BinaryIO) -> int | None:
        """Let the probe open a table; return its exit status if it crashed, else None."""
        if self._process is None or self._pipe is None:
            self._process, self._pipe = _start_probe()
            atexit.register(self.close)
        try:
            self._pipe.send(source)
            # Both processes import pyarrow at the same time.
            importlib.import_module("batchloom.sources.formats.table_format")
            while (request := self._pipe.recv()) is not None:
                start, stop = request
                file.seek(start)
                self._pipe.send_bytes(file.read(stop - start))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._process.wait()
            self.close()
            return status
        except BaseException:
            self.close()  # the probe would wait forever for its bytes
            raise
        return None

    def close(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
            self._process = self._pipe = None
            atexit.unregister(self.close)


_probe = _ProbeProcess()


def _start_probe() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a probe process and return it with its pipe."""
    warnings = (f"-W{option}" for option in sys.warnoptions)
    path = (entry for entry in sys.path if isinstance(entry, str))
    parent_end, child_end = Pipe()
    with child_end:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [
                os.fsdecode(get_executable()),
                *warnings,
                "-c",
                _START_CODE,
                str(child_end.fileno()),
                *path,
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(child_end.fileno(),),
            # A Ctrl-C in the terminal must reach only the command, which ends its probe.
            process_group=0,
        )
    return process, parent_end


def main(descriptor: int) -> None:
    """Open the tables that arrive through a pipe and answer each, until it closes."""
    from batchloom.sources.formats.table_format import TableReader

    with Connection(descriptor) as pipe:
        while True:
            try:
                source = pipe.recv()
            except EOFError:
                return

            def request_range(start: int, stop: int) -> bytes:
                pipe.send((start, stop))
                return pipe.recv_bytes()

            file = cast("BinaryIO", RangeFile(source.size, request_range))
            with contextlib.suppress(Exception), TableReader(source, file) as table:
                first = table.starts[0]
                next(table.read(first, first + 1, ReadRules(text_field=None)), None)
            pipe.send(None)
