"""One run of a recipe: the tokenizer, the three phases over all units, the end."""

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
from batchloom.preparation.documents import (
    PLAIN_TEXT_NOTE,
    RecordParsers,
    check_no_mixed_preferences,
    choose_dtype_name,
    choose_job_tokenizer,
    make_fim_cutter,
)
from batchloom.preparation.phases import (
    CompletedJob,
    PhaseResults,
    PhaseRunner,
    RunContext,
    finish_store,
    make_manifest,
    move_store,
)
from batchloom.preparation.report import (
    Listener,
    Note,
    PrepareReport,
    PrepareResult,
    Progress,
    ReportContent,
    encode_report,
    make_result,
    subtract_base,
    write_report_page,
)
from batchloom.preparation.request import (
    check_same_preferences,
    describe_input_locations,
    recipe_settings_for_report,
)
from batchloom.preparation.rerun import (
    begin_or_resume,
    hash_sources,
    make_job_identity,
    make_report_sources,
)
from batchloom.preparation.settings import (
    Recipe,
    build_step_indexes,
    check_files_unchanged,
    compute_recipe_fingerprint,
    describe_unused_weights,
)
from batchloom.preparation.units import STAGES, StageTime, WorkFolder, add_stage_times
from batchloom.preparation.workers import RunSettings
from batchloom.sources import SourceListing, prefetch_sources
from batchloom.store import (
    PAGE_NAME,
    REPORT_NAME,
    Manifest,
    extend_manifest,
    read_manifest,
    write_file,
)
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
        self._readings = RecordParsers(recipe, settings.limits)
        unread = settings.hash_inputs and not listing.content
        self._content = hash_sources(listing.sources) if unread else listing.content
        self._base = base
        run = RunContext(settings, self._content, base, listener, self._note)
        self._phase_runner = PhaseRunner(work, recipe, listing, self._readings, run)
        self._notes: list[str] = []
        self._resumed = 0
        self._seconds: dict[str, float] = {}
        self._kept: Mapping[str, Any] | None = None
        self._looked_into: str | None = None

    def run(self, kept: Mapping[str, Any] | None = None) -> PrepareResult:
        """Do what is left to do.

        Args:
            kept: the state of the tokenizer, where it is not to be found by the recipe.
        """
        self._kept = kept
        for text in self._listing.notes:
            self._note(text)
        if weights := describe_unused_weights(self._recipe.sources):
            self._note(weights)
        self._report_schemas()
        check_no_mixed_preferences(self._listing.sources, self._readings)
        check_same_preferences(self._listing.sources, self._readings, self._base, self._work.out)
        content = list(self._content.values())
        base = self._base.generation if self._base else 0
        job = make_job_identity(
            self._recipe, self._listing, self._settings.constants, content, base
        )
        self._looked_into = job.recipe["reading"].get("clean_files")
        begin_or_resume(self._work, self._recipe, job, kept, restart=self._settings.restart)
        self._work.sweep()
        note, clean = "", self._recipe.reading.clean
        if not self._work.complete:
            # Before a tokenizer is learned: a set may be of no use.
            build_step_indexes(clean, self._work.path, self._note)
            check_files_unchanged(clean, self._looked_into)
        if self._settings.dry_run:
            return self._dry()
        if self._work.complete:
            self._note("Going on: the store was complete and only had to be moved to its place.")
            manifest = read_manifest(self._work.store)
            self._resumed = self._phase_runner.units
        else:
            manifest, note = self._make()
        move_store(self._work)
        return self._result(manifest, note)

    def _dry(self) -> PrepareResult:
        """Find out what would be left out, and keep what was done for a later run."""
        done = self._made()
        page = self._work.path / PAGE_NAME
        report = self._report(done)
        write_file(self._work.path / REPORT_NAME, encode_report(report))
        write_report_page(report, page)
        self._note(
            f"No store was written: this was a dry run. {page} shows what would be left out; the same command without "
            "--dry-run goes on from here."
        )
        return self._result(self._whole(make_manifest(done, {})), done.made.tokenizer.engine.note)

    def _result(self, manifest: Manifest, engine_note: str) -> PrepareResult:
        """What is given back of a store with this manifest."""
        result = make_result(
            self._work.out,
            manifest,
            engine_note=engine_note,
            seconds=time.perf_counter() - self._began,
            resumed_units=self._resumed,
            notes=tuple(self._notes),
        )
        return result if self._base is None else subtract_base(result, self._base)

    def _whole(self, made: Manifest) -> Manifest:
        """The manifest with what the store held before."""
        return made if self._base is None else extend_manifest(self._base, made)

    def _make(self) -> tuple[Manifest, str]:
        done = self._made()
        began = time.perf_counter()

        def report() -> PrepareReport:
            self._seconds["finish"] = time.perf_counter() - began
            return self._report(done)

        return finish_store(self._work, done, report), done.made.tokenizer.engine.note

    def _made(self) -> CompletedJob:
        """Carry out all phases; what the end has to know."""
        began = time.perf_counter()
        # What came before: inputs were listed, and their first records looked at.
        self._seconds["list"] = began - self._began
        with self._phase_runner.workers():
            tokenizer = self._tokenizer()
            self._seconds["sample"] = time.perf_counter() - began
            made = self._phase_runner.make(tokenizer)
        # The manifest is to name what documents were compared with.
        check_files_unchanged(self._recipe.reading.clean, self._looked_into)
        self._resumed = made.resumed
        self._seconds |= made.seconds
        self._report_altered(made)
        sources, rules = self._listing.sources, self._readings.rules
        return CompletedJob(self._recipe, rules, self._readings, sources, made, self._base)

    def _report_altered(self, made: PhaseResults) -> None:
        """Say how much of texts stood before or was moved, which no count of documents tells."""
        pieces = self._recipe.dedup.pieces
        for flow in made.content.flows:
            if flow.step == "tokenize" and flow.altered:
                self._note(
                    f"Fill-in-the-middle: {flow.altered:,} of {format_count(flow.documents_out, 'document')} have "
                    f"their "
                    "middle last (before duplicates are left out)."
                )
            if flow.step == pieces and flow.bytes_in:
                self._note(
                    f"{flow.bytes_in - flow.bytes_out:,} bytes of {pieces} that stood before were taken out of "
                    f"{format_count(flow.altered, 'document')} that stayed, and out of "
                    f"{format_count(flow.documents_in - flow.documents_out, 'document')} with nothing else."
                )

    def _content_of(self, made: PhaseResults) -> ReportContent:
        """What became of the input, with the phases of the job among the stages of its units."""
        phases: dict[str, StageTime] = {
            name: StageTime(round(seconds, 3))
            for name, seconds in self._seconds.items()
            if name in STAGES
        }
        return replace(made.content, stages=add_stage_times(made.content.stages, phases))

    def _tokenizer(self) -> Tokenizer:
        """The job's tokenizer: kept by an earlier run, learned, or found; its engine compared."""
        state = self._work.tokenizer_state()
        if state is None and parse_train_spec(self._recipe.tokenizer) is not None:
            self._listener(Progress("sample", 0, self._listing.bytes, 0, 0, 0, 0))
        known = self._kept if state is None else state
        tokenizer = choose_job_tokenizer(
            self._recipe, self._listing.sources, self._readings, self._note, known
        )
        choose_dtype_name(self._recipe, tokenizer)
        make_fim_cutter(self._recipe.reading.fim, tokenizer)
        if state is None:
            self._work.keep_tokenizer(tokenizer.state())
        return tokenizer

    def _report_schemas(self) -> None:
        """Look at the first records of every source, and say what they are, before work begins."""
        names: dict[str, list[str]] = {}
        reading_of, dedup = self._recipe.reading, self._recipe.dedup
        others: list[str] = []
        for source in prefetch_sources(self._listing.sources, lambda one: one):
            reading = self._readings.of(source)
            if reading.way != "text":
                others.append(source.name)
            # A column called text is what everybody expects.
            if reading.detected and reading.detected != PLAIN_TEXT_NOTE:
                names.setdefault(reading.detected, []).append(source.name)
        for detected, found in names.items():
            self._note(f"Detected {detected} in {_format_first_names(found)}.")
        if others and reading_of.clean:
            self._note(
                f"Cleaning is for texts: what is in {_format_first_names(others)} stays as it is."
            )
        if dedup.pieces:
            self._note(
                f"Of {dedup.pieces} that stand several times all but the first are taken out of texts (--dedup "
                f"{dedup.pieces}), also of verse, tables and code; --dedup exact leaves texts as they are."
            )
        if others and dedup.pieces:
            self._note(
                f"Repeated {dedup.pieces} are looked for in texts: of what is in {_format_first_names(others)} "
                f"equal documents "
                "alone are left out."
            )

    def _report(self, done: CompletedJob) -> PrepareReport:
        """The sidecar: what may differ between two runs that write the same store."""
        made = done.made
        seconds = time.perf_counter() - self._began
        lay = describe_input_locations(self._recipe.inputs)
        return PrepareReport(
            sources=make_report_sources(self._listing.sources),
            inputs=lay["inputs"],
            folder=lay["folder"],
            engine_note=made.tokenizer.engine.note,
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
            counts=make_manifest(done, {}).counts,
            workers=made.workers,
            crew=made.crew,
            content=self._content_of(made),
            media=self._media_folders(),
        )

    def _media_folders(self) -> dict[str, str]:
        """Where paths of media begin, by source: a store knows none but those of records."""
        folders = {one.name: self._readings.media_folder(one) for one in self._listing.sources}
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
    """The most bytes this process has had in memory."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        # On Linux this would be the most of the process that started this one, too.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _format_first_names(names: Sequence[str]) -> str:
    """The first of some names, and how many there are besides."""
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
