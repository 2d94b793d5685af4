"""Phase A over all units: orders are handed out, and what comes of them is counted."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from batchloom.core.document import BadRecord
from batchloom.preparation.report import JobCounters
from batchloom.preparation.units import (
    CrashMarker,
    CrashTracker,
    Unit,
    UnitFacts,
    UnitProgress,
    UnitReportMerger,
    UnitTask,
    UnusableError,
)
from batchloom.preparation.workers import Executor, TaskMessage, iter_task_events
from batchloom.sources import ReadRules, make_bad_record_error


@final
class TokenizePhase:
    """What is known of all units while some of them are at work.

    Args:
        units: all units in order.
        found: what came of those that an earlier run finished; None for the others.
        rules: how sources are read.
        tally: counts everything, and stops the job that is beyond saving.
        losses: knows of units whose workers died.
        note: is given sentences for the user.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        found: Iterable[UnitFacts | None],
        rules: ReadRules,
        tally: JobCounters,
        losses: CrashTracker,
        note: Callable[[str], None],
    ) -> None:
        self._units, self._rules = units, rules
        self.facts: list[UnitFacts | None] = [None] * len(units)
        self.reports = UnitReportMerger()
        self._tally, self.losses, self._note = tally, losses, note
        self._heard: dict[int, UnitProgress] = {}
        self._told: set[str] = set()
        for unit, facts in zip(units, found, strict=True):
            if facts is not None:
                self._count_resumed(unit, facts)
                self._keep(unit.number, facts)

    def _keep(self, number: int, facts: UnitFacts) -> None:
        """Remember what came of a unit; what the report tells of it becomes one with that of the others."""
        self.facts[number] = facts.counts
        self.reports.add(number, facts.report)

    def _count_resumed(self, unit: Unit, facts: UnitFacts) -> None:
        self._tally.count_resumed(
            unit.bytes,
            sum(part.records for part in facts.parts),
            facts.documents,
            facts.tokens,
            sum(part.bad for part in facts.parts),
        )

    def hear(self, told: Any) -> None:
        """Take what a worker tells of its unit.

        Raises:
            TooManyBadRecordsError: the job is beyond saving.
        """
        number, message = told.number, told.message
        if isinstance(message, CrashMarker):
            self.losses.hear(number, message)
            return
        before, self._heard[number] = self._heard.get(number, UnitProgress()), message
        tally = self._tally
        tally.read(message.bytes - before.bytes, message.records - before.records)
        if message.bad > before.bad:
            first = ""
            if not tally.first and message.first_bad:
                first = str(self._error(number, *message.first_bad))
            added = {
                kind: (count - before.reasons.get(kind, (0, ""))[0], reason)
                for kind, (count, reason) in message.reasons.items()
            }
            tally.bad(first, message.bad - before.bad, added)
        if message.documents > before.documents:
            tally.kept(message.documents - before.documents, message.tokens - before.tokens)

    def lost(self, number: int, order: UnitTask, reason: str) -> UnitTask:
        """The order to give in place of one whose worker is gone.

        Raises:
            WorkerError: workers die of this unit for ever.
            KeptAsideError: a record is kept aside, and other units have to know.
        """
        heard = self._heard.pop(number, UnitProgress())
        self._tally.forget(
            heard.bytes, heard.records, heard.documents, heard.tokens, heard.bad, heard.reasons
        )
        return self.losses.lost(number, order, reason)

    def done(self, number: int, facts: UnitFacts) -> None:
        """Take what came of a unit."""
        self._keep(number, facts)
        self._heard.pop(number, None)
        self.losses.done(number)
        for what, source in facts.altered.items():
            if what not in self._told:
                self._told.add(what)
                self._note(
                    f"{what}, first in {source}: batchloom doctor counts such conversations, and shows them as a model "
                    "sees them."
                )

    def describe_unusable(self, number: int, error: UnusableError) -> Exception:
        """What is said of a record that ends the job."""
        return self._error(number, error.part, error.bad)

    def first_bad(self) -> str:
        """What is said of the first bad record of all, in the order of the input."""
        for number, facts in enumerate(self.facts):
            if facts is not None and facts.first_bad:
                return str(self._error(number, *facts.first_bad))
        return ""

    def _error(self, number: int, part: int, bad: BadRecord) -> Exception:
        unit = self._units[number]
        source = unit.parts[part].source
        return make_bad_record_error(source, self._rules, self._before(number, part), bad)

    def _before(self, number: int, part: int) -> int | None:
        """Records of a source before a part; None where not all of them are counted."""
        path = self._units[number].parts[part].source.path
        if self._units[number].parts[part].start == 0:
            return 0
        before = 0
        for unit, facts in zip(self._units[:number], self.facts[:number], strict=True):
            mine = [at for at, one in enumerate(unit.parts) if one.source.path == path]
            if mine and facts is None:
                return None
            before += sum(facts.parts[at].records for at in mine) if facts else 0
        return before


def run_tokenize_phase(
    work: TokenizePhase, crew: Executor, orders: dict[int, UnitTask]
) -> list[UnitFacts]:
    """Have all units done that are not yet.

    Args:
        work: what is known of the units.
        crew: does them.
        orders: the units that are to be done, by number.

    Raises:
        InputError: a source cannot be read, or a record ends the job.
        WorkerError: workers die for ever, or there are none.
        OutputError: the files cannot be written.
    """
    try:
        for event in iter_task_events(crew, orders.items(), work.lost):
            if isinstance(event, TaskMessage):
                work.hear(event)
            else:
                work.done(event.number, event.result)
    except UnusableError as error:
        raise work.describe_unusable(error.unit, error) from None
    return [facts for facts in work.facts if facts is not None]
