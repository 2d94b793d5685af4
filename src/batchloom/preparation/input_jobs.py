"""Jobs of listed inputs: a new store, or the next generation of a store."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import final

from batchloom.core.errors import InputError, StoreConflictError, TooManyBadRecordsError
from batchloom.core.process_state import pause_gc
from batchloom.preparation.append import check_same_recipe, read_base_manifest, read_tokenizer_state, select_new_inputs
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.listing.unfit_files import UnfitFile, find_unfit, leave_out_read, leave_out_unfit
from batchloom.preparation.phases import prepare_notes
from batchloom.preparation.prepare_run import PrepareRun
from batchloom.preparation.report.progress import PrepareLog, PrepareResult, make_result, subtract_base
from batchloom.preparation.report.report import PrepareReport
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.rerun import RequestedJob
from batchloom.preparation.resumable_job import run_job
from batchloom.preparation.settings.recipe import Recipe, count_allowed_bad
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.sources import SourceListing
from batchloom.sources.files import Spool
from batchloom.store import Manifest, read_manifest
from batchloom.store.format import QUARANTINE_NAME, SMALL_FILE_LIMIT

# Minimum size of an input file's manifest entry, in bytes.
_MIN_ENTRY_BYTES = 240


def make_store(
    request: PrepareRequest,
    out: Path,
    listing: SourceListing,
    spool: Spool,
    settings: RunSettings,
    log: PrepareLog,
    report: PrepareReport | None = None,
) -> PrepareResult:
    """Make the store of listed inputs, append them to it, or return the finished one.

    ``report`` is that of the existing store.
    """
    base = read_base_manifest(out) if settings.append else None
    if base is not None:
        append_job = AppendJob(request, out, listing, spool, settings, log, base)
        return subtract_base(run_job(append_job, out, base=base.generation, dry_run=settings.dry_run), base)
    if settings.append:
        listing = replace(listing, notes=(*listing.notes, prepare_notes.describe_first_append(out, request.recipe)))
    job = PrepareJob(request, out, listing, spool, settings, log, report)
    return run_job(job, out, dry_run=settings.dry_run)


@final
class PrepareJob:
    """Job of a new store; ``report`` is that of the finished store, if there is one."""

    def __init__(
        self,
        request: PrepareRequest,
        out: Path,
        listing: SourceListing,
        spool: Spool,
        settings: RunSettings,
        log: PrepareLog,
        report: PrepareReport | None,
    ) -> None:
        self._request = request
        self._out = out
        self._listing = listing
        self._spool = spool
        self._settings = settings
        self._log = log
        self._report = report

    def find_finished(self) -> PrepareResult | None:
        """Return the result of the store that this job has made; None without a store."""
        try:
            return self._find_finished(self._listing)
        except StoreConflictError:
            # A finished store lacks the files that were left out when it was made: it is compared without them.
            parsers = RecordParsers(self._request.recipe, self._settings.limits)
            unfit = []
            with contextlib.suppress(InputError):
                unfit = find_unfit(self._listing.sources, parsers, self._request.recipe)
            if not unfit:
                raise
            fitting = leave_out_unfit(self._listing, unfit, self._request.recipe)
        self._log.report(prepare_notes.describe_listing(fitting))
        return self._find_finished(fitting)

    def _find_finished(self, listing: SourceListing) -> PrepareResult | None:
        request = self._request
        out = self._out
        with pause_gc():
            job = RequestedJob(request.recipe, listing, request.tokenizer_state, self._settings.hash_inputs)
            manifest = job.find_finished_store(out, self._report)
        if manifest is None:
            return None
        sources = {source.name: source for source in listing.sources}
        unfit = [
            UnfitFile(sources[entry.name], entry.damage, sum(part.records for part in entry.parts))
            for entry in manifest.sources
            if entry.damage and entry.name in sources
        ]
        allowed_bad = _check_bad_records(manifest, sum(file.bad for file in unfit), request.recipe, out)
        notes: tuple[str, ...] = ()
        if unfit:
            fitting = leave_out_read(listing, unfit, request.recipe, allowed_bad)
            self._log.report(prepare_notes.describe_listing(fitting))
            notes = fitting.notes
        return make_result(
            out,
            manifest,
            engine_note=self._report.engine_note if self._report else "",
            seconds=self._log.elapsed,
            already_done=True,
            notes=notes,
        )

    def begin(self, work: WorkFolder) -> PrepareRun:
        """Begin or resume, without the files that cannot be read."""
        self._spool.sweep()
        _check_input_count(len(self._listing.sources))
        self._log.report(prepare_notes.describe_listing(self._listing))
        recipe = self._request.recipe
        parsers = RecordParsers(recipe, self._settings.limits)
        listing = self._listing
        if unfit := find_unfit(listing.sources, parsers, recipe):
            listing = leave_out_unfit(listing, unfit, recipe)
            self._log.report(prepare_notes.describe_listing(listing))
        run = PrepareRun(work, self._request, listing, self._settings, self._log, parsers)
        run.begin()
        return run


@final
class AppendJob:
    """Job of the next generation of a store; ``base`` is the manifest of the newest."""

    def __init__(
        self,
        request: PrepareRequest,
        out: Path,
        listing: SourceListing,
        spool: Spool,
        settings: RunSettings,
        log: PrepareLog,
        base: Manifest,
    ) -> None:
        check_same_recipe(request.recipe, base, out, request.tokenizer_state)
        self._request = request
        self._out = out
        self._spool = spool
        self._settings = settings
        self._log = log
        self._base = base
        self._parsers = RecordParsers(request.recipe, settings.limits)
        self._listing = self._select_inputs(listing)

    def _select_inputs(self, listing: SourceListing) -> SourceListing:
        """Select the inputs that are new and can be read."""
        recipe = self._request.recipe
        new_inputs = select_new_inputs(listing, self._base, self._out, hashed=self._settings.hash_inputs)
        unfit = find_unfit(new_inputs.sources, self._parsers, recipe)
        if not unfit:
            return new_inputs
        # All inputs, and not only the new ones, decide whether too many cannot be read.
        fitting = leave_out_unfit(listing, unfit, recipe)
        names = {source.name for source, _ in unfit}
        return replace(
            new_inputs,
            sources=tuple(source for source in new_inputs.sources if source.name not in names),
            notes=(*new_inputs.notes, *fitting.notes),
            warnings=(*new_inputs.warnings, *fitting.warnings),
            left_out=fitting.left_out,
        )

    def find_finished(self) -> PrepareResult | None:
        """Return the result of the store if it holds all inputs, else None.

        Raises:
            StoreConflictError: the store has another generation by now.
        """
        if (newest := read_manifest(self._out).generation) != self._base.generation:
            raise StoreConflictError(
                f"{self._out} has become generation {newest} since this run looked at it; give the command again."
            )
        if self._listing.sources:
            return None
        self._log.report(prepare_notes.describe_listing(self._listing))
        return make_result(
            self._out, self._base, seconds=self._log.elapsed, already_done=True, notes=self._listing.notes
        )

    def begin(self, work: WorkFolder) -> PrepareRun:
        """Begin or resume, with the store's tokenizer."""
        self._spool.sweep()
        _check_input_count(len(self._listing.sources) + len(self._base.sources))
        self._log.report(prepare_notes.describe_listing(self._listing))
        request = replace(self._request, tokenizer_state=read_tokenizer_state(self._out))
        run = PrepareRun(work, request, self._listing, self._settings, self._log, self._parsers, self._base)
        run.begin()
        return run


def _check_input_count(files: int) -> None:
    """Raise, before any work, if the manifest would be too large to read."""
    if files * _MIN_ENTRY_BYTES > SMALL_FILE_LIMIT:
        raise InputError(
            f"{files:,} input files make a manifest of more than {SMALL_FILE_LIMIT:,} bytes, which cannot be read. "
            "Write the inputs as records of JSON Lines files, or make several stores."
        )


def _check_bad_records(manifest: Manifest, unfit: int, recipe: Recipe, out: Path) -> int:
    """Raise if a finished store was made of more bad records than are allowed now.

    Returns:
        The number of further bad records that are allowed; the ``unfit`` ones, of files left out, do not count.
    """
    bad = manifest.counts.quarantined - unfit
    records = manifest.counts.records
    allowed = count_allowed_bad(recipe.max_bad, records)
    if bad > allowed:
        raise TooManyBadRecordsError(
            f"{bad:,} of the {records:,} records that {out} was made of are bad, more than --max-bad {recipe.max_bad} "
            f"allows; they are listed in {out / QUARANTINE_NAME}. Fix the input, or give its --max-bad."
        )
    return allowed - bad
