"""One run of a recipe: the tokenizer, three phases over all units, and the end."""

import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from msgspec.structs import replace

from batchloom.core.addresses import is_url, redact_url
from batchloom.core.files import decode_file_name
from batchloom.core.wording import format_count
from batchloom.preparation.documents.fill_in_the_middle import make_fim_cutter
from batchloom.preparation.documents.record_parsers import PLAIN_TEXT_NOTE, RecordParsers, check_no_mixed_preferences
from batchloom.preparation.documents.tokenizer_choice import choose_dtype_name, choose_job_tokenizer
from batchloom.preparation.phases.finish import CompletedJob, finish_store, make_manifest, move_store
from batchloom.preparation.phases.phase_runner import PhaseResults, PhaseRunner, RunContext
from batchloom.preparation.report.html_report import write_report_page
from batchloom.preparation.report.progress import Listener, Note, PrepareResult, Progress, make_result, subtract_base
from batchloom.preparation.report.report import PrepareReport, ReportContent, encode_report
from batchloom.preparation.request.append_checks import check_same_preferences
from batchloom.preparation.request.recipe_file import recipe_settings_for_report
from batchloom.preparation.request.recipe_of_store import describe_input_locations
from batchloom.preparation.rerun import begin_or_resume, hash_sources, make_job_identity, make_report_sources
from batchloom.preparation.settings.evaluation_sets import build_step_indexes, check_files_unchanged
from batchloom.preparation.settings.read_recipe import describe_unused_weights
from batchloom.preparation.settings.recipe import Recipe, compute_recipe_fingerprint
from batchloom.preparation.units.stopwatch import STAGES, StageTime, add_stage_times
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.preparation.workers.executors import RunSettings
from batchloom.sources import SourceListing, prefetch_sources
from batchloom.store import PAGE_NAME, REPORT_NAME, Manifest, extend_manifest, read_manifest, write_file
from batchloom.tokens import Tokenizer, parse_train_spec


@final
class PrepareRun:
    """One run of a recipe in its work folder."""

    def __init__(
        self,
        work: WorkFolder,
        recipe: Recipe,
        listing: SourceListing,
        listener: Listener,
        settings: RunSettings,
        began: float,
        base: Manifest | None = None,
    ) -> None:
        self._work, self._recipe, self._listing = work, recipe, listing
        self._listener, self._settings, self._began = listener, settings, began
        self._started = datetime.now(UTC)
        self._record_parsers = RecordParsers(recipe, settings.limits)
        unread = settings.hash_inputs and not listing.content
        self._content = hash_sources(listing.sources) if unread else listing.content
        self._base = base
        run = RunContext(settings, self._content, base, listener, self._note)
        self._phase_runner = PhaseRunner(work, recipe, listing, self._record_parsers, run)
        self._notes: list[str] = []
        self._resumed = 0
        self._seconds: dict[str, float] = {}
        self._tokenizer_state: Mapping[str, Any] | None = None
        self._clean_files: str | None = None

    def run(self, tokenizer_state: Mapping[str, Any] | None = None) -> PrepareResult:
        """Run the remaining work.

        Args:
            tokenizer_state: state of the tokenizer, if the recipe alone does not determine it.
        """
        self._tokenizer_state = tokenizer_state
        for text in self._listing.notes:
            self._note(text)
        if weights := describe_unused_weights(self._recipe.sources):
            self._note(weights)
        self._report_schemas()
        check_no_mixed_preferences(self._listing.sources, self._record_parsers)
        check_same_preferences(self._listing.sources, self._record_parsers, self._base, self._work.out)
        content = list(self._content.values())
        base = self._base.generation if self._base else 0
        job = make_job_identity(self._recipe, self._listing, self._settings.constants, content, base)
        self._clean_files = job.recipe["reading"].get("clean_files")
        begin_or_resume(self._work, self._recipe, job, tokenizer_state, restart=self._settings.restart)
        self._work.sweep()
        note, clean = "", self._recipe.reading.clean
        if not self._work.complete:
            # An evaluation set may be unusable; find out before a tokenizer is learned.
            build_step_indexes(clean, self._work.path, self._note)
            check_files_unchanged(clean, self._clean_files)
        if self._settings.dry_run:
            return self._run_dry()
        if self._work.complete:
            self._note("Resuming: the store was complete and only had to be moved into --out.")
            manifest = read_manifest(self._work.store)
            self._resumed = self._phase_runner.units
        else:
            manifest, note = self._make()
        move_store(self._work)
        return self._make_result(manifest, note)

    def _run_dry(self) -> PrepareResult:
        """Report what would be left out, and keep finished work for a later run."""
        completed_job = self._run_phases()
        page = self._work.path / PAGE_NAME
        report = self._make_report(completed_job)
        write_file(self._work.path / REPORT_NAME, encode_report(report))
        write_report_page(report, page)
        self._note(
            f"Dry run: no store was written. {page} shows which documents would be left out. The same command without "
            "--dry-run reuses this work."
        )
        return self._make_result(
            self._extend_base_manifest(make_manifest(completed_job, {})), completed_job.results.tokenizer.engine.note
        )

    def _make_result(self, manifest: Manifest, engine_note: str) -> PrepareResult:
        """Return the result for a store with this manifest."""
        result = make_result(
            self._work.out,
            manifest,
            engine_note=engine_note,
            seconds=time.perf_counter() - self._began,
            resumed_units=self._resumed,
            notes=tuple(self._notes),
        )
        return result if self._base is None else subtract_base(result, self._base)

    def _extend_base_manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest extended by the previous generations of the store."""
        return manifest if self._base is None else extend_manifest(self._base, manifest)

    def _make(self) -> tuple[Manifest, str]:
        completed_job = self._run_phases()
        began = time.perf_counter()

        def report() -> PrepareReport:
            self._seconds["finish"] = time.perf_counter() - began
            return self._make_report(completed_job)

        return finish_store(self._work, completed_job, report), completed_job.results.tokenizer.engine.note

    def _run_phases(self) -> CompletedJob:
        """Run all phases."""
        began = time.perf_counter()
        # The time before: listing inputs and sampling their first records.
        self._seconds["list"] = began - self._began
        with self._phase_runner.start_workers():
            tokenizer = self._choose_tokenizer()
            self._seconds["sample"] = time.perf_counter() - began
            results = self._phase_runner.make(tokenizer)
        # The manifest names the files that documents were compared with.
        check_files_unchanged(self._recipe.reading.clean, self._clean_files)
        self._resumed = results.resumed
        self._seconds |= results.seconds
        self._report_altered(results)
        sources, rules = self._listing.sources, self._record_parsers.rules
        return CompletedJob(self._recipe, rules, self._record_parsers, sources, results, self._base)

    def _report_altered(self, results: PhaseResults) -> None:
        """Note the counts of altered texts, which document counts do not show."""
        repeat_unit = self._recipe.dedup.repeat_unit
        for flow in results.content.flows:
            if flow.step == "tokenize" and flow.altered:
                self._note(
                    f"Fill-in-the-middle: {flow.altered:,} of {format_count(flow.documents_out, 'document')} were "
                    "rearranged (counted before duplicates are removed)."
                )
            if flow.step == repeat_unit and flow.bytes_in:
                self._note(
                    f"Removed {flow.bytes_in - flow.bytes_out:,} bytes of repeated {repeat_unit}: from "
                    f"{format_count(flow.altered, 'document')} that remain, and from "
                    f"{format_count(flow.documents_in - flow.documents_out, 'document')} without any other text."
                )

    def _make_content(self, results: PhaseResults) -> ReportContent:
        """Return the content of the report, with the job's phases among the stages."""
        phases: dict[str, StageTime] = {
            name: StageTime(round(seconds, 3)) for name, seconds in self._seconds.items() if name in STAGES
        }
        return replace(results.content, stages=add_stage_times(results.content.stages, phases))

    def _choose_tokenizer(self) -> Tokenizer:
        """Return the job's tokenizer: saved by an earlier run, learned, or resolved."""
        state = self._work.tokenizer_state()
        if state is None and parse_train_spec(self._recipe.tokenizer) is not None:
            self._listener(Progress("sample", 0, self._listing.bytes, 0, 0, 0, 0))
        tokenizer_state = self._tokenizer_state if state is None else state
        tokenizer = choose_job_tokenizer(
            self._recipe, self._listing.sources, self._record_parsers, self._note, tokenizer_state
        )
        choose_dtype_name(self._recipe, tokenizer)
        make_fim_cutter(self._recipe.reading.fim, tokenizer)
        if state is None:
            self._work.keep_tokenizer(tokenizer.state())
        return tokenizer

    def _report_schemas(self) -> None:
        """Note the detected record format of every source, before work begins."""
        names: dict[str, list[str]] = {}
        read_recipe, dedup = self._recipe.reading, self._recipe.dedup
        other_names: list[str] = []
        for source in prefetch_sources(self._listing.sources, lambda item: item):
            record_parser = self._record_parsers.get_parser(source)
            if record_parser.record_kind != "text":
                other_names.append(source.name)
            # A column called text needs no note.
            if record_parser.detected and record_parser.detected != PLAIN_TEXT_NOTE:
                names.setdefault(record_parser.detected, []).append(source.name)
        for detected, source_names in names.items():
            self._note(f"Detected {detected} in {_format_first_names(source_names)}.")
        if other_names and read_recipe.clean:
            self._note(f"Cleaning applies only to texts and does not change {_format_first_names(other_names)}.")
        if dedup.repeat_unit:
            self._note(
                f"Repeated {dedup.repeat_unit} are removed from texts, except for the first copy, also in verse, "
                f"tables and code (--dedup {dedup.repeat_unit}). --dedup exact does not change texts."
            )
        if other_names and dedup.repeat_unit:
            self._note(
                f"Repeated {dedup.repeat_unit} are removed only from texts. From {_format_first_names(other_names)} "
                "only equal documents are removed."
            )

    def _make_report(self, completed_job: CompletedJob) -> PrepareReport:
        """Make the report: values that may differ between two runs of the same store."""
        results = completed_job.results
        seconds = time.perf_counter() - self._began
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
            seconds_by_phase={name: round(value, 3) for name, value in self._seconds.items()},
            bytes_per_second=round(self._listing.bytes / max(seconds, 1e-9)),
            peak_memory_bytes=_read_peak_memory(),
            units=self._phase_runner.units,
            resumed_units=self._resumed,
            notes=self._notes,
            dry_run=self._settings.dry_run,
            settings=recipe_settings_for_report(self._recipe),
            counts=make_manifest(completed_job, {}).counts,
            workers=results.workers,
            crew=results.executor_name,
            content=self._make_content(results),
            media=self._find_media_folders(),
        )

    def _find_media_folders(self) -> dict[str, str]:
        """Return the base folder of media paths by source, for the report.

        The store itself only has the paths in records.
        """
        folders = {source.name: self._record_parsers.media_folder(source) for source in self._listing.sources}
        return {
            decode_file_name(name): decode_file_name(
                redact_url(folder) if is_url(folder) else os.path.abspath(folder)  # noqa: PTH100
            )
            for name, folder in folders.items()
            if folder is not None
        }

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._listener(Note(text))


def _read_peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        # On Linux ru_maxrss includes the peak of the parent process.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _format_first_names(names: Sequence[str]) -> str:
    """Return the first name and the number of others."""
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
