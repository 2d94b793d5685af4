"""``prepare`` into a remote store: made in a local work folder, then uploaded.

The manifest is sent last: a folder without one is no store. While the store grows, a claim object names
its job. Other jobs refuse the folder, and the same job can resume from any machine.
"""

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import final

import msgspec
import xxhash

from batchloom.core.addresses import get_scheme, is_url, redact_url
from batchloom.core.errors import OutputError, SettingsError, StoreConflictError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, PARTIAL_SUFFIX, find_cache_folder, lock_exclusively
from batchloom.preparation.prepare_run import make_store
from batchloom.preparation.report.progress import Listener, Note, PrepareLog, PrepareResult, Progress, make_result
from batchloom.preparation.report.report import parse_report, read_report, write_report_page
from batchloom.preparation.request.inputs import list_inputs
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.rerun import (
    RequestedJob,
    describe_job_differences,
    fingerprint_tokenizer_file,
    hash_sources,
    make_job_identity,
)
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.synthetic_run import parse_synthetic_input
from batchloom.preparation.units.work_folder import SPOOL_NAME, JobIdentity
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.sources import SourceListing
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, PAGE_NAME, REPORT_NAME, WORK_NAME, Manifest, wrap_write_errors, write_file
from batchloom.store.format import (
    DUPLICATES_NAME,
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
                (
                    MANIFEST_NAME,
                    TOKENIZER_NAME,
                    PROCESSOR_NAME,
                    QUARANTINE_NAME,
                    REPORT_NAME,
                    PAGE_NAME,
                    DUPLICATES_NAME,
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
    """Claim object that names the job of a growing store.

    ``tokenizer`` is the fingerprint of a tokenizer file; None for other tokenizers.
    """

    job: JobIdentity
    tokenizer: str | None = None


def sort_for_upload(names: Iterable[str]) -> list[str]:
    """Return the files of a store in upload order: subsets first, manifest last."""
    ranks = {name: rank for rank, name in enumerate(SUBSETS)}
    store_files = [
        name
        for name in names
        if not name.endswith(PARTIAL_SUFFIX) and not any(path_part.startswith(".") for path_part in name.split("/"))
    ]
    return sorted(
        store_files, key=lambda name: (name == MANIFEST_NAME, ranks.get(name.partition("/")[0], len(ranks)), name)
    )


@final
class _RemoteJob:
    """Job that makes the store of a remote folder from listed inputs."""

    def __init__(
        self, remote_folder: RemoteFolder, request: PrepareRequest, listing: SourceListing, settings: RunSettings
    ) -> None:
        self._remote_folder = remote_folder
        self._job = RequestedJob(request.recipe, listing, request.tokenizer_state, settings.hash_inputs)
        identity = make_job_identity(request.recipe, listing, [], list(listing.content.values()))
        self._owner = StoreOwner(identity, fingerprint_tokenizer_file(request.recipe))
        self._encoded_owner = msgspec.json.encode(self._owner, enc_hook=list)
        self.is_owner = False

    def begin(self, files: dict[str, RemoteFile], manifest: Manifest | None, *, restart: bool = False) -> None:
        """Claim the folder for this job, or check that its finished store is of this job.

        On stores with conditional writes (S3, Google), only one of two concurrent jobs gets it.
        """
        if manifest is not None:
            report = parse_report(self._remote_folder.read(REPORT_NAME) or b"")
            self._job.check_same_finished_job(self._remote_folder.redacted_url, manifest, report)
            return
        data = self._remote_folder.read(OWNER_NAME) if OWNER_NAME in files else None
        if data is None:
            if unknown_files := sorted(files):
                listed_files = ", ".join(name or "a file of that name" for name in unknown_files[:_MAX_LISTED])
                more = ", ..." if len(unknown_files) > _MAX_LISTED else ""
                raise StoreConflictError(
                    f"{self._remote_folder.redacted_url} is not empty ({listed_files}{more}) and is not a store; "
                    "choose another --out."
                )
            data = self._remote_folder.create(OWNER_NAME, self._encoded_owner)
        elif restart and self._describe_differences(data):
            data = self._take_over()
        self._check_owner(data)
        self.is_owner = True

    def check_ownership(self) -> None:
        """Check that no other job has taken over the folder."""
        # The claim is missing if the same job has just ended on another machine.
        if (data := self._remote_folder.read(OWNER_NAME)) is not None:
            self._check_owner(data)

    def release(self) -> None:
        """Delete this job's claim from a folder that holds nothing else."""
        folder = self._remote_folder
        if folder.list_files().keys() == {OWNER_NAME} and folder.read(OWNER_NAME) == self._encoded_owner:
            folder.delete(OWNER_NAME)

    def delete_previous_work(self, store: Path) -> None:
        """Delete another job's local store that was not sent; its equal units stay."""
        try:
            self._job.find_finished_store(store, read_report(store))
        except StoreError:
            with wrap_write_errors(store):
                # The work folder also holds the inputs that can be read only once.
                for path in [path for path in store.iterdir() if path.name != WORK_NAME]:
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()

    def _check_owner(self, data: bytes) -> None:
        if differences := self._describe_differences(data):
            raise StoreConflictError(
                f"{self._remote_folder.redacted_url} holds unfinished work of another job ({differences}); give "
                "--restart to start over, or choose another --out."
            )

    def _describe_differences(self, data: bytes) -> str:
        """Describe the differences between a claimed job and this one; empty for none."""
        job = self._owner.job
        try:
            claimed = msgspec.json.decode(data, type=StoreOwner)
            differences = describe_job_differences(claimed.job, job, self._job.recipe, claimed.tokenizer)
        except JSON_DECODE_ERRORS:
            return "it was started by another version of batchloom"
        is_same_recipe = claimed.job.recipe == msgspec.to_builtins(job.recipe)
        return differences or ("" if is_same_recipe else "its recipe differs")

    def _take_over(self) -> bytes:
        """Delete another job's uploads, replace its claim, and return the current claim."""
        # Reading all inputs may have taken hours since the first listing.
        files = self._remote_folder.list_files()
        if read_remote_manifest(self._remote_folder, files) is not None:
            raise StoreConflictError(
                f"Another run has just finished a store in {self._remote_folder.redacted_url}; choose another --out."
            )
        # The claim is deleted last, so that a run stopped here can restart again.
        _delete_sent_files(self._remote_folder, files)
        self._remote_folder.delete(OWNER_NAME)
        data = self._remote_folder.create(OWNER_NAME, self._encoded_owner)
        if data == self._encoded_owner:
            # The other job, if it still runs, stops before its manifest; its later uploads are no complete store.
            _delete_sent_files(self._remote_folder, self._remote_folder.list_files())
        return data


def _delete_sent_files(remote_folder: RemoteFolder, files: Iterable[str]) -> None:
    store_files = [name for name in files if _STORE_FILE.fullmatch(name)]
    with ThreadPoolExecutor(_REMOTE_THREADS, "deletes") as pool:
        for _ in pool.map(remote_folder.delete, store_files):
            pass


def read_remote_manifest(remote_folder: RemoteFolder, files: dict[str, RemoteFile]) -> Manifest | None:
    """Return the manifest of a finished store in a remote folder, or None."""
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


def _send_file(remote_folder: RemoteFolder, remote_file: RemoteFile | None, local: Path, name: str) -> bool:
    """Upload a file unless the folder holds an equal one; return whether it was sent."""
    if remote_file is not None and remote_folder.holds(local, name, remote_file):
        return False
    remote_folder.upload(local, name)
    return True


def _publish_store(
    store: Path,
    remote_folder: RemoteFolder,
    files: dict[str, RemoteFile],
    job: _RemoteJob,
    result: PrepareResult,
    listener: Listener,
) -> None:
    """Send a finished store, its manifest last; ``files`` are in the folder already."""
    with wrap_write_errors(store):
        paths = [path for path in store.rglob("*") if path.is_file()]
        names = sort_for_upload(path.relative_to(store).as_posix() for path in paths)
        sizes = {name: (store / name).stat().st_size for name in names}
    counts, total, finished_bytes, resumed_bytes = result.counts, sum(sizes.values()), 0, 0

    def report() -> None:
        listener(
            Progress(
                "upload", finished_bytes, total, resumed_bytes, counts.documents, counts.tokens, counts.quarantined
            )
        )

    report()
    *first, last = names
    with ThreadPoolExecutor(_REMOTE_THREADS, "uploads") as pool:
        pending = {pool.submit(_send_file, remote_folder, files.get(name), store / name, name): name for name in first}
        try:
            while pending:
                ready, _ = wait(pending, return_when=FIRST_EXCEPTION, timeout=_WAIT_SECONDS)
                for future in ready:
                    size = sizes[pending.pop(future)]
                    finished_bytes += size
                    resumed_bytes += 0 if future.result() else size
                report()
        except BaseException:
            for future in pending:
                future.cancel()
            remote_folder.stop()
            raise
    job.check_ownership()
    _send_file(remote_folder, files.get(last), store / last, last)
    finished_bytes = total
    report()


# Older versions wrote a log of uploads; it is deleted with the work folder.
_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME = "uploads.jsonl", "store", "lock"
_WORK_FILES = (_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME)


def default_work_folder(url: str) -> Path:
    """Return the default local work folder for a URL, below the user's cache."""
    name = xxhash.xxh3_64_hexdigest(redact_url(url).rstrip("/").encode())
    return find_cache_folder() / "prepare" / name


def run_remote(request: PrepareRequest, url: str, listener: Listener, settings: RunSettings) -> PrepareResult:
    """Run a recipe into a remote folder; see :func:`batchloom.prepare`."""
    log = PrepareLog(listener)
    folder = settings.work or default_work_folder(url)
    store = folder / _STORE_NAME
    if parse_synthetic_input(request.recipe.inputs):
        raise SettingsError(
            [f"out: {redact_url(url)} is remote, and synthetic data is written to this machine only; name a folder"]
        )
    check_remote_separate(request.recipe.inputs, url)
    with RemoteFolder(url) as remote_folder, _lock_work_folder(folder):
        files = remote_folder.list_files(first=True)
        job: _RemoteJob | None = None
        try:
            with Spool(store / WORK_NAME / SPOOL_NAME) as spool:
                manifest = read_remote_manifest(remote_folder, files)
                listing = list_inputs(request.recipe, spool, exclude=folder, streaming=settings.streaming)
                listing = request.add_notes(listing)
                if settings.hash_inputs and manifest is None:
                    listing = replace(listing, content=hash_sources(listing.sources))
                job = _RemoteJob(remote_folder, request, listing, settings)
                job.begin(files, manifest, restart=settings.restart)
                if manifest is not None:
                    _delete_leftovers(remote_folder, files, folder)
                    return make_result(remote_folder.redacted_url, manifest, seconds=log.elapsed, already_done=True)
                if settings.restart:
                    job.delete_previous_work(store)
                note = (
                    f"The store is written to the work folder {folder} (--work) and uploaded to "
                    f"{remote_folder.redacted_url}. The work folder is deleted after the upload."
                )
                listener(Note(note))
                remote_folder.end_uploads()
                result = make_store(request, store, listing, spool, settings, log)
        except BaseException:
            # A job that failed before anything was finished leaves no claim.
            if job is not None and job.is_owner and not store.exists():
                with contextlib.suppress(OutputError):
                    job.release()
            raise
        result = replace(result, path=remote_folder.redacted_url, notes=(note, *result.notes))
        if settings.dry_run:
            return result
        _record_location(store, remote_folder.redacted_url)
        # Check again: hours may have passed, and not every store keeps concurrent jobs apart.
        files = remote_folder.list_files()
        manifest = read_remote_manifest(remote_folder, files)
        job.begin(files, manifest)
        if manifest is None:
            _publish_store(store, remote_folder, files, job, result, listener)
        _delete_leftovers(remote_folder, {**files, OWNER_NAME: RemoteFile(0, "")}, folder)
    return replace(result, seconds=log.elapsed, already_done=False)


def check_remote_separate(inputs: Sequence[str], url: str) -> None:
    """Refuse a remote output inside an input, or an input inside the output."""
    out = _normalize_url(url)
    for input_url in inputs:
        if not is_url(input_url):
            continue
        normalized_url = _normalize_url(input_url)
        fixed_prefix = re.split(r"[*?\[]", normalized_url, maxsplit=1)[0]
        if fixed_prefix != normalized_url:
            fixed_prefix = fixed_prefix.rpartition("/")[0]
        if f"{normalized_url}/".startswith(f"{out}/"):
            raise StoreConflictError(
                f"The input {redact_url(input_url)} lies inside --out {redact_url(url)}, which may hold only the "
                "store; choose another --out."
            )
        if f"{out}/".startswith(f"{fixed_prefix}/") and (fixed_prefix == normalized_url or "**" in normalized_url):
            raise StoreConflictError(
                f"--out {redact_url(url)} lies inside the input {redact_url(input_url)} and would be read with "
                "it; choose another --out, next to the input."
            )


def _normalize_url(url: str) -> str:
    scheme = get_scheme(url)
    usual = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    return usual + redact_url(url)[len(scheme) :].rstrip("/")


def _record_location(store: Path, location: str) -> None:
    """Write the store's remote location into its report and page."""
    plain = msgspec.json.decode((store / REPORT_NAME).read_bytes())
    if plain.get("out") == location:
        return
    report = read_report(store)
    if report is not None and (store / PAGE_NAME).exists():
        write_report_page(msgspec.structs.replace(report, out=location), store / PAGE_NAME)
    # The report is written last: its location tells a later run that both files are updated.
    encoded_report = msgspec.json.encode({**plain, "out": location})
    write_file(store / REPORT_NAME, msgspec.json.format(encoded_report, indent=1) + b"\n")


def _delete_leftovers(remote_folder: RemoteFolder, files: dict[str, RemoteFile], folder: Path) -> None:
    """Delete what a finished job no longer needs, remote and local."""
    if OWNER_NAME in files:
        remote_folder.delete(OWNER_NAME)
    shutil.rmtree(folder / _STORE_NAME, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / _UPLOADS_NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def _lock_work_folder(folder: Path) -> Iterator[None]:
    """Lock a work folder; delete it afterwards if it is empty."""
    existed_before = folder.exists()
    with wrap_write_errors(folder):
        unknown_names = sorted(path.name for path in folder.iterdir()) if existed_before else []
    if unknown_names := [name for name in unknown_names if name not in _WORK_FILES]:
        raise StoreConflictError(
            f"The work folder {folder} holds other files ({unknown_names[0]}); choose another --work."
        )
    make_folder(folder)
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
            if not any((folder / name).exists() for name in (_STORE_NAME, _UPLOADS_NAME)):
                # Delete it while locked, so that no other run begins in it.
                with contextlib.suppress(OSError):
                    path.unlink()
                    if not existed_before:
                        folder.rmdir()
