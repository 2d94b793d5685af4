"""Phase A over all units: part boundaries, task dispatch and progress counting."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputMissingError
from batchloom.core.wording import format_count
from batchloom.preparation.documents.encoded_batch import ROUNDED_WEIGHTS, UNTRAINED_RULE
from batchloom.preparation.listing.unfit_files import UnfitFile, check_may_leave_out, find_whole_files, leave_out_read
from batchloom.preparation.phases.find_duplicates import search_all_ranges
from batchloom.preparation.phases.unit_names import SegmentSearch
from batchloom.preparation.report.progress import JobCounters, PrepareLog
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.unit_report import UnitReportMerger
from batchloom.preparation.units.units import (
    CrashMarker,
    CrashTracker,
    DamagedPart,
    Unit,
    UnitProgress,
    UnitTask,
    UnusableError,
)
from batchloom.preparation.units.work_folder import Alteration, TokenizedUnit, UnitFacts, WorkFolder, read_unit_facts
from batchloom.preparation.workers.protocols import Executor, TaskMessage, iter_task_events
from batchloom.sources import ReadRules, SourceListing, format_record_name, make_bad_record_error

# Damaged files that are named when they are met; all are listed at the end.
_MAX_NOTED = 5


@final
class TokenizePhase:
    """State of all units during tokenization, including those finished earlier."""

    def __init__(
        self,
        units: Sequence[Unit],
        folders: Sequence[Path],
        work: WorkFolder,
        rules: ReadRules,
        listing: SourceListing,
        recipe: Recipe,
        log: PrepareLog,
    ) -> None:
        self._units = units
        self._folders = folders
        self._work = work
        self._rules = rules
        self._facts: list[UnitFacts | None] = [None] * len(units)
        self.reports = UnitReportMerger()
        self._listing = listing
        self._recipe = recipe
        self._log = log
        self._counters = counters = JobCounters(log.listener, recipe.max_bad, listing.bytes)
        self._crash_tracker = CrashTracker(units, log.add_warning, together=recipe.dedup.repeat_unit is not None)
        self._progress_by_unit: dict[int, UnitProgress] = {}
        self._damaged_names: set[str] = set()
        for unit, facts in zip(units, map(read_unit_facts, folders), strict=True):
            if facts is not None:
                counters.count_resumed(
                    unit.bytes,
                    sum(part.records for part in facts.parts),
                    facts.documents,
                    facts.tokens,
                    _count_bad(facts),
                )
                self._keep(unit.number, facts)
        self.resumed = sum(facts is not None for facts in self._facts)

    def run(self, executor: Executor, segments: SegmentSearch | None) -> list[TokenizedUnit]:
        """Find repeats, tokenize pending units; return all units."""
        tasks = self._make_tasks(executor, segments)
        with self._log.time("tokenize"):
            try:
                for event in iter_task_events(executor, tasks.items(), self._handle_crash):
                    if isinstance(event, TaskMessage):
                        self.handle_message(event)
                    else:
                        self._finish_unit(event.number, event.result)
            except UnusableError as error:
                raise self._make_error(error.unit, error.part, error.bad) from None
        facts = [unit_facts for unit_facts in self._facts if unit_facts is not None]
        self._counters.quarantined = sum(map(_count_bad, facts))
        self._leave_out_files(facts)
        # The first in input order, not the first that was found.
        first_bad = next(
            ((unit.number, *f.first_bad) for unit, f in zip(self._units, facts, strict=True) if f.first_bad), None
        )
        self._counters.first = str(self._make_error(*first_bad)) if first_bad else ""
        self._counters.check_bad_records()
        self._warn_of_alterations(facts)
        if not self._counters.documents:
            self._work.clear()
            raise InputMissingError(_describe_no_documents(self._counters, facts))
        return [TokenizedUnit(*fields) for fields in zip(self._units, self._folders, facts, strict=True)]

    def _leave_out_files(self, facts: Sequence[UnitFacts]) -> None:
        """Leave out damaged files, and those without a usable record, with a note.

        Raises:
            InputError: they are too many.
        """
        unfit: dict[str, UnfitFile] = {}
        for unit, unit_facts in zip(self._units, facts, strict=True):
            for index, counts in enumerate(unit_facts.parts):
                if counts.damage:
                    source = unit.parts[index].source
                    unfit.setdefault(source.name, UnfitFile(source, counts.damage, counts.bad))
        if unfit:
            fitting = leave_out_read(self._listing, [*unfit.values()], self._recipe, self._counters.count_allowed())
            self._log.left_out = fitting.left_out
            for note in fitting.notes:
                self._log.add_warning(note)

    def _keep(self, number: int, facts: UnitFacts) -> None:
        """Store the results of a unit and merge its report into the others."""
        self._facts[number] = facts.counts
        self.reports.add(number, facts.report)

    def _make_tasks(self, executor: Executor, segments: SegmentSearch | None) -> dict[int, UnitTask]:
        pending_units = [unit for unit, facts in zip(self._units, self._facts, strict=True) if facts is None]
        if not pending_units:
            return {}
        repeated_files: tuple[Path, ...] = ()
        if segments:
            with self._log.time("find repeated pieces"):
                repeated_files = self._find_repeated_segments(executor, segments)
        return {
            unit.number: UnitTask(
                unit,
                self._folders[unit.number],
                self._work.attempt,
                excluded=segments.excluded[unit.number] if segments else (),
                repeated=repeated_files,
                whole_files=find_whole_files(unit.parts, self._recipe),
            )
            for unit in pending_units
        }

    def _find_repeated_segments(self, executor: Executor, segments: SegmentSearch) -> tuple[Path, ...]:
        tasks = {
            unit.number: UnitTask(
                unit,
                path,
                self._work.attempt,
                excluded=excluded,
                repeat_unit=segments.repeat_unit,
            )
            for unit, path, excluded in zip(self._units, segments.key_files, segments.excluded, strict=True)
            if not path.exists()
        }
        for event in iter_task_events(executor, tasks.items(), self._crash_tracker.handle_crash):
            if isinstance(event, TaskMessage):
                self.handle_message(event)
            else:
                self._crash_tracker.forget_unit(event.number)
        return search_all_ranges(executor, tuple(segments.key_files), segments.folder, self._work.attempt)

    def handle_message(self, event: Any) -> None:
        """Handle a worker's message.

        Raises:
            TooManyBadRecordsError: more records are bad than the job allows.
            DamagedFileError: an input names the damaged file, or other parts of the file are stored.
        """
        number = event.number
        message = event.message
        if isinstance(message, CrashMarker):
            self._crash_tracker.record_marker(number, message)
            return
        if isinstance(message, DamagedPart):
            self._note_damage(number, message)
            return
        previous, self._progress_by_unit[number] = (self._progress_by_unit.get(number, UnitProgress()), message)
        counters = self._counters
        counters.count_read(message.bytes - previous.bytes, message.records - previous.records)
        if message.bad > previous.bad:
            first = ""
            if not counters.first and message.first_bad:
                first = str(self._make_error(number, *message.first_bad))
            added = {
                kind: (count - previous.reasons.get(kind, (0, ""))[0], reason)
                for kind, (count, reason) in message.reasons.items()
            }
            counters.count_bad(first, message.bad - previous.bad, added)
        if message.documents > previous.documents:
            counters.count_documents(message.documents - previous.documents, message.tokens - previous.tokens)

    def _note_damage(self, number: int, damaged: DamagedPart) -> None:
        part = self._units[number].parts[damaged.part]
        check_may_leave_out(part, damaged.reason, self._recipe)
        is_new = part.source.name not in self._damaged_names
        self._damaged_names.add(part.source.name)
        if is_new and len(self._damaged_names) <= _MAX_NOTED:
            self._log.note(f"{damaged.reason} The work goes on without it.")
        self._forget_progress(number)
        self._crash_tracker.clear_markers(number)

    def _forget_progress(self, number: int) -> None:
        progress = self._progress_by_unit.pop(number, UnitProgress())
        self._counters.forget(
            progress.bytes, progress.records, progress.documents, progress.tokens, progress.bad, progress.reasons
        )

    def _handle_crash(self, number: int, task: UnitTask, reason: str) -> UnitTask:
        self._forget_progress(number)
        return self._crash_tracker.handle_crash(number, task, reason)

    def _finish_unit(self, number: int, facts: UnitFacts) -> None:
        self._keep(number, facts)
        self._progress_by_unit.pop(number, None)
        self._crash_tracker.forget_unit(number)

    def _warn_of_alterations(self, facts: Sequence[UnitFacts]) -> None:
        """Warn of each change by the template, with the count and the first record."""
        totals: dict[str, tuple[Unit, Alteration]] = {}
        for unit, unit_facts in zip(self._units, facts, strict=True):
            for change, alteration in unit_facts.altered.items():
                first_unit, total = totals.get(change, (unit, None))
                totals[change] = first_unit, total.add(alteration) if total else alteration
        for change, (unit, total) in totals.items():
            source = unit.parts[total.part].source
            if change == ROUNDED_WEIGHTS:
                self._log.add_warning(f"{change}, first in {source.name}: docs/reference/format.md lists them.")
                continue
            before = self._count_records_before(unit.number, total.part)
            first_record = BadRecord(total.record, total.offset, None, "", "")
            name = format_record_name(source, self._rules, before, first_record)
            self._log.add_warning(
                f"{change}: {format_count(total.count, 'record')}, first {name}. batchloom doctor shows such "
                "conversations as a model sees them."
            )

    def _make_error(self, number: int, part: int, bad: BadRecord) -> Exception:
        unit = self._units[number]
        source = unit.parts[part].source
        return make_bad_record_error(source, self._rules, self._count_records_before(number, part), bad)

    def _count_records_before(self, number: int, part: int) -> int | None:
        """Count the records of a source before a part; None if some are not counted yet."""
        path = self._units[number].parts[part].source.path
        if self._units[number].parts[part].start == 0:
            return 0
        record_count = 0
        for unit, facts in zip(self._units[:number], self._facts[:number], strict=True):
            part_indices = [index for index, unit_part in enumerate(unit.parts) if unit_part.source.path == path]
            if part_indices and facts is None:
                return None
            record_count += sum(facts.parts[index].records for index in part_indices) if facts else 0
        return record_count


def _count_bad(facts: UnitFacts) -> int:
    """Count bad records, without those of files that are left out."""
    return sum(part.bad for part in facts.parts if not part.damage)


def _describe_no_documents(counters: JobCounters, facts: Sequence[UnitFacts]) -> str:
    dropped_counts: Counter[str] = Counter()
    for part in [part for unit_facts in facts for part in unit_facts.parts]:
        dropped_counts.update(part.dropped)
    empty = counters.records - counters.quarantined - dropped_counts.total()
    counts_by_reason = {"bad": counters.quarantined, **dropped_counts, "empty": empty}
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts_by_reason.items() if n > 0)
    message = (
        f"No documents were made from {format_count(counters.records, 'record')}: "
        f"{reasons or 'the input has no records'}."
    )
    if counters.first:
        return f"{message} The first bad one: {counters.first}. Fix the input, or name another."
    if dropped_counts:
        flags = UNTRAINED_RULE in dropped_counts
        more = ", flags of messages, weights of 0" if flags else ""
        return f"{message} Relax the rules (--clean, --max-tokens, --overlong, --train-on{more}), or name other inputs."
    return f"{message} Name other inputs."
