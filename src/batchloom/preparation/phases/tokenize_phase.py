"""Phase A over all units: task dispatch and progress counting."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from batchloom.core.document import BadRecord
from batchloom.preparation.report.progress import JobCounters
from batchloom.preparation.units.crash_isolation import CrashTracker
from batchloom.preparation.units.tasks import CrashMarker, UnitProgress, UnitTask, UnusableError
from batchloom.preparation.units.unit_report import UnitReportMerger
from batchloom.preparation.units.units import Unit
from batchloom.preparation.units.work_folder import UnitFacts
from batchloom.preparation.workers.protocols import Executor, TaskMessage, iter_task_events
from batchloom.sources import ReadRules, make_bad_record_error


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
        self._counters, self.crash_tracker, self._note = counters, crash_tracker, note
        self._progress_by_unit: dict[int, UnitProgress] = {}
        self._noted_alterations: set[str] = set()
        for unit, facts in zip(units, resumed_facts, strict=True):
            if facts is not None:
                self._count_resumed(unit, facts)
                self._keep(unit.number, facts)

    def _keep(self, number: int, facts: UnitFacts) -> None:
        """Store the results of a unit and merge its report into the others."""
        self.facts[number] = facts.counts
        self.reports.add(number, facts.report)

    def _count_resumed(self, unit: Unit, facts: UnitFacts) -> None:
        self._counters.count_resumed(
            unit.bytes,
            sum(part.records for part in facts.parts),
            facts.documents,
            facts.tokens,
            sum(part.bad for part in facts.parts),
        )

    def handle_message(self, event: Any) -> None:
        """Handle a worker's message; raises TooManyBadRecordsError above the budget."""
        number, message = event.number, event.message
        if isinstance(message, CrashMarker):
            self.crash_tracker.record_marker(number, message)
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

    def handle_crash(self, number: int, task: UnitTask, reason: str) -> UnitTask:
        """Return the retry task of a unit whose worker died.

        Raises WorkerError for repeated deaths, RecordExcludedError if an excluded record affects other units.
        """
        progress = self._progress_by_unit.pop(number, UnitProgress())
        self._counters.forget(
            progress.bytes, progress.records, progress.documents, progress.tokens, progress.bad, progress.reasons
        )
        return self.crash_tracker.handle_crash(number, task, reason)

    def finish_unit(self, number: int, facts: UnitFacts) -> None:
        self._keep(number, facts)
        self._progress_by_unit.pop(number, None)
        self.crash_tracker.forget_unit(number)
        for alteration, source in facts.altered.items():
            if alteration not in self._noted_alterations:
                self._noted_alterations.add(alteration)
                self._note(
                    f"{alteration}, first in {source}: batchloom doctor counts such conversations and shows them "
                    "as a model sees them."
                )

    def describe_unusable(self, number: int, error: UnusableError) -> Exception:
        """Return the error of a record that ends the job."""
        return self._make_error(number, error.part, error.bad)

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


def run_tokenize_phase(phase: TokenizePhase, executor: Executor, tasks: dict[int, UnitTask]) -> list[UnitFacts]:
    """Run the pending units and return the facts of all units in order."""
    try:
        for event in iter_task_events(executor, tasks.items(), phase.handle_crash):
            if isinstance(event, TaskMessage):
                phase.handle_message(event)
            else:
                phase.finish_unit(event.number, event.result)
    except UnusableError as error:
        raise phase.describe_unusable(error.unit, error) from None
    return [facts for facts in phase.facts if facts is not None]
