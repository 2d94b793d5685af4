"""One run of a recipe, phase by phase, from listed inputs to the store."""

from dataclasses import replace
from functools import partial
from typing import final

from batchloom.preparation.append import check_same_objective
from batchloom.preparation.documents.encode_documents import EncodeContext
from batchloom.preparation.documents.record_parsers import RecordParsers, check_loader_reads, check_one_objective
from batchloom.preparation.identity.step_files import build_step_indexes, check_files_unchanged
from batchloom.preparation.phases import prepare_notes
from batchloom.preparation.phases.finish import finish_dry_run, finish_store
from batchloom.preparation.phases.job_results import JobResults
from batchloom.preparation.phases.sample_phase import SamplePhase
from batchloom.preparation.phases.shard_phase import ShardPhase
from batchloom.preparation.phases.tokenize_phase import TokenizePhase
from batchloom.preparation.phases.unit_names import UnitNames
from batchloom.preparation.phases.worker_setup import WorkerSetup, make_task_function, start_server
from batchloom.preparation.report.progress import PrepareLog, PrepareResult, make_result
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.rerun import begin_or_resume, find_unit_bytes, hash_sources, make_job_identity
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.units.stream_units import adopt_units
from batchloom.preparation.units.units import RecordExcludedError, plan_units
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.preparation.workers.executor_choice import choose_worker_count, make_executor
from batchloom.preparation.workers.fork_server import ForkServer
from batchloom.sources import SourceListing
from batchloom.store import Manifest
from batchloom.store.maintain import next_part_number


@final
class PrepareRun:
    """One run of a recipe in its work folder; ``base`` is the store to append to."""

    def __init__(
        self,
        work: WorkFolder,
        request: PrepareRequest,
        listing: SourceListing,
        settings: RunSettings,
        log: PrepareLog,
        record_parsers: RecordParsers,
        base: Manifest | None = None,
    ) -> None:
        self._work = work
        self._request = request
        self._recipe = request.recipe
        self._settings = replace(settings, unit_bytes=settings.unit_bytes or find_unit_bytes(work, listing))
        self._listing = listing
        self._log = log
        log.left_out = listing.left_out
        self._base = base
        self._record_parsers = record_parsers
        unread = settings.hash_inputs and not listing.content
        self._content = hash_sources(listing.sources) if unread else listing.content
        first_part = next_part_number(base) if base else 0
        self._units = plan_units(listing.sources, record_parsers.rules, self._settings.unit_bytes, first_part)
        # Computed once: it depends on free memory, and workers that have started already use some.
        self._workers = choose_worker_count(settings.execution, len(self._units), listing.bytes)
        self._clean_files: str | None = None
        self._resumed = 0
        self._engine_note = ""

    def begin(self) -> None:
        """Announce the job, then begin it or resume the work in its folder."""
        self._announce()
        self._begin_or_resume()
        if self._work.complete and not self._settings.dry_run:
            self._log.report([prepare_notes.RESUMED_MOVE])
            self._resumed = len(self._units)

    def _announce(self) -> None:
        """Note what will be done with every source, before work begins."""
        sources = self._listing.sources
        parsers = self._record_parsers
        self._log.report(prepare_notes.describe_reading(sources, parsers, self._recipe))
        check_one_objective(sources, parsers)
        if self._settings.for_loader:
            check_loader_reads(sources, parsers)
        check_same_objective(sources, parsers, self._base, self._work.out)

    def _begin_or_resume(self) -> None:
        """Begin the job in its work folder, or check that the work there is its own."""
        recipe = self._recipe
        job = make_job_identity(
            recipe,
            self._listing,
            self._settings.constants,
            list(self._content.values()),
            self._base.generation if self._base else 0,
        )
        self._clean_files = job.recipe["reading"].get("clean_files")
        begin_or_resume(self._work, recipe, job, self._request.tokenizer_state, restart=self._settings.restart)
        self._work.sweep()
        if not self._work.complete:
            # An evaluation set may be unusable; find out before a tokenizer is learned.
            build_step_indexes(recipe.reading.clean, self._work.path, self._log.note)
            check_files_unchanged(recipe.reading.clean, self._clean_files)

    def make(self) -> Manifest:
        """Run all phases and complete the store in the work folder, or report a dry run."""
        results = self._run_phases()
        self._engine_note = results.tokenizer.engine.note
        finish = finish_dry_run if self._settings.dry_run else finish_store
        return finish(
            self._work, results, self._settings, self._log, workers=self._workers, resumed_units=self._resumed
        )

    def make_result(self, manifest: Manifest) -> PrepareResult:
        """Return the result of the store, with all its generations."""
        return make_result(
            self._work.out,
            manifest,
            engine_note=self._engine_note,
            seconds=self._log.elapsed,
            resumed_units=self._resumed,
            notes=tuple(self._log.notes),
        )

    def _run_phases(self) -> JobResults:
        """Run all phases up to the last shard."""
        log = self._log
        # The time before: listing inputs and sampling their first records.
        log.seconds["list"] = log.elapsed
        execution = self._settings.execution
        log.report(prepare_notes.describe_executor(execution, len(self._units)))
        with start_server(execution, self._workers) as server:
            sample_phase = SamplePhase(self._work, self._request, self._listing, self._record_parsers, log, server)
            setup, context = sample_phase.run(self._workers)
            results = self._make_units(setup, context, server)
        # The manifest names the files that documents were compared with.
        check_files_unchanged(self._recipe.reading.clean, self._clean_files)
        log.report(prepare_notes.describe_altered_texts(results.content, self._recipe.dedup.repeat_unit))
        log.report(prepare_notes.describe_cut_texts(results.units, self._record_parsers))
        return results

    def _make_units(self, setup: WorkerSetup, context: EncodeContext, server: ForkServer | None) -> JobResults:
        """Run all phases over the units; start over if an excluded record affects others."""
        tokenizer = context.encoder.tokenizer
        unit_names = UnitNames(
            self._work, self._units, self._recipe, tokenizer, self._settings.constants, self._content
        )
        starts_over = False
        while True:
            try:
                return self._run_on_executor(setup, context, unit_names, server, starts_over=starts_over)
            except RecordExcludedError as error:
                unit_names.exclude(error)
                starts_over = True
                # The executor has ended its server.
                server = None

    def _run_on_executor(
        self,
        setup: WorkerSetup,
        context: EncodeContext,
        unit_names: UnitNames,
        server: ForkServer | None,
        *,
        starts_over: bool,
    ) -> JobResults:
        """Run all phases with the records excluded so far."""
        recipe = self._recipe
        log = self._log
        work = self._work
        parsers = self._record_parsers
        names, segments = unit_names.make_names()
        folders = [work.unit(name) for name in names]
        if work.follow(names) and not starts_over:
            log.report([prepare_notes.OTHER_VERSIONS])
        adopted = adopt_units(self._units, work, folders, parsers, recipe)
        log.report(prepare_notes.describe_adopted_units(adopted, len(self._units)))
        tokenize_phase = TokenizePhase(self._units, folders, work, parsers.rules, self._listing, recipe, log)
        self._resumed = tokenize_phase.resumed
        log.report(prepare_notes.describe_resumed_units(self._resumed, len(self._units)))
        dry_run = self._settings.dry_run
        shard_phase = ShardPhase(work, recipe, parsers, self._listing.sources, self._base, log, dry_run=dry_run)
        with make_executor(
            self._settings.execution,
            self._workers,
            work.path,
            setup,
            partial(make_task_function, context),
            tokenize_phase.handle_message,
            server,
        ) as executor:
            units = tokenize_phase.run(executor, segments)
            return shard_phase.run(executor, units, context, tokenize_phase.reports.report())
