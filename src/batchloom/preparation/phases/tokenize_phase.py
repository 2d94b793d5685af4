"""Phase A over all units: part boundaries, task dispatch and progress counting."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from batchloom.core.document import BadRecord
from batchloom.preparation.phases.find_duplicates import search_all_ranges
from batchloom.preparation.report.progress import JobCounters, PrepareLog
from batchloom.preparation.units.crash_isolation import CrashTracker
from batchloom.preparation.units.unit_report import UnitReportMerger
from batchloom.preparation.units.units import CrashMarker, Unit, UnitProgress, UnitTask, UnusableError
from batchloom.preparation.units.work_folder import ExcludedRecords, UnitFacts, WorkFolder
from batchloom.preparation.workers.protocols import Executor, TaskMessage, iter_task_events, run_tasks
from batchloom.sources import KnownCut, ReadRules, SequentialCuts, make_bad_record_error
from batchloom.sources.files import PartStart, Source
from batchloom.sources.formats import is_sequential

# Part starts by (path, nominal offset).
CutsBySource = Mapping[tuple[str, int], PartStart | None]


def find_part_cuts(
    source: Source,
    nominal: Sequence[int],
    rules: ReadRules,
    attempt: str,  # noqa: ARG001 - writes no file
) -> list[PartStart | None]:
    """Find where parts begin, at or after ascending nominal offsets; None if no record follows."""
    sequential_cuts = SequentialCuts(source, rules)
    return [sequential_cuts.get_cut(offset) for offset in nominal]


def select_unit_cuts(unit: Unit, cuts: CutsBySource) -> tuple[KnownCut, ...]:
    """Select the cuts that a unit needs."""
    cut_keys = dict.fromkeys((part.source.path, offset) for part in unit.parts for offset in (part.start, part.stop))
    return tuple((path, offset, cuts[path, offset]) for path, offset in cut_keys if (path, offset) in cuts)


@dataclass(frozen=True, slots=True)
class SegmentSearch:
    """Search for repeated lines or paragraphs, which precedes tokenization.

    Attributes:
        key_files: file of the keys of each unit's segments.
        excluded: excluded records of each unit, whose segments no document has.
        folder: folder of the files that list repeated segments.
    """

    key_files: list[Path]
    excluded: list[ExcludedRecords]
    folder: Path


@final
class TokenizePhase:
    """State of all units during tokenization.

    ``resumed_facts`` are the facts of units that an earlier run finished, None for the others. ``counters`` also
    stop the job at too many bad records.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        resumed_facts: Iterable[UnitFacts | None],
        rules: ReadRules,
        counters: JobCounters,
        crash_tracker: CrashTracker,
        note: Callable[[str], None],
    ) -> None:
        self._units, self._rules = units, rules
        self.facts: list[UnitFacts | None] = [None] * len(units)
        self.reports = UnitReportMerger()
        self._counters, self._crash_tracker, self._note = counters, crash_tracker, note
        self._progress_by_unit: dict[int, UnitProgress] = {}
        self._noted_alterations: set[str] = set()
        for unit, facts in zip(units, resumed_facts, strict=True):
            if facts is not None:
                counters.count_resumed(
                    unit.bytes,
                    sum(part.records for part in facts.parts),
                    facts.documents,
                    facts.tokens,
                    sum(part.bad for part in facts.parts),
                )
                self._keep(unit.number, facts)

    def _keep(self, number: int, facts: UnitFacts) -> None:
        """Store the results of a unit and merge its report into the others."""
        self.facts[number] = facts.counts
        self.reports.add(number, facts.report)

    def make_tasks(
        self,
        executor: Executor,
        work: WorkFolder,
        folders: Sequence[Path],
        segments: SegmentSearch | None,
        log: PrepareLog,
    ) -> dict[int, UnitTask]:
        """Make the tasks of pending units, after finding part boundaries and repeats."""
        pending_units = [unit for unit, facts in zip(self._units, self.facts, strict=True) if facts is None]
        if not pending_units:
            return {}
        # Repeated lines are searched in all units.
        cuts = self._find_cuts(executor, self._units if segments else pending_units, log)
        repeated_files: tuple[Path, ...] = ()
        if segments:
            with log.time("find repeated pieces"):
                repeated_files = self._find_repeated_segments(executor, work, segments, cuts)
        return {
            unit.number: UnitTask(
                unit,
                folders[unit.number],
                work.attempt,
                excluded=segments.excluded[unit.number] if segments else (),
                repeated=repeated_files,
                known_cuts=select_unit_cuts(unit, cuts),
            )
            for unit in pending_units
        }

    def _find_cuts(self, executor: Executor, units: Sequence[Unit], log: PrepareLog) -> CutsBySource:
        """Find the part boundaries of large CSV files and JSON lists, one pass per file."""
        sources: list[Source] = []
        offsets: dict[str, set[int]] = {}
        for part in [part for unit in units for part in unit.parts]:
            inner_offsets = {offset for offset in (part.start, part.stop) if 0 < offset < part.source.size}
            if inner_offsets and is_sequential(part.source, self._rules):
                if part.source.path not in offsets:
                    sources.append(part.source)
                offsets.setdefault(part.source.path, set()).update(inner_offsets)
        if not sources:
            return {}
        tasks = {
            number: partial(find_part_cuts, source, sorted(offsets[source.path]), self._rules)
            for number, source in enumerate(sources)
        }
        with log.time("find cuts"):
            starts = run_tasks(executor, tasks, "")
        return {
            (source.path, offset): start
            for number, source in enumerate(sources)
            for offset, start in zip(sorted(offsets[source.path]), starts[number], strict=True)
        }

    def _find_repeated_segments(
        self, executor: Executor, work: WorkFolder, segments: SegmentSearch, cuts: CutsBySource
    ) -> tuple[Path, ...]:
        """Return the files that list repeated lines or paragraphs."""
        tasks = {
            unit.number: UnitTask(
                *(unit, path, work.attempt),
                excluded=excluded,
                known_cuts=select_unit_cuts(unit, cuts),
                segment_keys=True,
            )
            for unit, path, excluded in zip(self._units, segments.key_files, segments.excluded, strict=True)
            if not path.exists()
        }
        for event in iter_task_events(executor, tasks.items(), self._crash_tracker.handle_crash):
            if isinstance(event, TaskMessage):
                self._crash_tracker.record_marker(event.number, event.message)
            else:
                self._crash_tracker.forget_unit(event.number)
        return search_all_ranges(executor, tuple(segments.key_files), segments.folder, work.attempt)

    def run(self, executor: Executor, tasks: dict[int, UnitTask]) -> list[UnitFacts]:
        """Run the tasks and return the facts of all units in order."""
        try:
            for event in iter_task_events(executor, tasks.items(), self._handle_crash):
                if isinstance(event, TaskMessage):
                    self.handle_message(event)
                else:
                    self._finish_unit(event.number, event.result)
        except UnusableError as error:
            raise self._make_error(error.unit, error.part, error.bad) from None
        return [facts for facts in self.facts if facts is not None]

    def handle_message(self, event: Any) -> None:
        """Handle a worker's message; raises TooManyBadRecordsError above the budget."""
        number, message = event.number, event.message
        if isinstance(message, CrashMarker):
            self._crash_tracker.record_marker(number, message)
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

    def _handle_crash(self, number: int, task: UnitTask, reason: str) -> UnitTask:
        """Return the retry task of a unit whose worker died.

        Raises WorkerError for repeated deaths, RecordExcludedError if an excluded record affects other units.
        """
        progress = self._progress_by_unit.pop(number, UnitProgress())
        self._counters.forget(
            progress.bytes, progress.records, progress.documents, progress.tokens, progress.bad, progress.reasons
        )
        return self._crash_tracker.handle_crash(number, task, reason)

    def _finish_unit(self, number: int, facts: UnitFacts) -> None:
        self._keep(number, facts)
        self._progress_by_unit.pop(number, None)
        self._crash_tracker.forget_unit(number)
        for alteration, source in facts.altered.items():
            if alteration not in self._noted_alterations:
                self._noted_alterations.add(alteration)
                self._note(
                    f"{alteration}, first in {source}: batchloom doctor counts such conversations and shows them "
                    "as a model sees them."
                )

    def first_bad(self) -> str:
        """Describe the first bad record in input order; empty if there is none."""
        for number, facts in enumerate(self.facts):
            if facts is not None and facts.first_bad:
                return str(self._make_error(number, *facts.first_bad))
        return ""

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
        for unit, facts in zip(self._units[:number], self.facts[:number], strict=True):
            part_indices = [index for index, unit_part in enumerate(unit.parts) if unit_part.source.path == path]
            if part_indices and facts is None:
                return None
            record_count += sum(facts.parts[index].records for index in part_indices) if facts else 0
        return record_count
