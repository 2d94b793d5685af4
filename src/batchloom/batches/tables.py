"""The sequences-per-pool table: counted once beside the training, kept by fingerprint.

A table is a pure function of a plan's ``table_identity``, so it is cached beside the store
(``STORE/plans/NAME.counts``) or, where the store is read-only, in the user's cache folder. One
process of a node counts it, under a lock that dies with its holder; the others wait for the
file. Small plans are counted in place when asked: that takes milliseconds.
"""

import fcntl
import hashlib
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.fingerprint import canonical, fingerprint
from batchloom.plan.plan import Plan

# Up to this many pools (a million documents) counting takes less time than starting a process.
IN_PLACE = 16

_MAGIC = b"BLMPOOLS"
_HEADER = struct.Struct("<8sQ16s")
_FOLDER = "plans"


def table_name(plan: Plan) -> str:
    """File name of a plan's table."""
    return fingerprint(plan.table_identity) + ".counts"


def table_folders(store_path: Path) -> list[Path]:
    """Folders a table may lie in: beside the store, else in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    beside = store_path if store_path.is_dir() else store_path.parent
    return [beside / _FOLDER, cache / "batchloom" / _FOLDER]


def load_table(plan: Plan, folders: list[Path]) -> bool:
    """Let the plan adopt its cached table; False when there is none yet.

    Raises:
        StoreError: a file under the table's name that is not one.
    """
    for folder in folders:
        path = folder / table_name(plan)
        try:
            data = path.read_bytes()
        except OSError:
            continue  # Not there, or a folder this user may not read: as good as not counted.
        plan.adopt_counts(_decode(data, path))
        return True
    return False


def write_table(
    plan: Plan, folders: list[Path], progress: Callable[[int, int], None] | None = None
) -> Path:
    """Count all pools and write the table to the first folder that can be written.

    Raises:
        StoreError: none of the folders can be written.
    """
    data = _encode(plan.count_all(progress))
    reasons = []
    for folder in folders:
        path = folder / table_name(plan)
        aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(data)
            aside.replace(path)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        return path
    raise StoreError(
        "The table of sequences per pool cannot be kept (" + "; ".join(reasons) + "). "
        "Make one of these folders writable, or set XDG_CACHE_HOME to one that is."
    )


def wait_for_table(
    plan: Plan, folders: list[Path], progress: Callable[[int, int], None] | None = None
) -> None:
    """Return when the plan has its counts: adopted from another process, or counted here."""
    while not plan.has_counts and not load_table(plan, folders):
        with lock_table(plan, folders) as mine:
            if mine and not load_table(plan, folders):
                write_table(plan, folders, progress)
            elif not mine:
                time.sleep(0.05)


@contextmanager
def lock_table(plan: Plan, folders: list[Path]) -> Iterator[bool]:
    """Whether this process is the one that counts; the lock dies with the process."""
    descriptor = _lock_file(table_name(plan), folders)
    if descriptor is None:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _lock_file(name: str, folders: list[Path]) -> int | None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            continue  # Read-only: the next folder.
    return None


def count_beside(store_path: str, split: str, spec: dict[str, object]) -> None:
    """Start counting in a process of its own, at low priority; see :mod:`batchloom.batches.count`.

    Should it fail, whoever needs the table counts it and meets the reason.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "batchloom.batches.count"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    request = canonical({"path": store_path, "split": split, "spec": spec})
    threading.Thread(target=process.communicate, args=(request,), daemon=True).start()


def _encode(counts: NDArray[np.int64]) -> bytes:
    body = counts.astype("<u4").tobytes()
    return _HEADER.pack(_MAGIC, len(counts), hashlib.blake2b(body, digest_size=16).digest()) + body


def _decode(data: bytes, path: Path) -> NDArray[np.int64]:
    if len(data) >= _HEADER.size:
        magic, count, digest = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        same = hashlib.blake2b(body, digest_size=16).digest() == digest
        if magic == _MAGIC and len(body) == 4 * count and same:
            return np.frombuffer(body, "<u4").astype(np.int64)
    raise StoreError(f"{path} is damaged; delete it, it will be made again.")
