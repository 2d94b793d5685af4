"""Upload of a finished store to an object store, file by file.

The manifest is sent last: a folder without one is no store, so nobody reads a partial upload.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import PARTIAL_SUFFIX, read_regular_file, refuse_url
from batchloom.preparation.report.progress import Listener, Note, Progress, log_note
from batchloom.remote import RemoteFolder
from batchloom.store import MANIFEST_NAME, lock_store, read_manifest, wrap_write_errors

_MAX_LISTED = 3
# Files that are sent at a time.
_PARALLEL_FILES = 4


@dataclass(frozen=True, slots=True)
class UploadResult:
    """Result of an upload.

    Attributes:
        path: URL of the uploaded store, without secrets.
        files: number of files of the store.
        bytes: size of these files.
        sent_bytes: part of ``bytes`` that this call sent; 0 if the store was there already.
    """

    path: str
    files: int
    bytes: int
    sent_bytes: int


def upload_store(
    path: str | os.PathLike[str], url: str, *, progress: Callable[[Note | Progress], None] | None = None
) -> UploadResult:
    """Upload a finished store to an object store; a later call resumes it.

    Files that the folder holds with equal content are not sent again. Each sent file is verified, and the manifest is
    the last.

    Args:
        path: folder of the store.
        url: folder in an object store (``s3://bucket/prefix``) that is empty or holds a part of this store.
        progress: callback that gets a :class:`Progress` after each file. An exception in it stops the upload.

    Raises:
        StoreMissingError, StoreError: there is no finished store at ``path``, or it is damaged.
        StoreConflictError: the folder holds another store or other files, or the store is changed meanwhile.
        InputError: the URL is invalid, or cannot be written to.
        OutputError: a file cannot be read or written.
    """
    refuse_url(path, "The store")
    with RemoteFolder(url) as folder:
        return send_store(Path(path), folder, progress or log_note)


def send_store(store: Path, folder: RemoteFolder, listener: Listener) -> UploadResult:
    """Upload a finished store into an open folder; see :func:`upload_store`."""
    counts = read_manifest(store).counts
    manifest = read_regular_file(store / MANIFEST_NAME)
    sizes = _measure_files(store)
    total_bytes = sum(sizes.values())
    remote_files = folder.list_files()
    if _holds_manifest(folder, remote_files, manifest, sizes):
        return UploadResult(folder.redacted_url, len(sizes), total_bytes, 0)

    def report(done: int, found: int) -> None:
        listener(Progress("upload", done, total_bytes, found, counts.documents, counts.tokens, counts.quarantined))

    def send(name: str) -> bool:
        remote_file = remote_files.get(name)
        if remote_file is not None and folder.holds(store / name, name, remote_file):
            return False
        folder.upload(store / name, name)
        return True

    done_bytes = found_bytes = 0
    report(done_bytes, found_bytes)
    with ThreadPoolExecutor(_PARALLEL_FILES, "uploads") as pool:
        jobs = {pool.submit(send, name): size for name, size in sizes.items() if name != MANIFEST_NAME}
        try:
            for job in as_completed(jobs):
                done_bytes += jobs[job]
                found_bytes += 0 if job.result() else jobs[job]
                report(done_bytes, found_bytes)
        except BaseException:
            folder.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # Hours may have passed. The lock keeps other commands from changing the manifest while it is sent.
    with lock_store(store):
        if read_regular_file(store / MANIFEST_NAME) != manifest:
            raise StoreConflictError(f"{store} was changed during its upload; give the command again.")
        if not _holds_manifest(folder, folder.list_files(), manifest, sizes):
            folder.upload(store / MANIFEST_NAME, MANIFEST_NAME)
    report(total_bytes, found_bytes)
    return UploadResult(folder.redacted_url, len(sizes), total_bytes, total_bytes - found_bytes)


def _measure_files(store: Path) -> dict[str, int]:
    """Return the sizes of a store's files by name, without unfinished and hidden ones."""
    with wrap_write_errors(store):
        sizes = {path.relative_to(store).as_posix(): path.stat().st_size for path in store.rglob("*") if path.is_file()}
    return {name: sizes[name] for name in sorted(sizes) if not name.endswith(PARTIAL_SUFFIX) and "/." not in f"/{name}"}


def _holds_manifest(folder: RemoteFolder, remote_files: Iterable[str], manifest: bytes, names: Iterable[str]) -> bool:
    """Return whether a folder holds this manifest; refuse other manifests and files."""
    remote_names = set(remote_files)
    if MANIFEST_NAME in remote_names:
        if folder.read(MANIFEST_NAME) == manifest:
            return True
        raise StoreConflictError(f"{folder.redacted_url} holds another store; choose another URL.")
    refuse_files(folder, remote_names.difference(names), "URL")
    return False


def refuse_files(folder: RemoteFolder, names: Iterable[str], option: str) -> None:
    """Refuse a remote folder that holds files of something else."""
    if unknown_names := sorted(names):
        listed_files = ", ".join(name or "a file of that name" for name in unknown_names[:_MAX_LISTED])
        more = ", ..." if len(unknown_names) > _MAX_LISTED else ""
        raise StoreConflictError(
            f"{folder.redacted_url} is not empty ({listed_files}{more}) and is not a store; choose another {option}."
        )
