"""``prepare`` into a remote store: made in a local work folder, then uploaded."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import xxhash

from batchloom.core.addresses import get_scheme, is_url, redact_url
from batchloom.core.errors import SettingsError, StoreConflictError, StoreError
from batchloom.core.files import find_cache_folder, lock_exclusively
from batchloom.preparation.input_jobs import make_store
from batchloom.preparation.report.progress import Listener, Note, PrepareLog, PrepareResult, make_result
from batchloom.preparation.report.report import parse_report, read_report, write_report_page
from batchloom.preparation.request.inputs import list_inputs
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.rerun import RequestedJob
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.store_upload import is_beginning, refuse_files, send_store
from batchloom.preparation.synthetic_request import parse_synthetic_input
from batchloom.preparation.units.work_folder import SPOOL_NAME
from batchloom.remote import RemoteFolder
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, PAGE_NAME, REPORT_NAME, WORK_NAME, Manifest, wrap_write_errors, write_file
from batchloom.store.format import decode_manifest
from batchloom.store.write import make_folder

# Names in the work folder.
_STORE_NAME = "store"
_LOCK_NAME = "lock"


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
        location = remote_folder.redacted_url
        # The first request: a wrong address or an occupied folder fails before the work.
        manifest = _read_remote_manifest(remote_folder, store / MANIFEST_NAME)
        with Spool(store / WORK_NAME / SPOOL_NAME) as spool:
            listing = list_inputs(request.recipe, spool, exclude=folder, streaming=settings.streaming)
            listing = request.add_notes(listing)
            job = RequestedJob(request.recipe, listing, request.tokenizer_state, settings.hash_inputs)
            if manifest is not None:
                job.check_same_finished_job(location, manifest, parse_report(remote_folder.read(REPORT_NAME) or b""))
                # A run that was killed after the manifest has left it.
                shutil.rmtree(store, ignore_errors=True)
                return make_result(location, manifest, seconds=log.elapsed, already_done=True)
            note = (
                f"The store is written to the work folder {folder} (--work) and uploaded to {location}. The work "
                "folder is deleted after the upload."
            )
            listener(Note(note))
            if settings.restart:
                _delete_other_store(store, job)
            result = make_store(request, store, listing, spool, settings, log, read_report(store))
        result = replace(result, path=location, notes=(note, *result.notes))
        if settings.dry_run:
            return result
        _record_location(store, location)
        send_store(store, remote_folder, listener)
        shutil.rmtree(store, ignore_errors=True)
    return replace(result, seconds=log.elapsed, already_done=False)


def _read_remote_manifest(folder: RemoteFolder, local_path: Path) -> Manifest | None:
    """Return the manifest of a finished remote store, or None.

    Without a finished local store, other files in the folder are those of another job or user.
    """
    files = folder.list_files()
    data = folder.read(MANIFEST_NAME) if MANIFEST_NAME in files else None
    with wrap_write_errors(local_path):
        local_manifest = local_path.read_bytes() if local_path.exists() else None
    if data is not None and not (local_manifest is not None and is_beginning(data, local_manifest)):
        return decode_manifest(data, f"{folder.redacted_url}/{MANIFEST_NAME}")
    if local_manifest is None:
        refuse_files(folder, files, "--out")
    return None


def _delete_other_store(store: Path, job: RequestedJob) -> None:
    """Delete another job's local store that was not sent; its equal units stay."""
    try:
        job.find_finished_store(store, read_report(store))
    except StoreError:
        with wrap_write_errors(store):
            # The work folder also holds inputs that can be read only once.
            for path in [path for path in store.iterdir() if path.name != WORK_NAME]:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


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


@contextlib.contextmanager
def _lock_work_folder(folder: Path) -> Iterator[None]:
    """Lock a work folder; delete it afterwards if it holds no store."""
    make_folder(folder)
    with wrap_write_errors(folder):
        unknown_names = sorted({path.name for path in folder.iterdir()} - {_STORE_NAME, _LOCK_NAME})
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
            if not (folder / _STORE_NAME).exists():
                # Delete it while locked, so that no other run begins in it.
                with contextlib.suppress(OSError):
                    path.unlink()
                    folder.rmdir()
