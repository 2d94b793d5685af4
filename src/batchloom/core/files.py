"""Files: safe reading, errors with remedies, unfinished files and locks.

Only regular files are read.
"""

import contextlib
import errno
import fcntl
import io
import json
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from batchloom.core.errors import BatchloomError, InputError, OutputError, StoreConflictError
from batchloom.core.settings import find_nearest

# A one-letter scheme is a drive.
_URL_PATTERN = re.compile(r"(?:^|/)([A-Za-z][A-Za-z0-9+.\-]+):/")
# A URL whose second slash is missing.
_SHORT_URL_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/(?=[^/])")
# Exceptions that msgspec's JSON decoder may raise, despite its annotations.
JSON_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NOT_REGULAR_REMEDY = "it is a pipe or a device, and only regular files are read; write its output to a file first"
_REMEDIES = {
    errno.EACCES: "permission denied; change its owner or its mode (chmod u+rX)",
    errno.EPERM: "permission denied; change its owner or its mode (chmod u+rX)",
    errno.EISDIR: "it is a folder, not a file; name a file",
    errno.ENOTDIR: "a part of the path is a file, not a folder; check the path",
    errno.ELOOP: "its symbolic links form a loop; name the file by its real path",
    errno.ENAMETOOLONG: "the path or a name in it is too long; choose a shorter one",
    errno.EMFILE: "this process has too many files open; raise its limit: ulimit -n 4096",
    errno.ENFILE: "this machine has too many files open; stop programs that hold many open",
    errno.EIO: "the disk or the network failed (input/output error); look at dmesg, or use a copy on another disk",
    errno.ESTALE: "the network file system lost the file; mount the file system again",
    errno.ENOSPC: "the disk is full; free some space, then give the same command again",
    errno.ENOMEM: "out of memory; give the process more memory",
}
# Remedies for output files that cannot be written.
WRITE_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space, then give the same command again to resume",
    errno.EDQUOT: "the disk quota is used up; free some space, then give the same command again",
    errno.EACCES: "permission denied; choose another --out or change its owner",
    errno.EPERM: "permission denied; choose another --out or change its owner",
    errno.EROFS: "the file system is read-only; choose another --out",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another --out",
    errno.EEXIST: "a file is in the way; choose another --out",
    errno.EFBIG: "a file would be larger than the file system or `ulimit -f` allows; raise the limit, choose a smaller "
    "--tokens-per-shard, or choose another --out",
    errno.ELOOP: "its symbolic links form a loop; choose another --out",
    errno.ENAMETOOLONG: "the path or a name in it is too long; choose a shorter --out",
    errno.EIO: "the disk failed (input/output error); look at dmesg, or choose an --out on another disk",
    errno.EISDIR: "a folder is in the way; choose another --out",
    errno.ENOENT: "a parent folder is missing or cannot be created; choose another --out",
}
_MAX_SIBLINGS = 4096
# Settings files are a few kilobytes.
_MAX_SETTINGS_BYTES = 1 << 20
# Suffix of unfinished files.
PARTIAL_SUFFIX = ".partial"


def describe_os_error(error: OSError, special: Mapping[int, str] | None = None) -> str:
    """Return the reason and remedy of an OSError, for the middle of a sentence.

    ``special`` holds other remedies by errno.
    """
    remedies = {**_REMEDIES, **(special or {})}
    return remedies.get(error.errno or 0, to_mid_sentence(error.strerror or str(error)))


def to_mid_sentence(reason: str) -> str:
    """Return a reason for the middle of a sentence; ``CRC check failed`` stays."""
    plain = reason.rstrip(".")
    return plain if plain[1:2].isupper() else plain[:1].lower() + plain[1:]


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; reject pipes and devices, which could block.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, _NOT_REGULAR_REMEDY, os.fspath(path))
    return file


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_regular_file(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than ``most``.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            fact = f"it has {size:,} bytes, and at most {most:,} are read; check the path"
            raise OSError(errno.EINVAL, fact, os.fspath(path))
        return file.read()


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_object(path: Path, most: int | None = _MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``most`` bytes; None for any size.

    Raises:
        ValueError: there is none; the message continues a sentence that begins with the file's name.
    """
    try:
        value = json.loads(read_regular_file(path, most))
    except FileNotFoundError as error:
        raise ValueError("does not exist") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, not a JSON object")  # noqa: TRY004
    return value


class RangeFile(io.RawIOBase):
    """Read-only file over a function that returns the bytes ``[start, stop)``.

    Args:
        size: number of bytes.
        read_range: returns a byte range, or its beginning.
    """

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._read_range = read_range
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next byte, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return at most ``size`` bytes, empty only at the end."""
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        data = self._read_range(self._position, stop) if stop > self._position else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def release_pages(array: Any) -> None:
    """Release the pages of a mapped numpy array; access maps them again.

    Otherwise all of a large file that is read sequentially would count as the process's memory.
    """
    base = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    if base is not None:
        base.madvise(mmap.MADV_DONTNEED)


def make_absolute(path: str) -> str:
    """Return ``os.path.abspath(path)``, several times as fast for a normalized path."""
    if not path or path[-1] == "/" or path[0] == "." or "//" in path or "/." in path:
        return os.path.abspath(path)
    return path if path[0] == "/" else f"{os.getcwd().rstrip('/')}/{path}"


def decode_file_name(name: str) -> str:
    """Return a file name as text; bytes that are not UTF-8 become U+FFFD."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "replace")


def refuse_url(location: str | os.PathLike[str], subject: str, *, may_be_remote: bool = False) -> None:
    """Reject a URL in place of a local path, without repeating its secrets.

    ``location`` may be a ``Path``, which drops one of the two slashes; ``subject`` names its use. With
    ``may_be_remote`` a URL of two slashes is allowed, and was accepted before.

    Raises:
        InputError: it is a URL.
    """
    text = os.fspath(location)
    match = _URL_PATTERN.search(text)
    if match and match[1].lower() != "file" and not os.path.lexists(text[: match.end(1) + 1]):
        if may_be_remote:
            raise InputError(
                f"{subject} begins with {match[1]}:/ and one slash, and a URL has two: write it as text, {match[1]}://..."
            )
        raise InputError(
            f"{subject} is a URL ({match[1]}://...), and must be a local path: copy the remote data to this machine "
            "first."
        )


def describe_missing_path(path: str, remedy: str) -> str:
    """Return a sentence about a path that does not exist, with a suggestion.

    ``remedy`` says what to name instead, without a full stop.
    """
    return f"There is no file or folder {path}: {remedy}{suggest_path(path)}"


def suggest_path(path: str) -> str:
    """Return the end of a sentence about a missing path, with a similar path if any."""
    if os.path.islink(path):
        return "; it is a broken link."
    if match := _SHORT_URL_PATTERN.match(path):
        return f"; did you mean '{match[1]}://{path[match.end() :]}'?"
    parent, name = os.path.split(os.path.normpath(path))
    rest = ""
    while parent and not os.path.exists(parent):
        rest = os.path.join(name, rest)
        parent, name = os.path.split(parent)
    try:
        with os.scandir(parent or ".") as scan:
            siblings = sorted(entry.name for entry in islice(scan, _MAX_SIBLINGS))
    except OSError:
        return "."
    nearest = find_nearest(name, siblings)
    if nearest is None:
        return "."
    similar_path = os.path.join(parent, nearest)
    complete_path = os.path.join(similar_path, rest).rstrip("/")
    return f"; did you mean {complete_path if os.path.exists(complete_path) else similar_path!r}?"


@contextlib.contextmanager
def wrap_os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError about ``path`` into one sentence with its remedy.

    ``action`` is the failed action, for example "write" for "Cannot write".

    Raises:
        OutputError: replaces any OSError of the system raised inside.
    """
    try:
        yield
    except BatchloomError:
        # Some BatchloomErrors are OSErrors with a complete message.
        raise
    except OSError as error:
        raise OutputError(f"Cannot {action} {path}: {describe_os_error(error, WRITE_REMEDIES)}.") from error


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a partial file that takes the place of ``path`` at the end.

    Raises:
        OutputError: the file cannot be written.
    """
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    with wrap_os_errors("write", path):
        yield partial_path
        partial_path.rename(path)


def find_cache_folder() -> Path:
    """Return batchloom's folder in the user's cache, which may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        home = Path(os.path.expanduser("~"))
        # The user of a service or a container may have no home folder. Making one would surprise them.
        has_home = home.is_absolute() and home.is_dir()
        cache = str(home / ".cache") if has_home else f"{os.environ.get('TMPDIR', '/tmp')}/cache-{os.getuid()}"  # noqa: S108 - no other place
    return Path(cache) / "batchloom"


def lock_exclusively(
    descriptor: int,
    path: Path,
    *,
    busy: Callable[[], str],
    ended: str,
    unable: Callable[[str], str] | None = None,
) -> None:
    """Lock an open file or folder until it is closed or the process dies.

    Args:
        descriptor: descriptor of the file or folder.
        path: the path it was opened by.
        busy: returns the message if another process holds the lock.
        ended: message if the previous holder has deleted or renamed the path meanwhile: the open file
            then has no lock, and may be the other process's finished output.
        unable: returns the message for a reason if the file system has no locks; None re-raises the OSError.

    Raises:
        StoreConflictError: another process holds the lock, or has just ended.
        OutputError: the file cannot be locked.
    """
    try:
        # The kernel releases it when the process dies, even if it is killed.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreConflictError(busy()) from error
    except OSError as error:
        if unable is None:
            raise
        raise OutputError(unable(describe_os_error(error))) from error
    if not has_same_inode(path, descriptor):
        raise StoreConflictError(ended)


def has_same_inode(path: Path, descriptor: int) -> bool:
    """Return whether the open file still has this path."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(descriptor))
