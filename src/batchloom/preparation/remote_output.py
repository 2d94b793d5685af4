"""Remote output of a store: the claim of its folder, uploads and their order.

The manifest is sent last: a folder without one is no store. While the store grows, a claim object names
its job. Other jobs refuse the folder, and the same job can resume from any machine.
"""

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, final

import msgspec

from batchloom.core.errors import StoreConflictError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, PARTIAL_SUFFIX
from batchloom.preparation.rerun import describe_job_differences
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.work_folder import JobIdentity
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.store import MANIFEST_NAME, PAGE_NAME, REPORT_NAME, WORK_NAME, Manifest, wrap_write_errors
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
# The files that a job sends: a restart deletes no others.
_STORE_FILE = re.compile(
    "|".join(
        [
            *map(
                re.escape,
                (*(MANIFEST_NAME, TOKENIZER_NAME, PROCESSOR_NAME), *(QUARANTINE_NAME, REPORT_NAME, PAGE_NAME)),
            ),
            rf"({'|'.join(SUBSETS)})/({re.escape(LENGTHS_NAME)}|{re.escape(LENGTHS_CHECKSUMS_NAME)}|{SHARD_NAME.pattern}\.[a-z0-9]+)",
        ]
    )
)
_MAX_LISTED = 3
_REMOTE_THREADS = 4
_WAIT_SECONDS = 0.5


class StoreOwner(msgspec.Struct, frozen=True):
    """Claim object that names the job of a growing store.

    ``tokenizer`` is the fingerprint of a tokenizer file; None for other tokenizers.
    """

    job: JobIdentity
    tokenizer: str | None = None


class UploadRecord(NamedTuple):
    """Log entry of an uploaded file: remote name, bytes, listing mark, local mtime."""

    name: str
    size: int
    mark: str
    mtime_ns: int


def sort_for_upload(names: Iterable[str]) -> list[str]:
    """Return the files of a finished store in upload order, the manifest last.

    Subsets come first. Work files, partial files and hidden files are left out.
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
    """Claim a remote folder for this job, or check that the job owns it.

    On stores with conditional writes (S3, Google), only one of two concurrent jobs gets it.

    Args:
        remote_folder: the folder.
        files: its files, without a finished store.
        owner: claim of this job.
        recipe: its recipe; None for synthetic data.
        restart: whether to replace unfinished work of another job.

    Raises:
        StoreConflictError: another job owns the folder, or it holds other files.
        OutputError: the folder cannot be read or written.
    """
    data = remote_folder.read(OWNER_NAME) if OWNER_NAME in files else None
    if data is None:
        if unknown_files := sorted(files):
            listed_files = ", ".join(name or "a file of that name" for name in unknown_files[:_MAX_LISTED])
            more = ", ..." if len(unknown_files) > _MAX_LISTED else ""
            raise StoreConflictError(
                f"{remote_folder.redacted_url} is not empty ({listed_files}{more}) and is not a store; "
                "choose another --out."
            )
        data = remote_folder.create(OWNER_NAME, msgspec.json.encode(owner))
    elif restart and _describe_owner_differences(data, owner, recipe):
        data = _take_over_claim(remote_folder, owner)
    _check_same_job(remote_folder, data, owner, recipe)


def check_ownership(remote_folder: RemoteFolder, owner: StoreOwner, recipe: Recipe | None) -> None:
    """Check that no other job has taken over a remote folder.

    See :func:`claim_folder`.

    Raises:
        StoreConflictError: another job owns it now.
        OutputError: it cannot be read.
    """
    # The claim is missing if the same job has just ended on another machine.
    if (data := remote_folder.read(OWNER_NAME)) is not None:
        _check_same_job(remote_folder, data, owner, recipe)


def release_claim(remote_folder: RemoteFolder, owner: StoreOwner) -> None:
    """Delete this job's claim from a remote folder that holds nothing else.

    Raises:
        OutputError: the folder cannot be read, or the claim cannot be deleted.
    """
    claim = msgspec.json.encode(owner)
    if remote_folder.list_files().keys() == {OWNER_NAME} and remote_folder.read(OWNER_NAME) == claim:
        remote_folder.delete(OWNER_NAME)


def _check_same_job(remote_folder: RemoteFolder, data: bytes, owner: StoreOwner, recipe: Recipe | None) -> None:
    if differences := _describe_owner_differences(data, owner, recipe):
        raise StoreConflictError(
            f"{remote_folder.redacted_url} holds unfinished work of another job ({differences}); give --restart to "
            "start over, or choose another --out."
        )


def _describe_owner_differences(data: bytes, owner: StoreOwner, recipe: Recipe | None) -> str:
    """Describe the differences between a claimed job and this one; empty for none."""
    try:
        claimed_owner = msgspec.json.decode(data, type=StoreOwner)
        differences = describe_job_differences(claimed_owner.job, owner.job, recipe, claimed_owner.tokenizer)
        if not differences and claimed_owner.job.recipe != msgspec.to_builtins(owner.job.recipe):
            differences = "its recipe differs"
    except JSON_DECODE_ERRORS:
        differences = "it was started by another version of batchloom"
    return differences


def _take_over_claim(remote_folder: RemoteFolder, owner: StoreOwner) -> bytes:
    """Delete another job's uploads, replace its claim, and return the current claim."""
    # Reading all inputs may have taken hours since the first listing.
    files = remote_folder.list_files()
    if read_remote_manifest(remote_folder, files) is not None:
        raise StoreConflictError(
            f"Another run has just finished a store in {remote_folder.redacted_url}; choose another --out."
        )
    # The claim is deleted last, so that a run stopped here can restart again.
    _delete_sent_files(remote_folder, files)
    remote_folder.delete(OWNER_NAME)
    claim = msgspec.json.encode(owner)
    data = remote_folder.create(OWNER_NAME, claim)
    if data == claim:
        # The other job, if it still runs, stops before its manifest; its later uploads are no complete store.
        _delete_sent_files(remote_folder, remote_folder.list_files())
    return data


def _delete_sent_files(remote_folder: RemoteFolder, files: Iterable[str]) -> None:
    """Delete the files of a store; other files stay."""
    store_files = [name for name in files if _STORE_FILE.fullmatch(name)]
    with ThreadPoolExecutor(_REMOTE_THREADS, "deletes") as pool:
        for _ in pool.map(remote_folder.delete, store_files):
            pass


def read_remote_manifest(remote_folder: RemoteFolder, files: dict[str, RemoteFile]) -> Manifest | None:
    """Return the manifest of a finished store in a remote folder, or None.

    Raises:
        StoreError: the manifest is damaged.
        OutputError: it cannot be read.
    """
    data = remote_folder.read(MANIFEST_NAME) if MANIFEST_NAME in files else None
    if data is None:
        return None
    try:
        return decode_manifest(data, f"{remote_folder.redacted_url}/{MANIFEST_NAME}")
    except StoreError:
        # On some file systems a file can be half written; the job resumes.
        if OWNER_NAME in files:
            return None
        raise


@final
class StoreUploader:
    """Uploads of a job's files, which skip files that are already remote.

    Its methods are thread-safe.

    Args:
        remote_folder: the remote folder.
        files: its files.
        log_path: local log of uploaded files.
    """

    def __init__(self, remote_folder: RemoteFolder, files: dict[str, RemoteFile], log_path: Path) -> None:
        self._remote_folder, self._files, self._log_path = remote_folder, dict(files), log_path
        self._lock = threading.Lock()
        self._upload_records = _read_upload_log(log_path)
        make_folder(log_path.parent)

    def is_uploaded(self, name: str) -> bool:
        """Return whether a file was sent and is unchanged in the remote folder.

        The local file may be deleted already.
        """
        upload_record, remote_file = self._upload_records.get(name), self._files.get(name)
        return upload_record is not None and remote_file == RemoteFile(upload_record.size, upload_record.mark)

    def stop(self) -> None:
        """Stop retrying failed requests."""
        self._remote_folder.stop()

    def send(self, local: Path, name: str) -> bool:
        """Upload a file if it is missing or differs; return whether it was sent now.

        Raises:
            OutputError: it cannot be sent.
        """
        with wrap_write_errors(local):
            status = local.stat()
        if self.is_uploaded(name) and self._upload_records[name][1::2] == (status.st_size, status.st_mtime_ns):
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
    """Read the upload log of an earlier run, skipping lines cut off by a kill."""
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
        store: local folder of the store.
        uploader: uploads of this job.
        on_progress: callback with the uploaded bytes, all bytes, and the bytes that were already uploaded.
        before_manifest: callback before the manifest is sent; an exception in it holds the manifest back.

    Raises:
        OutputError: the store cannot be sent; uploaded files stay.
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
