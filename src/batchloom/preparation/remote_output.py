"""A store that lies elsewhere: whose it is, what of it is there, and in which order the rest goes there.

Its manifest goes last: a folder without one is no store. While it grows, an object in it says which
job it belongs to, so that no other job mixes with it, and the same job goes on, from any machine.
"""

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, final

import msgspec

from batchloom.core.errors import StoreConflictError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS
from batchloom.core.partial_files import PARTIAL_SUFFIX
from batchloom.preparation.rerun import describe_job_differences
from batchloom.preparation.settings import Recipe
from batchloom.preparation.units import JobIdentity
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.store import (
    MANIFEST_NAME,
    PAGE_NAME,
    REPORT_NAME,
    WORK_NAME,
    Manifest,
    wrap_write_errors,
)
from batchloom.store.format import (
    LENGTHS_CHECKSUMS_NAME,
    LENGTHS_NAME,
    PROCESSOR_NAME,
    QUARANTINE_NAME,
    SHARD_NAME,
    SUBSETS,
    TOKENIZER_NAME,
    decode_manifest,
)
from batchloom.store.write import make_folder

OWNER_NAME = f"{WORK_NAME}/job.json"
# What a job sends: nothing else is deleted for another one.
_STORE_FILE = re.compile(
    "|".join(
        [
            *map(
                re.escape,
                (
                    *(MANIFEST_NAME, TOKENIZER_NAME, PROCESSOR_NAME),
                    *(QUARANTINE_NAME, REPORT_NAME, PAGE_NAME),
                ),
            ),
            rf"({'|'.join(SUBSETS)})/({re.escape(LENGTHS_NAME)}|{re.escape(LENGTHS_CHECKSUMS_NAME)}|{SHARD_NAME.pattern}\.[a-z0-9]+)",
        ]
    )
)
_MAX_LISTED = 3
_REMOTE_THREADS = 4
_WAIT_SECONDS = 0.5


class StoreOwner(msgspec.Struct, frozen=True):
    """The object that names the job a growing store belongs to.

    ``tokenizer`` is the fingerprint of a tokenizer that lies in a file; None for others.
    """

    job: JobIdentity
    tokenizer: str | None = None


class UploadRecord(NamedTuple):
    """What is known of a file that lies elsewhere: its name there, its bytes, how it was listed, and its time here."""

    name: str
    size: int
    mark: str
    mtime_ns: int


def sort_for_upload(names: Iterable[str]) -> list[str]:
    """The files of a finished store in the order they go elsewhere: subsets, what says more of them, the manifest.

    What is no file of a store (work, files half written, hidden ones) is left out.
    """
    ranks = {name: rank for rank, name in enumerate(SUBSETS)}
    store_files = [
        name
        for name in names
        if not name.endswith(PARTIAL_SUFFIX) and not any(path_part.startswith(".") for path_part in name.split("/"))
    ]

    def rank(name: str) -> tuple[bool, int, str]:
        return name == MANIFEST_NAME, ranks.get(name.partition("/")[0], len(ranks)), name

    return sorted(store_files, key=rank)


def claim_folder(
    remote_folder: RemoteFolder,
    files: dict[str, RemoteFile],
    owner: StoreOwner,
    recipe: Recipe | None,
    *,
    restart: bool = False,
) -> None:
    """Make a folder elsewhere this job's, or make sure that it is.

    Where the store can (S3 and Google's can), of two jobs at the same time one alone gets it.

    Args:
        remote_folder: the folder.
        files: what lies there, and no finished store.
        owner: this job.
        recipe: its recipe; None for synthetic data.
        restart: whether unfinished work of another job gives way.

    Raises:
        StoreConflictError: it is another job's, or holds something else.
        OutputError: it cannot be read or written.
    """
    data = remote_folder.read(OWNER_NAME) if OWNER_NAME in files else None
    if data is None:
        if unknown_files := sorted(files):
            listed_files = ", ".join(name or "a file of that name" for name in unknown_files[:_MAX_LISTED])
            more = ", ..." if len(unknown_files) > _MAX_LISTED else ""
            raise StoreConflictError(
                f"{remote_folder.redacted_url} is not empty ({listed_files}{more}) and no store; choose another --out."
            )
        data = remote_folder.create(OWNER_NAME, msgspec.json.encode(owner))
    elif restart and _describe_owner_differences(data, owner, recipe):
        data = _take_over_claim(remote_folder, owner)
    _check_same_job(remote_folder, data, owner, recipe)


def check_ownership(remote_folder: RemoteFolder, owner: StoreOwner, recipe: Recipe | None) -> None:
    """Make sure that nobody has taken a folder elsewhere from this job; see :func:`claim_folder`.

    Raises:
        StoreConflictError: it is another job's now.
        OutputError: it cannot be read.
    """
    # Nobody's it is where the same job has just ended on another machine.
    if (data := remote_folder.read(OWNER_NAME)) is not None:
        _check_same_job(remote_folder, data, owner, recipe)


def release_claim(remote_folder: RemoteFolder, owner: StoreOwner) -> None:
    """Leave nothing in a folder elsewhere that holds this job's claim and nothing else.

    Raises:
        OutputError: it cannot be read, or the claim not deleted.
    """
    claim = msgspec.json.encode(owner)
    if remote_folder.list_files().keys() == {OWNER_NAME} and remote_folder.read(OWNER_NAME) == claim:
        remote_folder.delete(OWNER_NAME)


def _check_same_job(remote_folder: RemoteFolder, data: bytes, owner: StoreOwner, recipe: Recipe | None) -> None:
    if differences := _describe_owner_differences(data, owner, recipe):
        raise StoreConflictError(
            f"{remote_folder.redacted_url} holds unfinished work of another job ({differences}); give --restart to "
            "begin "
            "anew, or "
            "choose another --out."
        )


def _describe_owner_differences(data: bytes, owner: StoreOwner, recipe: Recipe | None) -> str:
    """How the job that a claim names differs from this one; empty where it is the same."""
    try:
        claimed_owner = msgspec.json.decode(data, type=StoreOwner)
        differences = describe_job_differences(claimed_owner.job, owner.job, recipe, claimed_owner.tokenizer)
        if not differences and claimed_owner.job.recipe != msgspec.to_builtins(owner.job.recipe):
            differences = "its recipe is another one"
    except JSON_DECODE_ERRORS:
        differences = "it was begun by another version of batchloom"
    return differences


def _take_over_claim(remote_folder: RemoteFolder, owner: StoreOwner) -> bytes:
    """Delete what another job has sent, and put this job's claim in the place of its own; the claim that lies there."""
    # Since it was looked at first, all inputs may have been read.
    files = remote_folder.list_files()
    if read_remote_manifest(remote_folder, files) is not None:
        raise StoreConflictError(
            f"Another run has just finished a store in {remote_folder.redacted_url}; choose another --out."
        )
    # What is claimed last stands to the end, so that whoever is stopped here can begin anew again.
    _delete_sent_files(remote_folder, files)
    remote_folder.delete(OWNER_NAME)
    claim = msgspec.json.encode(owner)
    data = remote_folder.create(OWNER_NAME, claim)
    if data == claim:
        # The other job, if it is at work, stops before its manifest; what it sent meanwhile is no whole store.
        _delete_sent_files(remote_folder, remote_folder.list_files())
    return data


def _delete_sent_files(remote_folder: RemoteFolder, files: Iterable[str]) -> None:
    """Delete the files of a store; what else somebody put beside them stays."""
    store_files = [name for name in files if _STORE_FILE.fullmatch(name)]
    with ThreadPoolExecutor(_REMOTE_THREADS, "deletes") as pool:
        for _ in pool.map(remote_folder.delete, store_files):
            pass


def read_remote_manifest(remote_folder: RemoteFolder, files: dict[str, RemoteFile]) -> Manifest | None:
    """The manifest of the store in a folder elsewhere; None where there is none that is finished.

    Raises:
        StoreError: it is damaged.
        OutputError: it cannot be read.
    """
    data = remote_folder.read(MANIFEST_NAME) if MANIFEST_NAME in files else None
    if data is None:
        return None
    try:
        return decode_manifest(data, f"{remote_folder.redacted_url}/{MANIFEST_NAME}")
    except StoreError:
        # Of some file systems a file can be half written; the job goes on.
        if OWNER_NAME in files:
            return None
        raise


@final
class StoreUploader:
    """What of a job's files lies elsewhere; what is known to lie there is not sent again.

    Its methods may be called from several threads.

    Args:
        remote_folder: the folder elsewhere.
        files: what lies there.
        log_path: a file of this machine in which it is kept what was sent.
    """

    def __init__(self, remote_folder: RemoteFolder, files: dict[str, RemoteFile], log_path: Path) -> None:
        self._remote_folder, self._files, self._log_path = remote_folder, dict(files), log_path
        self._lock = threading.Lock()
        self._upload_records = _read_upload_log(log_path)
        make_folder(log_path.parent)

    def is_uploaded(self, name: str) -> bool:
        """Whether a file that need not be here any more was sent, and lies there as it was sent."""
        upload_record, remote_file = self._upload_records.get(name), self._files.get(name)
        return upload_record is not None and remote_file == RemoteFile(upload_record.size, upload_record.mark)

    def stop(self) -> None:
        """Try nothing again from now on."""
        self._remote_folder.stop()

    def send(self, local: Path, name: str) -> bool:
        """Have a file lie there; whether it was sent now, rather than found there.

        Raises:
            OutputError: it cannot be sent.
        """
        with wrap_write_errors(local):
            status = local.stat()
        if self.is_uploaded(name) and self._upload_records[name][1::2] == (
            status.st_size,
            status.st_mtime_ns,
        ):
            return False
        remote_file = self._files.get(name)
        if is_present := remote_file is not None and self._remote_folder.holds(local, name, remote_file):
            uploaded_file = remote_file
        else:
            uploaded_file = self._remote_folder.upload(local, name)
        with self._lock:
            self._files[name] = uploaded_file
            self._upload_records[name] = UploadRecord(name, uploaded_file.size, uploaded_file.mark, status.st_mtime_ns)
            with wrap_write_errors(self._log_path), self._log_path.open("ab") as file:
                file.write(msgspec.json.encode(self._upload_records[name]) + b"\n")
        return not is_present


def _read_upload_log(log_path: Path) -> dict[str, UploadRecord]:
    """What an earlier run sent; a line that a kill cut off says nothing."""
    upload_records = {}
    with wrap_write_errors(log_path):
        lines = log_path.read_bytes().splitlines() if log_path.exists() else []
    for line in lines:
        try:
            upload_record = msgspec.json.decode(line, type=UploadRecord)
        except JSON_DECODE_ERRORS:
            continue
        upload_records[upload_record.name] = upload_record
    return upload_records


def publish_store(
    store: Path,
    uploader: StoreUploader,
    on_progress: Callable[[int, int, int], Any],
    before_manifest: Callable[[], Any] = lambda: None,
) -> None:
    """Send a finished store, its manifest last.

    Args:
        store: its folder on this machine.
        uploader: what lies there already.
        on_progress: is called with the bytes that lie there, all bytes, and those of the first that were found there.
        before_manifest: is called before the manifest is sent; what it raises keeps it here.

    Raises:
        OutputError: it cannot be sent; what was sent stays.
    """
    with wrap_write_errors(store):
        paths = [path for path in store.rglob("*") if path.is_file()]
        names = sort_for_upload(path.relative_to(store).as_posix() for path in paths)
        sizes = {name: (store / name).stat().st_size for name in names}
    total, finished_bytes, resumed_bytes = sum(sizes.values()), 0, 0
    on_progress(finished_bytes, total, resumed_bytes)
    *first, last = names
    with ThreadPoolExecutor(_REMOTE_THREADS, "uploads") as pool:
        pending = {pool.submit(uploader.send, store / name, name): name for name in first}
        try:
            while pending:
                ready, _ = wait(pending, return_when=FIRST_EXCEPTION, timeout=_WAIT_SECONDS)
                for future in ready:
                    size = sizes[pending.pop(future)]
                    finished_bytes, resumed_bytes = (
                        finished_bytes + size,
                        resumed_bytes + (0 if future.result() else size),
                    )
                on_progress(finished_bytes, total, resumed_bytes)
        except BaseException:
            for future in pending:
                future.cancel()
            uploader.stop()
            raise
    before_manifest()
    uploader.send(store / last, last)
    on_progress(total, total, resumed_bytes)
