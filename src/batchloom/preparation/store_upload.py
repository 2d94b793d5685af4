"""Upload of a finished store to an object store, file by file.

The manifest is sent last. A folder without one is no store, so no reader opens a partial upload.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from batchloom.core.errors import StoreConflictError, StoreError
from batchloom.core.files import PARTIAL_SUFFIX, read_regular_file, refuse_url
from batchloom.preparation.report.progress import Listener, Note, Progress, log_note
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.store import MANIFEST_NAME, list_generation_files, read_manifest, wrap_write_errors

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
    store_manifest = read_manifest(store)
    counts = store_manifest.counts
    manifest = read_regular_file(store / MANIFEST_NAME)
    sizes = _measure_files(store)
    if missing_names := sorted(list_generation_files(store_manifest) - sizes.keys()):
        raise StoreError(f"{store} lacks {missing_names[0]}. Run batchloom check on the store.")
    total_bytes = sum(sizes.values())
    remote_files = folder.list_files()
    if _holds_manifest(folder, remote_files, manifest, sizes):
        return UploadResult(folder.redacted_url, len(sizes), total_bytes, 0)

    def report(done: int, found: int) -> None:
        listener(Progress("upload", done, total_bytes, found, counts.documents, counts.tokens, counts.quarantined))

    verified_files: dict[str, RemoteFile] = {}

    def send(name: str) -> bool:
        remote_file = remote_files.get(name)
        if remote_file is not None and folder.holds(store / name, name, remote_file):
            verified_files[name] = remote_file
            return False
        verified_files[name] = folder.upload(store / name, name)
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
    # Hours may have passed, in which another command may have changed the store, or sent other files to the folder.
    _check_unchanged(store, manifest)
    remote_files = folder.list_files()
    if not _holds_manifest(folder, remote_files, manifest, sizes):
        for name, verified_file in verified_files.items():
            if not _is_same_object(remote_files.get(name), verified_file):
                raise StoreConflictError(
                    f"{folder.redacted_url}/{name} is not the file that was sent: another upload changes this folder. "
                    "Wait for its end, or choose another URL."
                )
        folder.upload(store / MANIFEST_NAME, MANIFEST_NAME)
    _check_unchanged(store, manifest)
    report(total_bytes, found_bytes)
    return UploadResult(folder.redacted_url, len(sizes), total_bytes, total_bytes - found_bytes)


def _check_unchanged(store: Path, manifest: bytes) -> None:
    """Refuse a store that another command has changed since its manifest was read."""
    if read_regular_file(store / MANIFEST_NAME) != manifest:
        raise StoreConflictError(f"{store} was changed during its upload; give the command again.")


def _is_same_object(listed: RemoteFile | None, verified: RemoteFile) -> bool:
    """Return whether a listed file is the verified one, as far as the listing tells."""
    if listed is None or listed.size != verified.size:
        return False
    # The listings of some file systems have no checksums.
    return listed.checksum in ("", verified.checksum) or not verified.checksum


def _measure_files(store: Path) -> dict[str, int]:
    """Return the sizes of a store's files by name, without unfinished and hidden ones."""
    sizes = {}
    with wrap_write_errors(store):
        # A subset may be a link to another disk, which Path.rglob does not follow.
        for folder, _, file_names in os.walk(store, followlinks=True):
            for name in file_names:
                path = Path(folder, name)
                sizes[path.relative_to(store).as_posix()] = path.stat().st_size
    return {name: sizes[name] for name in sorted(sizes) if not name.endswith(PARTIAL_SUFFIX) and "/." not in f"/{name}"}


def _holds_manifest(folder: RemoteFolder, remote_files: Iterable[str], manifest: bytes, names: Iterable[str]) -> bool:
    """Return whether a folder holds this manifest; refuse other manifests and files."""
    remote_names = set(remote_files)
    if MANIFEST_NAME in remote_names:
        remote_manifest = folder.read(MANIFEST_NAME) or b""
        if remote_manifest == manifest:
            return True
        if not is_beginning(remote_manifest, manifest):
            raise StoreConflictError(
                f"{folder.redacted_url} holds another store, or another generation of this one; choose another URL."
            )
    refuse_files(folder, remote_names.difference(names), "URL")
    return False


def is_beginning(remote_manifest: bytes, manifest: bytes) -> bool:
    """Return whether a manifest was sent in part: some file systems leave one so."""
    return len(remote_manifest) < len(manifest) and manifest.startswith(remote_manifest)


def refuse_files(folder: RemoteFolder, names: Iterable[str], option: str) -> None:
    """Refuse a remote folder that holds files of something else."""
    if unknown_names := sorted(names):
        listed_files = ", ".join(name or "a file of that name" for name in unknown_names[:_MAX_LISTED])
        more = ", ..." if len(unknown_names) > _MAX_LISTED else ""
        raise StoreConflictError(
            f"{folder.redacted_url} is not empty ({listed_files}{more}) and is not a store; choose another {option}, "
            "or delete these files if an interrupted upload left them."
        )
