"""One run of a recipe, phase by phase: from listed inputs to the store.

:func:`make_store` decides whether there is work, and :class:`PrepareRun` does it. `phases/` has a module per phase.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import final

import msgspec

from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import DamagedFileError, InputError, SchemaError, StoreConflictError, TooManyBadRecordsError
from batchloom.core.files import decode_file_name
from batchloom.core.fingerprint import fingerprint
from batchloom.core.process_state import measure_peak_memory, pause_gc
from batchloom.core.wording import format_count, format_list
from batchloom.preparation.append import (
    check_same_objective,
    check_same_recipe,
    read_base_manifest,
    read_tokenizer_state,
    select_new_inputs,
)
from batchloom.preparation.documents.document_encoder import EncodeContext
from batchloom.preparation.documents.record_parsers import (
    PLAIN_TEXT_NOTE,
    WHOLE_TEXTS,
    RecordParsers,
    check_loader_reads,
    check_one_objective,
)
from batchloom.preparation.documents.subsets import SubsetRule, describe_missed_shares
from batchloom.preparation.documents.token_encoder import make_fim_cutter
from batchloom.preparation.documents.tokenizer_choice import (
    choose_dtype_name,
    choose_job_template,
    choose_job_tokenizer,
    find_unused_columns,
)
from batchloom.preparation.phases import worker_setup
from batchloom.preparation.phases.base_generations import BaseGenerations, read_base_generations
from batchloom.preparation.phases.duplicate_resolution import (
    ShardSettings,
    decide,
    describe_long_documents,
    resolve_duplicates,
)
from batchloom.preparation.phases.duplicates_file import write_duplicates_file
from batchloom.preparation.phases.find_duplicates import find_duplicate_pairs, find_duplicates
from batchloom.preparation.phases.finish import collect_store, finish_store
from batchloom.preparation.phases.job_results import JobResults, make_manifest
from batchloom.preparation.phases.tokenize_phase import SegmentSearch, TokenizePhase
from batchloom.preparation.phases.unit_shards import write_shards
from batchloom.preparation.phases.worker_setup import (
    WorkerSetup,
    collect_unit_settings,
    collect_versions,
    load_tokenizer,
    make_task_function,
)
from batchloom.preparation.report.progress import (
    PrepareLog,
    PrepareResult,
    Progress,
    make_result,
    subtract_base,
)
from batchloom.preparation.report.report import (
    PrepareReport,
    ReportContent,
    build_content,
    encode_report,
    write_report_page,
)
from batchloom.preparation.request.inputs import is_named, leave_out_unfit
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.request.recipe_file import describe_input_locations, recipe_settings_for_report
from batchloom.preparation.rerun import (
    RequestedJob,
    begin_or_resume,
    hash_sources,
    make_job_identity,
    make_report_sources,
)
from batchloom.preparation.resumable_job import clear_leftover_work, move_store, remove_leftover_work
from batchloom.preparation.settings.clean_recipe import build_step_indexes, check_files_unchanged
from batchloom.preparation.settings.read_recipe import describe_unused_weights
from batchloom.preparation.settings.recipe import Recipe, compute_recipe_fingerprint, count_allowed_bad
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.units.stream_units import STREAM_BATCHES_FOLDER, adopt_units
from batchloom.preparation.units.unit_report import STAGES, StageTime, StepFlow, UnitReport, add_stage_times
from batchloom.preparation.units.units import (
    RecordExcludedError,
    choose_unit_bytes,
    compute_unit_identity,
    plan_units,
)
from batchloom.preparation.units.work_folder import (
    Decision,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
)
from batchloom.preparation.workers.executor_choice import choose_worker_count, make_executor, runs_inline
from batchloom.preparation.workers.fork_server import ForkServer
from batchloom.preparation.workers.machine_limits import count_cores
from batchloom.preparation.workers.protocols import Executor
from batchloom.sources import SourceListing, prefetch_sources
from batchloom.sources.files import Source, Spool
from batchloom.sources.formats import choose_read_method
from batchloom.store import (
    PAGE_NAME,
    REPORT_NAME,
    Manifest,
    ShardEntry,
    extend_manifest,
    lock_store,
    read_manifest,
    write_file,
)
from batchloom.store.format import QUARANTINE_NAME, SMALL_FILE_LIMIT
from batchloom.store.maintain import next_part_number
from batchloom.tokens import Tokenizer, parse_train_spec

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
    try:
        return _make_listed(request, out, listing, spool, settings, log, report)
    except _UnfitSourcesError as error:
        unfit = error.unfit
    except StoreConflictError:
        # A finished store lacks the files that were left out when it was made: it is compared without them.
        unfit = []
        with contextlib.suppress(InputError):
            unfit = _find_unfit(listing.sources, RecordParsers(request.recipe, settings.limits), request.recipe)
        if not unfit:
            raise
    fitting = leave_out_unfit(listing, unfit, request.recipe)
    # A finished store would not report them.
    _report_notes(fitting, log)
    return _make_listed(request, out, replace(fitting, notes=(), warnings=()), spool, settings, log, report)


def _find_unfit(
    sources: Sequence[Source], record_parsers: RecordParsers, recipe: Recipe
) -> list[tuple[Source, InputError]]:
    """Return files of folders and archives that are damaged or fit no schema.

    Raises:
        DamagedFileError: a file that an input names is damaged.
        SchemaError: a file that an input names fits none.
    """
    unfit: list[tuple[Source, InputError]] = []
    for source in prefetch_sources(sources, lambda item: item):
        try:
            record_parsers.get_parser(source)
        except (DamagedFileError, SchemaError) as error:
            if is_named(source, recipe):
                raise
            unfit.append((source, error))
    return unfit


def _make_listed(
    request: PrepareRequest,
    out: Path,
    listing: SourceListing,
    spool: Spool,
    settings: RunSettings,
    log: PrepareLog,
    report: PrepareReport | None,
) -> PrepareResult:
    base = read_base_manifest(out) if settings.append else None
    if base is not None:
        return _append_generation(request, out, listing, spool, settings, log, base)
    if settings.append:
        note = f"There is no store at {out} yet: it is made, with the tokenizer {request.recipe.tokenizer}."
        listing = replace(listing, notes=(*listing.notes, note))
    result = _find_finished_job(request, out, listing, settings, log, report)
    if result is not None:
        remove_leftover_work(out, result.generation)
        return result
    with WorkFolder(out) as work:
        # Another run may have finished before this one got the lock.
        result = _find_finished_job(request, out, listing, settings, log, report)
        if result is not None:
            clear_leftover_work(work, result.generation)
            return result
        spool.sweep()
        return PrepareRun(work, request, listing, settings, log).run()


def _append_generation(
    request: PrepareRequest,
    out: Path,
    listing: SourceListing,
    spool: Spool,
    settings: RunSettings,
    log: PrepareLog,
    base: Manifest,
) -> PrepareResult:
    check_same_recipe(request.recipe, base, out, request.tokenizer_state)
    listing = select_new_inputs(listing, base, out, hashed=settings.hash_inputs)
    if not listing.sources:
        remove_leftover_work(out, base.generation)
        _report_notes(listing, log)
        result = make_result(out, base, seconds=log.elapsed, already_done=True, notes=listing.notes)
        return subtract_base(result, base)
    with lock_store(out):
        # From here on, commands that change the store see that a job is running in it.
        work = WorkFolder(out)
    with work:
        if (newest := read_manifest(out).generation) != base.generation:
            raise StoreConflictError(
                f"{out} has become generation {newest} since this run looked at it; give the command again."
            )
        spool.sweep()
        clear_leftover_work(work, base.generation)
        # Appended documents are encoded with the store's tokenizer.
        request = replace(request, tokenizer_state=read_tokenizer_state(out))
        return PrepareRun(work, request, listing, settings, log, base).run()


def _find_finished_job(
    request: PrepareRequest,
    out: Path,
    listing: SourceListing,
    settings: RunSettings,
    log: PrepareLog,
    report: PrepareReport | None,
) -> PrepareResult | None:
    """Return the result of a finished job; None if there is work to do."""
    recipe = request.recipe
    with pause_gc():
        job = RequestedJob(recipe, listing, request.tokenizer_state, settings.hash_inputs)
        manifest = job.find_finished_store(out, report)
    if manifest is None:
        return None
    bad, records = manifest.counts.quarantined, manifest.counts.records
    if bad > count_allowed_bad(recipe.max_bad, records):
        raise TooManyBadRecordsError(
            f"{bad:,} of the {records:,} records that {out} was made of are bad, more than --max-bad {recipe.max_bad} "
            f"allows; they are listed in {out / QUARANTINE_NAME}. Fix the input, or give its --max-bad."
        )
    damage = {entry.name: entry.damage for entry in manifest.sources if entry.damage}
    left_out = [source for source in listing.sources if source.name in damage]
    notes: tuple[str, ...] = ()
    if damaged := [(source, DamagedFileError(damage[source.name])) for source in left_out]:
        notes = leave_out_unfit(listing, damaged, recipe).notes
        for note in notes:
            log.add_warning(note)
    engine_note = report.engine_note if report else ""
    return make_result(out, manifest, engine_note=engine_note, seconds=log.elapsed, already_done=True, notes=notes)


class _UnfitSourcesError(Exception):
    """Files that are damaged or fit no schema, each with its error."""

    def __init__(self, unfit: Sequence[tuple[Source, InputError]]) -> None:
        super().__init__()
        self.unfit = unfit


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
        base: Manifest | None = None,
    ) -> None:
        self._work, self._recipe, self._tokenizer_state = work, request.recipe, request.tokenizer_state
        self._settings = replace(settings, unit_bytes=settings.unit_bytes or _find_unit_bytes(work, listing))
        self._listing, self._log, self._base = listing, log, base
        self._started = datetime.now(UTC)
        self._record_parsers = RecordParsers(self._recipe, settings.limits)
        unread = settings.hash_inputs and not listing.content
        self._content = hash_sources(listing.sources) if unread else listing.content
        _check_input_count(len(listing.sources) + (len(base.sources) if base else 0))
        first_part = next_part_number(base) if base else 0
        rules, unit_bytes = self._record_parsers.rules, self._settings.unit_bytes
        self._units = plan_units(listing.sources, rules, unit_bytes, first_part)
        # Computed once: it depends on free memory, and workers that have started already use some.
        self._workers = choose_worker_count(settings.execution, len(self._units), listing.bytes)
        self._clean_files: str | None = None
        self._resumed = 0

    def run(self) -> PrepareResult:
        """Run the remaining work: announce, begin or resume, all phases, finish, move."""
        self._announce()
        self._begin_or_resume()
        if self._settings.dry_run:
            return self._report_dry_run(self._run_phases())
        if self._work.complete:
            self._log.note("Resuming: the store was complete and only had to be moved into --out.")
            manifest, engine_note = read_manifest(self._work.store), ""
            self._resumed = len(self._units)
        else:
            results = self._run_phases()
            with self._log.time("finish"):
                subsets = collect_store(self._work, results)
            manifest = finish_store(self._work, results, subsets, self._make_report(results))
            engine_note = results.tokenizer.engine.note
        move_store(self._work, manifest)
        return self._make_result(manifest, engine_note)

    def _announce(self) -> None:
        """Note what will be done with every source, before work begins."""
        sources, parsers = self._listing.sources, self._record_parsers
        _report_notes(self._listing, self._log)
        if weights := describe_unused_weights(self._recipe.sources):
            self._log.add_warning(weights)
        self._announce_schemas()
        check_one_objective(sources, parsers)
        if self._settings.for_loader:
            check_loader_reads(sources, parsers)
        check_same_objective(sources, parsers, self._base, self._work.out)

    def _announce_schemas(self) -> None:
        """Note the detected record format of every source."""
        names: dict[str, list[str]] = {}
        repeat_unit = self._recipe.dedup.repeat_unit
        text_names: list[str] = []
        other_names: list[str] = []
        if unfit := _find_unfit(self._listing.sources, self._record_parsers, self._recipe):
            raise _UnfitSourcesError(unfit)
        for source in self._listing.sources:
            record_parser = self._record_parsers.get_parser(source)
            (text_names if record_parser.record_kind == "text" else other_names).append(source.name)
            # A column called text needs no note.
            if record_parser.detected and record_parser.detected != PLAIN_TEXT_NOTE:
                names.setdefault(record_parser.detected, []).append(source.name)
        for detected, source_names in names.items():
            self._log.note(f"Detected {detected} in {format_list(source_names, 1)}.")
        if other_names and self._recipe.reading.clean:
            self._log.add_warning(f"Cleaning applies only to texts and does not change {format_list(other_names, 1)}.")
        if text_names and self._recipe.chat.max_tokens is not None:
            self._log.add_warning(f"{WHOLE_TEXTS} {format_list(text_names, 1)}.")
        if repeat_unit:
            self._log.note(
                f"Repeated {repeat_unit} are removed from texts, except for the first copy, also in verse, "
                f"tables and code (--dedup {repeat_unit}). --dedup exact does not change texts."
            )
        if other_names and repeat_unit:
            self._log.add_warning(
                f"Repeated {repeat_unit} are removed only from texts. From {format_list(other_names, 1)} "
                "only equal documents are removed."
            )

    def _begin_or_resume(self) -> None:
        """Begin the job in its work folder, or check that the work there is its own."""
        recipe, base = self._recipe, self._base.generation if self._base else 0
        content = list(self._content.values())
        job = make_job_identity(recipe, self._listing, self._settings.constants, content, base)
        self._clean_files = job.recipe["reading"].get("clean_files")
        begin_or_resume(self._work, recipe, job, self._tokenizer_state, restart=self._settings.restart)
        self._work.sweep()
        if not self._work.complete:
            # An evaluation set may be unusable; find out before a tokenizer is learned.
            build_step_indexes(recipe.reading.clean, self._work.path, self._log.note)
            check_files_unchanged(recipe.reading.clean, self._clean_files)

    def _run_phases(self) -> JobResults:
        """Choose the tokenizer and run all phases up to the last shard."""
        # The time before: listing inputs and sampling their first records.
        self._log.seconds["list"] = self._log.elapsed
        with self._start_server() or contextlib.nullcontext() as server:
            with self._log.time("sample"):
                tokenizer = self._choose_tokenizer(server)
            results = self._make_units(tokenizer, server)
        # The manifest names the files that documents were compared with.
        check_files_unchanged(self._recipe.reading.clean, self._clean_files)
        self._note_altered(results.content)
        self._note_cut_texts(results)
        return results

    def _start_server(self) -> ForkServer | None:
        """Start the process that workers are forked from; None without a pool.

        It imports modules while this process loads or trains the tokenizer.
        """
        execution, units = self._settings.execution, len(self._units)
        if isinstance(execution.workers, int) and execution.workers > units:
            self._log.note(
                f"The input makes {format_count(units, 'unit')} of work, so at most {units:,} of "
                f"{execution.workers:,} workers are used."
            )
        if execution.engine == "ray" and execution.address is None:
            self._log.note("Starting Ray on this machine, which takes some seconds.")
        if execution.engine != "pool" or runs_inline(execution, self._workers):
            return None
        return ForkServer(worker_setup.__name__)

    def _choose_tokenizer(self, server: ForkServer | None) -> Tokenizer:
        """Return the job's tokenizer: saved by an earlier run, learned, or resolved.

        ``server`` loads it while this process verifies its engine.
        """
        recipe, state = self._recipe, self._work.tokenizer_state()
        if state is None and parse_train_spec(recipe.tokenizer) is not None:
            self._log.listener(Progress("sample", 0, self._listing.bytes, 0, 0, 0, 0))

        def keep(tokenizer: Tokenizer) -> None:
            choose_dtype_name(recipe, tokenizer)
            if state is None:
                self._work.keep_tokenizer(tokenizer)
            if server is not None:
                server.call(partial(load_tokenizer, self._work.tokenizer_path))

        tokenizer = choose_job_tokenizer(
            recipe,
            self._listing.sources,
            self._record_parsers,
            self._log.add_warning,
            self._tokenizer_state if state is None else state,
            keep,
        )
        make_fim_cutter(recipe.reading.fim, tokenizer)
        return tokenizer

    def _make_units(self, tokenizer: Tokenizer, server: ForkServer | None) -> JobResults:
        """Run all phases over the units; start over if an excluded record affects others."""
        recipe, parsers, note = self._recipe, self._record_parsers, self._log.note
        chat = choose_job_template(recipe, self._listing.sources, parsers, tokenizer, self._log.add_warning)
        if unused := find_unused_columns(map(parsers.get_parser, self._listing.sources), chat):
            note(f"Unused columns: {', '.join(unused)}")
        setup = WorkerSetup(
            recipe,
            self._settings.limits,
            self._work.tokenizer_path,
            tokenizer.engine,
            choose_dtype_name(recipe, tokenizer),
            chat is not None,
            build_step_indexes(recipe.reading.clean, self._work.path, note),
            overlap=count_cores() >= 2 * self._workers,
            versions=collect_versions(recipe.reading.clean),
        )
        context = setup.make_context(tokenizer, parsers, chat)
        starts_over = False
        while True:
            try:
                return self._run_on_executor(setup, context, server, starts_over=starts_over)
            except RecordExcludedError as error:
                # The executor has ended its server.
                starts_over, server = True, None
                self._work.exclude(self._list_unit_names(tokenizer)[error.unit], error.excluded)

    def _run_on_executor(
        self, setup: WorkerSetup, context: EncodeContext, server: ForkServer | None, *, starts_over: bool
    ) -> JobResults:
        """Run all phases with the records excluded so far."""
        recipe, log = self._recipe, self._log
        names, segments = self._name_units(context.encoder.tokenizer)
        folders = [self._work.unit(name) for name in names]
        if self._work.follow(fingerprint(names)) and not starts_over:
            log.note(
                "Versions of packages that affect the documents changed since this job was stopped: all units are "
                "prepared again."
            )
        # A stream may have cached the batches of some units.
        if (self._work.path / STREAM_BATCHES_FOLDER).is_dir() and recipe.dedup.mode == "none":
            membership = SubsetRule(recipe.val_fraction, recipe.test_fraction)
            if adopted := adopt_units(self._units, self._work, folders, self._record_parsers, membership):
                log.note(f"Resuming: {adopted:,} of {len(self._units):,} units were already read by a stream.")
        tokenize_phase = TokenizePhase(
            self._units,
            folders,
            self._work,
            self._record_parsers.rules,
            self._listing,
            recipe,
            log,
        )
        self._resumed = tokenize_phase.resumed
        if self._resumed:
            log.note(f"Resuming: {self._resumed:,} of {len(self._units):,} units were finished by an earlier run.")
        with make_executor(
            self._settings.execution,
            self._workers,
            self._work.path,
            setup,
            partial(make_task_function, context),
            tokenize_phase.handle_message,
            server,
        ) as executor:
            units = tokenize_phase.run(executor, segments)
            return self._resolve_and_write(executor, units, context, tokenize_phase.reports.report())

    def _name_units(self, tokenizer: Tokenizer) -> tuple[list[str], SegmentSearch | None]:
        """Return the identities of all units, and the search for repeated lines if any."""
        names = self._list_unit_names(tokenizer)
        if not self._recipe.dedup.repeat_unit:
            return names, None
        # Removed lines depend on all units before, so every unit's name covers all exclusions.
        excluded_by_name = self._work.read_excluded()
        excluded = [excluded_by_name.get(name, ()) for name in names]
        identities = [
            fingerprint([name, records]) if records else name for name, records in zip(names, excluded, strict=True)
        ]
        segments_fingerprint = fingerprint(identities)
        key_files = [self._work.segment_keys_path(identity) for identity in identities]
        segments = SegmentSearch(key_files, excluded, self._work.duplicates / segments_fingerprint)
        return self._list_unit_names(tokenizer, segments_fingerprint), segments

    def _list_unit_names(self, tokenizer: Tokenizer, before: str = "") -> list[str]:
        """Return the identities of all units; ``before`` covers their removed repeats."""
        settings = collect_unit_settings(self._recipe, tokenizer, self._settings.constants)
        if before:
            settings["before"] = before
        return [compute_unit_identity(unit, settings, self._content) for unit in self._units]

    def _resolve_and_write(
        self, executor: Executor, units: list[TokenizedUnit], context: EncodeContext, unit_report: UnitReport
    ) -> JobResults:
        """Run the phases after tokenization."""
        recipe, work, log = self._recipe, self._work, self._log
        base = read_base_generations(work, self._base, recipe.dedup)
        if base.without_signatures:
            log.add_warning(
                f"{work.out} holds signatures of this kind for {len(base.signatures) - base.without_signatures:,} of "
                f"its {len(base.signatures):,} shards (prepare with --dedup near writes them): near "
                "duplicates of documents in the other shards are not removed."
            )
        base_membership = replace(context.membership, overrides=base.overrides)
        settings = ShardSettings(
            context.membership,
            base_membership,
            recipe.tokens_per_shard,
            context.encoder.dtype,
            recipe.dedup.stored_banding,
        )
        with log.time("find duplicates"):
            duplicate_files = find_duplicates(executor, work, units, base, recipe.dedup)
        with log.time("settle"):
            dedup_counts = resolve_duplicates(executor, work, units, duplicate_files, settings, len(base.files))
        decision = decide(work, units, dedup_counts, settings, base, balance=recipe.balance_subsets)
        for text in self._describe_subsets(context.membership, decision, base, dedup_counts):
            log.add_warning(text)
        if note := describe_long_documents(units, dedup_counts, self._record_parsers.rules, recipe.tokens_per_shard):
            log.add_warning(note)
        with log.time("find duplicates"):
            inputs = describe_input_locations(recipe.inputs)["inputs"]
            pairs, omitted_pairs = find_duplicate_pairs(work, units, duplicate_files, base, inputs, context)
        shards: list[dict[str, list[ShardEntry]]] = []
        if not self._settings.dry_run:
            with log.time("find duplicates"):
                write_duplicates_file(work, units, duplicate_files, base, recipe.dedup.banding)
            with log.time("write shards"):
                shards = write_shards(executor, work, units, dedup_counts, decision, settings, log.listener)
        flows = _compute_flows(units, dedup_counts, context.encoder.dtype.itemsize)
        return JobResults(
            recipe,
            self._record_parsers,
            self._listing.sources,
            self._base,
            context.encoder.tokenizer,
            choose_dtype_name(recipe, context.encoder.tokenizer),
            units,
            dedup_counts,
            decision,
            shards,
            build_content(unit_report, after=flows, duplicates=pairs, duplicates_rest=omitted_pairs),
        )

    def _describe_subsets(
        self,
        membership: SubsetRule,
        decision: Decision,
        base: BaseGenerations,
        dedup_counts: Sequence[UnitDedupCounts],
    ) -> list[str]:
        """Describe subsets that stay empty, and those that miss their share of the tokens."""
        sources = self._listing.sources
        missed_shares = describe_missed_shares(
            membership.shares,
            decision.tokens,
            base.documents + sum(counts.documents for counts in dedup_counts),
            balance=self._recipe.balance_subsets,
            texts=all(self._record_parsers.get_parser(source).record_kind == "text" for source in sources),
            splits=any(source.kind in ("text", "code") for source in sources),
        )
        return [*membership.empty_notes(decision.shards, base.nonempty_subsets), *missed_shares]

    def _note_altered(self, content: ReportContent) -> None:
        """Note the counts of altered texts, which document counts do not show."""
        repeat_unit = self._recipe.dedup.repeat_unit
        for flow in content.flows:
            if flow.step == "tokenize" and flow.altered:
                self._log.note(
                    f"Fill-in-the-middle: {flow.altered:,} of {format_count(flow.documents_out, 'document')} were "
                    "rearranged (counted before duplicates are removed)."
                )
            if flow.step == repeat_unit and flow.bytes_in:
                self._log.note(
                    f"Removed {flow.bytes_in - flow.bytes_out:,} bytes of repeated {repeat_unit}: from "
                    f"{format_count(flow.altered, 'document')} that remain, and from "
                    f"{format_count(flow.documents_in - flow.documents_out, 'document')} without any other text."
                )

    def _note_cut_texts(self, results: JobResults) -> None:
        """Note the long texts that the default rule cut into documents."""
        counts: Counter[str] = Counter()
        for unit in results.units:
            for part, part_counts in zip(unit.unit.parts, unit.facts.parts, strict=True):
                if choose_read_method(part.source, results.record_parsers.rules) == "cut":
                    counts[part.source.name] += part_counts.records
        names = [name for name, count in counts.items() if count > 1]
        if names:
            others = f" and {format_count(len(names) - 1, 'other text')}" if len(names) > 1 else ""
            total = sum(counts[name] for name in names)
            self._log.note(
                f"{names[0]}{others}: cut at blank lines into {format_count(total, 'document')} (--split-on file keeps "
                "a text whole)."
            )

    def _report_dry_run(self, results: JobResults) -> PrepareResult:
        """Report what would be left out, and keep finished work for a later run."""
        page = self._work.path / PAGE_NAME
        report = self._make_report(results)
        write_file(self._work.path / REPORT_NAME, encode_report(report))
        write_report_page(report, page)
        self._log.note(
            f"Dry run: no store was written. {page} shows which documents would be left out. The same command without "
            "--dry-run reuses this work."
        )
        manifest = make_manifest(results, {})
        if self._base is not None:
            manifest = extend_manifest(self._base, manifest)
        return self._make_result(manifest, results.tokenizer.engine.note)

    def _make_result(self, manifest: Manifest, engine_note: str) -> PrepareResult:
        result = make_result(
            self._work.out,
            manifest,
            engine_note=engine_note,
            seconds=self._log.elapsed,
            resumed_units=self._resumed,
            notes=tuple(self._log.notes),
        )
        return result if self._base is None else subtract_base(result, self._base)

    def _make_report(self, results: JobResults) -> PrepareReport:
        """Make the report: values that may differ between two runs of the same store."""
        execution, seconds = self._settings.execution, self._log.elapsed
        durations = {name: round(value, 3) for name, value in self._log.seconds.items()}
        phases: dict[str, StageTime] = {name: StageTime(value) for name, value in durations.items() if name in STAGES}
        content = msgspec.structs.replace(results.content, stages=add_stage_times(results.content.stages, phases))
        locations = describe_input_locations(self._recipe.inputs)
        return PrepareReport(
            sources=make_report_sources(self._listing.sources),
            inputs=locations["inputs"],
            folder=locations["folder"],
            engine_note=results.tokenizer.engine.note,
            out=decode_file_name(os.path.abspath(self._work.out)),  # noqa: PTH100
            recipe_fingerprint=compute_recipe_fingerprint(self._recipe),
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(seconds, 3),
            seconds_by_phase=durations,
            bytes_per_second=round(self._listing.bytes / max(seconds, 1e-9)),
            peak_memory_bytes=measure_peak_memory(),
            units=len(self._units),
            resumed_units=self._resumed,
            notes=self._log.notes,
            dry_run=self._settings.dry_run,
            settings=recipe_settings_for_report(self._recipe),
            counts=make_manifest(results, {}).counts,
            workers=self._workers,
            crew="in-process" if runs_inline(execution, self._workers) else execution.engine,
            content=content,
            media=self._find_media_folders(),
        )

    def _find_media_folders(self) -> dict[str, str]:
        """Return the base folder of media paths by source; the store has none."""
        folders = {source.name: self._record_parsers.media_folder(source) for source in self._listing.sources}
        return {
            decode_file_name(name): decode_file_name(
                redact_url(folder) if is_url(folder) else os.path.abspath(folder)  # noqa: PTH100
            )
            for name, folder in folders.items()
            if folder is not None
        }


def _report_notes(listing: SourceListing, log: PrepareLog) -> None:
    for text in listing.notes:
        report = log.add_warning if text in listing.warnings else log.note
        report(text)


def _check_input_count(files: int) -> None:
    """Raise, before any work, if the manifest would be too large to read."""
    if files * _MIN_ENTRY_BYTES > SMALL_FILE_LIMIT:
        raise InputError(
            f"{files:,} input files make a manifest of more than {SMALL_FILE_LIMIT:,} bytes, which cannot be read. "
            "Write the inputs as records of JSON Lines files, or make several stores."
        )


def _compute_flows(units: list[TokenizedUnit], dedup_counts: list[UnitDedupCounts], size: int) -> list[StepFlow]:
    """Return the flows of the steps after tokenization: dedup and write."""
    documents_in, tokens_in = sum(unit.facts.documents for unit in units), sum(unit.facts.tokens for unit in units)
    documents, tokens = sum(counts.documents for counts in dedup_counts), sum(counts.tokens for counts in dedup_counts)
    dedup = StepFlow(
        step="dedup", documents_in=documents_in, documents_out=documents, tokens_in=tokens_in, tokens_out=tokens
    )
    write = StepFlow(
        step="write",
        documents_in=documents,
        documents_out=documents,
        bytes_out=tokens * size,
        tokens_in=tokens,
        tokens_out=tokens,
    )
    return [dedup, write]


def _find_unit_bytes(work: WorkFolder, listing: SourceListing) -> int:
    """Return the unit size of unfinished work on these inputs, or for the listing.

    A stream, whose units have a fixed size, may have cached their batches.
    """
    job = work.job()
    if (
        job
        and len(job.sources) == len(listing.sources)
        and all(
            known_source[:2] == (source.name, source.size)
            for known_source, source in zip(job.sources, listing.sources, strict=True)
        )
    ):
        return job.constants[-1]
    return choose_unit_bytes(listing.bytes)
