"""Local work folder of a remote store, which one run locks until the upload ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import xxhash

from batchloom.core.addresses import redact_url
from batchloom.core.errors import StoreConflictError
from batchloom.core.files import find_cache_folder, lock_exclusively
from batchloom.store import wrap_write_errors
from batchloom.store.write import make_folder

# Names in the work folder.
STORE_NAME = "store"
_LOCK_NAME = "lock"


def default_work_folder(url: str) -> Path:
    """Return the default local work folder for a URL, below the user's cache."""
    name = xxhash.xxh3_64_hexdigest(redact_url(url).rstrip("/").encode())
    return find_cache_folder() / "prepare" / name


@contextlib.contextmanager
def lock_work_folder(folder: Path) -> Iterator[None]:
    """Lock a work folder; delete it afterwards if it holds no store."""
    make_folder(folder)
    with wrap_write_errors(folder):
        unknown_names = sorted({path.name for path in folder.iterdir()} - {STORE_NAME, _LOCK_NAME})
    if unknown_names:
        raise StoreConflictError(
            f"The work folder {folder} holds other files ({unknown_names[0]}); choose another --work."
        )
    path = folder / _LOCK_NAME
    with wrap_write_errors(path):
        lock = path.open("a")
    with lock:
        lock_exclusively(
            lock.fileno(),
            path,
            busy=lambda: f"Another run is using {folder}; wait for it, or choose another --work.",
            ended=f"Another run in {folder} has just ended; give the command again.",
            unable=lambda why: f"Cannot lock {folder}: {why}; choose a --work on a file system with locks.",
        )
        try:
            yield
        finally:
            if not (folder / STORE_NAME).exists():
                # Delete it while locked, so that no other run begins in it.
                with contextlib.suppress(OSError):
                    path.unlink()
                    folder.rmdir()
