"""``prepare`` into a remote store: made in a local work folder, then uploaded."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from batchloom.core.addresses import get_scheme, is_url, redact_url
from batchloom.core.errors import OutputError, StoreConflictError, StoreError
from batchloom.core.files import lock_exclusively
from batchloom.core.synthetic_data import SyntheticSpec
from batchloom.preparation.remote_output import (
    OWNER_NAME,
    StoreOwner,
    StoreUploader,
    check_ownership,
    claim_folder,
    publish_store,
    read_remote_manifest,
    release_claim,
)
from batchloom.preparation.report.html_report import write_report_page
from batchloom.preparation.report.progress import Listener, Note, PrepareResult, Progress, make_result
from batchloom.preparation.report.report import parse_report, read_report
from batchloom.preparation.request.inputs import list_inputs
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.rerun import (
    check_same_finished_job,
    find_finished_store,
    fingerprint_tokenizer_file,
    hash_sources,
    make_job_identity,
)
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.synthetic_run import (
    check_same_data,
    parse_synthetic_input,
    synthetic_to_plain,
    write_synthetic,
)
from batchloom.preparation.units.work_folder import SPOOL_NAME, WORK_VERSION, JobIdentity
from batchloom.preparation.workers.executors import RunSettings
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.sources import SourceListing
from batchloom.sources.files import Spool
from batchloom.store import PAGE_NAME, REPORT_NAME, WORK_NAME, Manifest, wrap_write_errors, write_file
from batchloom.store.write import make_folder

_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME = "uploads.jsonl", "store", "lock"
_WORK_FILES = (_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME)

# Builds the store of listed inputs in a local folder.
StoreBuilder = Callable[[Recipe, Path, SourceListing, Spool, Listener, float], PrepareResult]


def default_work_folder(url: str) -> Path:
    """Return the default local work folder for a URL, below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = xxhash.xxh3_64_hexdigest(redact_url(url).rstrip("/").encode())
    return Path(cache) / "batchloom" / "prepare" / name


def run_remote(
    request: PrepareRequest, url: str, listener: Listener, make: StoreBuilder, settings: RunSettings
) -> PrepareResult:
    """Run a recipe into a remote folder; see :func:`batchloom.prepare`.

    Args:
        request: the recipe and its origin.
        url: URL of the folder.
        listener: callback that gets notes and progress.
        make: builder of the store on this machine.
        settings: settings of the run.
    """
    began, recipe = time.perf_counter(), request.recipe
    folder = settings.work or default_work_folder(url)
    check_remote_separate(recipe.inputs, url)
    with RemoteFolder(url) as remote_folder, _lock_work_folder(folder):
        files = remote_folder.list_files(first=True)
        with _release_on_failure(remote_folder, folder / _STORE_NAME) as claimed_owners, _open_spool(folder) as spool:
            manifest = read_remote_manifest(remote_folder, files)
            build = _plan_remote_build(request, folder, spool, settings, finished=manifest is not None)
            build.begin(remote_folder, files, manifest, restart=settings.restart)
            if manifest is not None:
                _delete_leftovers(remote_folder, files, folder)
                seconds = time.perf_counter() - began
                return make_result(remote_folder.redacted_url, manifest, seconds=seconds, already_done=True)
            claimed_owners.append(build.owner)
            if settings.restart:
                build.delete_previous_work()
            note = (
                f"The store is written to the work folder {folder} (--work) and uploaded to "
                f"{remote_folder.redacted_url}. The work folder is deleted after the upload."
            )
            listener(Note(note))
            remote_folder.end_uploads()
            result = build.make(make, spool, listener, began)
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
                partial(build.check_claim, remote_folder),
            )
        _delete_leftovers(remote_folder, {**files, OWNER_NAME: RemoteFile(0, "")}, folder)
    return replace(
        result,
        path=remote_folder.redacted_url,
        seconds=time.perf_counter() - began,
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

    recipe: Recipe
    store: Path
    owner: StoreOwner
    inputs: SourceListing | SyntheticSpec
    tokenizer_state: Mapping[str, Any] | None = None
    hashed: bool = False

    def begin(
        self,
        remote_folder: RemoteFolder,
        files: dict[str, RemoteFile],
        manifest: Manifest | None,
        *,
        restart: bool = False,
    ) -> None:
        """Claim a remote folder for this job, or check that its store is of this job.

        Args:
            remote_folder: the folder.
            files: its files.
            manifest: manifest of the finished store there; None if there is none.
            restart: whether to replace unfinished work of another job.

        Raises:
            StoreConflictError: it belongs to another job, or holds other files.
        """
        if manifest is None:
            claim_folder(remote_folder, files, self.owner, self._own_recipe, restart=restart)
        else:
            self._check_same_store(remote_folder, manifest)

    def check_claim(self, remote_folder: RemoteFolder) -> None:
        """Check that this job still owns the remote folder.

        Raises:
            StoreConflictError: another job owns it now.
        """
        check_ownership(remote_folder, self.owner, self._own_recipe)

    def delete_previous_work(self) -> None:
        """Delete another job's local store that was not sent; its equal units stay."""
        if isinstance(self.inputs, SyntheticSpec):
            shutil.rmtree(self.store, ignore_errors=True)
            return
        try:
            report = read_report(self.store)
            find_finished_store(self.store, self.recipe, self.inputs, report, self.tokenizer_state, hashed=self.hashed)
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
    def _own_recipe(self) -> Recipe | None:
        """The recipe; None for synthetic data, which has no tokenizer."""
        return self.recipe if isinstance(self.inputs, SourceListing) else None

    def _check_same_store(self, remote_folder: RemoteFolder, manifest: Manifest) -> None:
        if isinstance(self.inputs, SyntheticSpec):
            check_same_data(remote_folder.redacted_url, manifest, self.owner.job.recipe)
            return
        report = parse_report(remote_folder.read(REPORT_NAME) or b"")
        check_same_finished_job(
            remote_folder.redacted_url,
            manifest,
            report,
            self.recipe,
            self.inputs,
            self.tokenizer_state,
            hashed=self.hashed,
        )

    def make(self, make: StoreBuilder, spool: Spool, listener: Listener, began: float) -> PrepareResult:
        """Make the store on this machine."""
        if isinstance(self.inputs, SyntheticSpec):
            return write_synthetic(self.inputs, self.recipe, self.store, listener)
        return make(self.recipe, self.store, self.inputs, spool, listener, began)


def _plan_remote_build(
    request: PrepareRequest, folder: Path, spool: Spool, settings: RunSettings, *, finished: bool
) -> _RemoteBuild:
    """Return the build of a request; ``finished`` means that the remote store exists."""
    recipe, store = request.recipe, folder / _STORE_NAME
    if synthetic_spec := parse_synthetic_input(recipe.inputs):
        plain = synthetic_to_plain(synthetic_spec, recipe)
        return _RemoteBuild(recipe, store, StoreOwner(JobIdentity(WORK_VERSION, plain, [], [])), synthetic_spec)
    listing = list_inputs(recipe, spool, exclude=folder, streaming=settings.streaming)
    listing = replace(listing, notes=(*request.initial_notes, *listing.notes))
    if settings.hash_inputs and not finished:
        listing = replace(listing, content=hash_sources(listing.sources))
    identity = make_job_identity(recipe, listing, [], list(listing.content.values()))
    owner = StoreOwner(identity, fingerprint_tokenizer_file(recipe))
    return _RemoteBuild(recipe, store, owner, listing, request.tokenizer_state, settings.hash_inputs)


def check_remote_separate(inputs: Sequence[str], url: str) -> None:
    """Refuse a remote output inside an input, or an input inside the output.

    Raises:
        StoreConflictError: the message names the input.
    """
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
    """Lock a work folder; delete it afterwards if it is empty.

    Raises:
        StoreConflictError: another run uses it, or it holds other files.
        OutputError: it cannot be written.
    """
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
