"""``prepare`` into a remote store: made in a local work folder, then uploaded."""

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec

from batchloom.core.addresses import redact_url
from batchloom.core.errors import SettingsError, StoreError
from batchloom.preparation.input_jobs import make_store
from batchloom.preparation.listing.input_listing import list_inputs
from batchloom.preparation.output_checks import check_remote_separate
from batchloom.preparation.phases.prepare_notes import describe_work_folder
from batchloom.preparation.remote_work_folder import STORE_NAME, default_work_folder, lock_work_folder
from batchloom.preparation.report.progress import Listener, PrepareLog, PrepareResult, make_result
from batchloom.preparation.report.report import parse_report, read_report, write_report_page
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


def run_remote(request: PrepareRequest, url: str, listener: Listener, settings: RunSettings) -> PrepareResult:
    """Run a recipe into a remote folder; see :func:`batchloom.prepare`."""
    log = PrepareLog(listener)
    folder = settings.work or default_work_folder(url)
    store = folder / STORE_NAME
    if parse_synthetic_input(request.recipe.inputs):
        raise SettingsError(
            [f"out: {redact_url(url)} is remote, and synthetic data is written to this machine only; name a folder"]
        )
    check_remote_separate(request.recipe.inputs, url)
    with RemoteFolder(url) as remote_folder, lock_work_folder(folder):
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
            note = describe_work_folder(folder, location)
            listener(note)
            if settings.restart:
                _delete_other_store(store, job)
            result = make_store(request, store, listing, spool, settings, log, read_report(store))
        result = replace(result, path=location, notes=(note.text, *result.notes))
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
