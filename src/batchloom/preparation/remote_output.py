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
    kept = [
        name
        for name in names
        if not name.endswith(PARTIAL_SUFFIX)
        and not any(one.startswith(".") for one in name.split("/"))
    ]

    def rank(name: str) -> tuple[bool, int, str]:
        return name == MANIFEST_NAME, ranks.get(name.partition("/")[0], len(ranks)), name

    return sorted(kept, key=rank)


def claim_folder(
    far: RemoteFolder,
    files: dict[str, RemoteFile],
    owner: StoreOwner,
    recipe: Recipe | None,
    *,
    restart: bool = False,
) -> None:
    """Make a folder elsewhere this job's, or make sure that it is.

    Where the store can (S3 and Google's can), of two jobs at the same time one alone gets it.

    Args:
        far: the folder.
        files: what lies there, and no finished store.
        owner: this job.
        recipe: its recipe; None for synthetic data.
        restart: whether unfinished work of another job gives way.

    Raises:
        StoreConflictError: it is another job's, or holds something else.
        OutputError: it cannot be read or written.
    """
    data = far.read(OWNER_NAME) if OWNER_NAME in files else None
    if data is None:
        if strange := sorted(files):
            some = ", ".join(name or "a file of that name" for name in strange[:_MAX_LISTED])
            more = ", ..." if len(strange) > _MAX_LISTED else ""
            raise StoreConflictError(
                f"{far.shown} is not empty ({some}{more}) and no store; choose another --out."
            )
        data = far.create(OWNER_NAME, msgspec.json.encode(owner))
    elif restart and _describe_owner_differences(data, owner, recipe):
        data = _take_over_claim(far, owner)
    _check_same_job(far, data, owner, recipe)


def check_ownership(far: RemoteFolder, owner: StoreOwner, recipe: Recipe | None) -> None:
    """Make sure that nobody has taken a folder elsewhere from this job; see :func:`claim_folder`.

    Raises:
        StoreConflictError: it is another job's now.
        OutputError: it cannot be read.
    """
    # Nobody's it is where the same job has just ended on another machine.
    if (data := far.read(OWNER_NAME)) is not None:
        _check_same_job(far, data, owner, recipe)


def release_claim(far: RemoteFolder, owner: StoreOwner) -> None:
    """Leave nothing in a folder elsewhere that holds this job's claim and nothing else.

    Raises:
        OutputError: it cannot be read, or the claim not deleted.
    """
    claims = msgspec.json.encode(owner)
    if far.files().keys() == {OWNER_NAME} and far.read(OWNER_NAME) == claims:
        far.delete(OWNER_NAME)


def _check_same_job(
    far: RemoteFolder, data: bytes, owner: StoreOwner, recipe: Recipe | None
) -> None:
    if differences := _describe_owner_differences(data, owner, recipe):
        raise StoreConflictError(
            f"{far.shown} holds unfinished work of another job ({differences}); give --restart to begin anew, or "
            "choose another --out."
        )


def _describe_owner_differences(data: bytes, owner: StoreOwner, recipe: Recipe | None) -> str:
    """How the job that a claim names differs from this one; empty where it is the same."""
    try:
        found = msgspec.json.decode(data, type=StoreOwner)
        differences = describe_job_differences(found.job, owner.job, recipe, found.tokenizer)
        if not differences and found.job.recipe != msgspec.to_builtins(owner.job.recipe):
            differences = "its recipe is another one"
    except JSON_DECODE_ERRORS:
        differences = "it was begun by another version of batchloom"
    return differences


def _take_over_claim(far: RemoteFolder, owner: StoreOwner) -> bytes:
    """Delete what another job has sent, and put this job's claim in the place of its own; the claim that lies there."""
    # Since it was looked at first, all inputs may have been read.
    files = far.files()
    if read_remote_manifest(far, files) is not None:
        raise StoreConflictError(
            f"Another run has just finished a store in {far.shown}; choose another --out."
        )
    # What is claimed last stands to the end, so that whoever is stopped here can begin anew again.
    _delete_sent_files(far, files)
    far.delete(OWNER_NAME)
    claims = msgspec.json.encode(owner)
    data = far.create(OWNER_NAME, claims)
    if data == claims:
        # The other job, if it is at work, stops before its manifest; what it sent meanwhile is no whole store.
        _delete_sent_files(far, far.files())
    return data


def _delete_sent_files(far: RemoteFolder, files: Iterable[str]) -> None:
    """Delete the files of a store; what else somebody put beside them stays."""
    sent = [name for name in files if _STORE_FILE.fullmatch(name)]
    with ThreadPoolExecutor(_REMOTE_THREADS, "deletes") as pool:
        for _ in pool.map(far.delete, sent):
            pass


def read_remote_manifest(far: RemoteFolder, files: dict[str, RemoteFile]) -> Manifest | None:
    """The manifest of the store in a folder elsewhere; None where there is none that is finished.

    Raises:
        StoreError: it is damaged.
        OutputError: it cannot be read.
    """
    data = far.read(MANIFEST_NAME) if MANIFEST_NAME in files else None
    if data is None:
        return None
    try:
        return decode_manifest(data, f"{far.shown}/{MANIFEST_NAME}")
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
        far: the folder elsewhere.
        files: what lies there.
        record: a file of this machine in which it is kept what was sent.
    """

    def __init__(self, far: RemoteFolder, files: dict[str, RemoteFile], record: Path) -> None:
        self._far, self._files, self._record = far, dict(files), record
        self._lock = threading.Lock()
        self._known = _read_upload_log(record)
        make_folder(record.parent)

    def known(self, name: str) -> bool:
        """Whether a file that need not be here any more was sent, and lies there as it was sent."""
        sent, found = self._known.get(name), self._files.get(name)
        return sent is not None and found == RemoteFile(sent.size, sent.mark)

    def stop(self) -> None:
        """Try nothing again from now on."""
        self._far.stop()

    def send(self, local: Path, name: str) -> bool:
        """Have a file lie there; whether it was sent now, rather than found there.

        Raises:
            OutputError: it cannot be sent.
        """
        with wrap_write_errors(local):
            status = local.stat()
        if self.known(name) and self._known[name][1::2] == (status.st_size, status.st_mtime_ns):
            return False
        found = self._files.get(name)
        if there := found is not None and self._far.holds(local, name, found):
            now = found
        else:
            now = self._far.upload(local, name)
        with self._lock:
            self._files[name] = now
            self._known[name] = UploadRecord(name, now.size, now.mark, status.st_mtime_ns)
            with wrap_write_errors(self._record), self._record.open("ab") as file:
                file.write(msgspec.json.encode(self._known[name]) + b"\n")
        return not there


def _read_upload_log(record: Path) -> dict[str, UploadRecord]:
    """What an earlier run sent; a line that a kill cut off says nothing."""
    known = {}
    with wrap_write_errors(record):
        lines = record.read_bytes().splitlines() if record.exists() else []
    for line in lines:
        try:
            one = msgspec.json.decode(line, type=UploadRecord)
        except JSON_DECODE_ERRORS:
            continue
        known[one.name] = one
    return known


def publish_store(
    store: Path,
    uploads: StoreUploader,
    tell: Callable[[int, int, int], Any],
    before_last: Callable[[], Any] = lambda: None,
) -> None:
    """Send a finished store, its manifest last.

    Args:
        store: its folder on this machine.
        uploads: what lies there already.
        tell: is called with the bytes that lie there, all bytes, and those of the first that were found there.
        before_last: is called before the manifest is sent; what it raises keeps it here.

    Raises:
        OutputError: it cannot be sent; what was sent stays.
    """
    with wrap_write_errors(store):
        places = [path for path in store.rglob("*") if path.is_file()]
        names = sort_for_upload(path.relative_to(store).as_posix() for path in places)
        sizes = {name: (store / name).stat().st_size for name in names}
    total, done, found = sum(sizes.values()), 0, 0
    tell(done, total, found)
    *first, last = names
    with ThreadPoolExecutor(_REMOTE_THREADS, "uploads") as pool:
        waiting = {pool.submit(uploads.send, store / name, name): name for name in first}
        try:
            while waiting:
                ready, _ = wait(waiting, return_when=FIRST_EXCEPTION, timeout=_WAIT_SECONDS)
                for one in ready:
                    size = sizes[waiting.pop(one)]
                    done, found = done + size, found + (0 if one.result() else size)
                tell(done, total, found)
        except BaseException:
            for one in waiting:
                one.cancel()
            uploads.stop()
            raise
    before_last()
    uploads.send(store / last, last)
    tell(total, total, found)
