"""``prepare`` into a remote store: made in a local work folder, then uploaded.

The manifest is sent last: a folder without one is no store. While the store grows, a claim object names
its job. Other jobs refuse the folder, and the same job can resume from any machine.
"""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import msgspec
import xxhash

from batchloom.core.addresses import get_scheme, is_url, redact_url
from batchloom.core.errors import OutputError, StoreConflictError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, PARTIAL_SUFFIX, lock_exclusively
from batchloom.core.synthetic_data import SyntheticSpec
from batchloom.preparation.prepare_run import make_store
from batchloom.preparation.report.html_report import write_report_page
from batchloom.preparation.report.progress import Listener, Note, PrepareLog, PrepareResult, Progress, make_result
from batchloom.preparation.report.report import parse_report, read_report
from batchloom.preparation.request.inputs import list_inputs
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.rerun import (
    check_same_finished_job,
    describe_job_differences,
    find_finished_store,
    fingerprint_tokenizer_file,
    hash_sources,
    make_job_identity,
)
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.synthetic_run import (
    check_same_data,
    parse_synthetic_input,
    synthetic_to_plain,
    write_synthetic,
)
from batchloom.preparation.units.work_folder import SPOOL_NAME, WORK_VERSION, JobIdentity
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.sources import SourceListing
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, PAGE_NAME, REPORT_NAME, WORK_NAME, Manifest, wrap_write_errors, write_file
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
    """
    # The claim is missing if the same job has just ended on another machine.
    if (data := remote_folder.read(OWNER_NAME)) is not None:
        _check_same_job(remote_folder, data, owner, recipe)


def release_claim(remote_folder: RemoteFolder, owner: StoreOwner) -> None:
    """Delete this job's claim from a remote folder that holds nothing else."""
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


@final
class StoreUploader:
    """Uploads of a job's files, which skip files that are already remote.

    Its methods are thread-safe.
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
        """Upload a file if it is missing or differs; return whether it was sent now."""
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
    """Send a finished store, its manifest last."""
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


_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME = "uploads.jsonl", "store", "lock"
_WORK_FILES = (_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME)


def default_work_folder(url: str) -> Path:
    """Return the default local work folder for a URL, below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = xxhash.xxh3_64_hexdigest(redact_url(url).rstrip("/").encode())
    return Path(cache) / "batchloom" / "prepare" / name


def run_remote(request: PrepareRequest, url: str, listener: Listener, settings: RunSettings) -> PrepareResult:
    """Run a recipe into a remote folder; see :func:`batchloom.prepare`."""
    log = PrepareLog(listener)
    folder = settings.work or default_work_folder(url)
    check_remote_separate(request.recipe.inputs, url)
    with RemoteFolder(url) as remote_folder, _lock_work_folder(folder):
        files = remote_folder.list_files(first=True)
        with _release_on_failure(remote_folder, folder / _STORE_NAME) as claimed_owners, _open_spool(folder) as spool:
            manifest = read_remote_manifest(remote_folder, files)
            build = _plan_remote_build(request, folder, spool, settings, finished=manifest is not None)
            build.begin(remote_folder, files, manifest, restart=settings.restart)
            if manifest is not None:
                _delete_leftovers(remote_folder, files, folder)
                return make_result(remote_folder.redacted_url, manifest, seconds=log.elapsed, already_done=True)
            claimed_owners.append(build.owner)
            if settings.restart:
                build.delete_previous_work()
            note = (
                f"The store is written to the work folder {folder} (--work) and uploaded to "
                f"{remote_folder.redacted_url}. The work folder is deleted after the upload."
            )
            listener(Note(note))
            remote_folder.end_uploads()
            result = build.make(spool, settings, log)
        if settings.dry_run:
            return replace(result, path=remote_folder.redacted_url, notes=(note, *result.notes))
        _record_location(folder / _STORE_NAME, remote_folder.redacted_url)
        # Check again: hours may have passed, and not every store keeps concurrent jobs apart.
        files = remote_folder.list_files()
        manifest = read_remote_manifest(remote_folder, files)
        build.begin(remote_folder, files, manifest)
        if manifest is None:
            uploader = StoreUploader(remote_folder, files, folder / _UPLOADS_NAME)
            publish_store(
                build.store,
                uploader,
                _make_upload_listener(result, listener),
                partial(check_ownership, remote_folder, build.owner, build.own_recipe),
            )
        _delete_leftovers(remote_folder, {**files, OWNER_NAME: RemoteFile(0, "")}, folder)
    return replace(
        result,
        path=remote_folder.redacted_url,
        seconds=log.elapsed,
        already_done=False,
        notes=(note, *result.notes),
    )


def _open_spool(folder: Path) -> Spool:
    return Spool(folder / _STORE_NAME / WORK_NAME / SPOOL_NAME)


@contextlib.contextmanager
def _release_on_failure(remote_folder: RemoteFolder, store: Path) -> Iterator[list[StoreOwner]]:
    """Release the claim of a job that failed before anything was finished.

    Yields a list, to which the caller appends its claim.
    """
    claimed_owners: list[StoreOwner] = []
    try:
        yield claimed_owners
    except BaseException:
        if claimed_owners and not store.exists():
            with contextlib.suppress(OutputError):
                release_claim(remote_folder, claimed_owners[0])
        raise


@dataclass(frozen=True, slots=True)
class _RemoteBuild:
    """Build of a remote store on this machine, from inputs or synthetic data."""

    request: PrepareRequest
    store: Path
    owner: StoreOwner
    inputs: SourceListing | SyntheticSpec
    hashed: bool

    def begin(
        self,
        remote_folder: RemoteFolder,
        files: dict[str, RemoteFile],
        manifest: Manifest | None,
        *,
        restart: bool = False,
    ) -> None:
        """Claim a remote folder for this job, or check that its store is of this job."""
        if manifest is None:
            claim_folder(remote_folder, files, self.owner, self.own_recipe, restart=restart)
        else:
            self._check_same_store(remote_folder, manifest)

    def delete_previous_work(self) -> None:
        """Delete another job's local store that was not sent; its equal units stay."""
        if isinstance(self.inputs, SyntheticSpec):
            shutil.rmtree(self.store, ignore_errors=True)
            return
        try:
            report = read_report(self.store)
            find_finished_store(
                self.store, self.request.recipe, self.inputs, report, self.request.tokenizer_state, hashed=self.hashed
            )
        except StoreError:
            with wrap_write_errors(self.store):
                for path in self.store.iterdir():
                    # Inputs that can be read only once are spooled there.
                    if path.name == WORK_NAME:
                        continue
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()

    @property
    def own_recipe(self) -> Recipe | None:
        """The recipe; None for synthetic data, which has no tokenizer."""
        return self.request.recipe if isinstance(self.inputs, SourceListing) else None

    def _check_same_store(self, remote_folder: RemoteFolder, manifest: Manifest) -> None:
        if isinstance(self.inputs, SyntheticSpec):
            check_same_data(remote_folder.redacted_url, manifest, self.owner.job.recipe)
            return
        report = parse_report(remote_folder.read(REPORT_NAME) or b"")
        check_same_finished_job(
            remote_folder.redacted_url,
            manifest,
            report,
            self.request.recipe,
            self.inputs,
            self.request.tokenizer_state,
            hashed=self.hashed,
        )

    def make(self, spool: Spool, settings: RunSettings, log: PrepareLog) -> PrepareResult:
        """Make the store on this machine."""
        if isinstance(self.inputs, SyntheticSpec):
            return write_synthetic(self.inputs, self.request.recipe, self.store, log.listener)
        return make_store(self.request, self.store, self.inputs, spool, settings, log)


def _plan_remote_build(
    request: PrepareRequest, folder: Path, spool: Spool, settings: RunSettings, *, finished: bool
) -> _RemoteBuild:
    """Return the build of a request; ``finished`` means that the remote store exists."""
    recipe, store = request.recipe, folder / _STORE_NAME
    if synthetic_spec := parse_synthetic_input(recipe.inputs):
        plain = synthetic_to_plain(synthetic_spec, recipe)
        owner = StoreOwner(JobIdentity(WORK_VERSION, plain, [], []))
        return _RemoteBuild(request, store, owner, synthetic_spec, settings.hash_inputs)
    listing = list_inputs(recipe, spool, exclude=folder, streaming=settings.streaming)
    listing = replace(listing, notes=(*request.initial_notes, *listing.notes))
    if settings.hash_inputs and not finished:
        listing = replace(listing, content=hash_sources(listing.sources))
    identity = make_job_identity(recipe, listing, [], list(listing.content.values()))
    owner = StoreOwner(identity, fingerprint_tokenizer_file(recipe))
    return _RemoteBuild(request, store, owner, listing, settings.hash_inputs)


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


def _make_upload_listener(result: PrepareResult, listener: Listener) -> Callable[[int, int, int], None]:
    """Return a callback for :func:`publish_store` that reports upload progress."""
    counts = result.counts

    def on_progress(finished_bytes: int, total: int, resumed_bytes: int) -> None:
        listener(
            Progress(
                "upload", finished_bytes, total, resumed_bytes, counts.documents, counts.tokens, counts.quarantined
            )
        )

    return on_progress


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
        _acquire_lock(lock, folder)
        try:
            yield
        finally:
            if not any((folder / name).exists() for name in (_STORE_NAME, _UPLOADS_NAME)):
                # Delete it while locked, so that no other run begins in it.
                with contextlib.suppress(OSError):
                    path.unlink()
                    if not existed_before:
                        folder.rmdir()


def _acquire_lock(lock: IO[str], folder: Path) -> None:
    lock_exclusively(
        lock.fileno(),
        folder / _LOCK_NAME,
        busy=lambda: f"Another run is using {folder}; wait for it, or choose another --work.",
        ended=f"Another run in {folder} has just ended; give the command again.",
        unable=lambda why: f"Cannot lock {folder}: {why}; choose a --work on a file system with locks.",
    )
