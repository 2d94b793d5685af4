"""Plan of a run: the data order as a value."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, final

from batchloom.core.errors import PlanError, SettingsError, StateError
from batchloom.core.fingerprint import find_broken_link
from batchloom.core.report_output import make_notebook_html
from batchloom.plan.mixture import Mixture, PlanStore
from batchloom.plan.order.edits import Edit
from batchloom.plan.order.plan_identity import build_journal, describe_origin, find_last_fingerprint
from batchloom.plan.order.plan_states import build_state, resume_from_state
from batchloom.plan.order.rank_slices import WHOLE, RowPart
from batchloom.plan.order.run_positions import RunPositions
from batchloom.plan.order.segments import Segment
from batchloom.plan.order.source_order import REMAINDER
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import ServedRun
from batchloom.plan.packing.plan_spec import PlanSpec
from batchloom.plan.packing.pools import ExcludedDocuments
from batchloom.plan.packing.rows import Rows


@final
class Plan:
    """Data order of one store or a mixture under one spec.

    Position p of the run is one sequence. Step s holds positions [s * global_batch_size, (s + 1) *
    global_batch_size), unless an edit changed that. Results depend on ``data``, ``spec`` and ``edits`` alone;
    cached pools and counts only save work. Threads may share a plan. ``copy.copy`` returns an equal plan with the
    same counts and its own lock, for use after a fork.

    Args:
        data: a store (any object with ``lengths``, ``tokens`` and a ``fingerprint``), or a mixture.
        spec: settings of the order.
        edits: changes later in the run, in the order they were appended.
        previous_orders: ``orders`` of a plan of the same data and spec, whose counts are reused.

    Attributes:
        spec: as given, with the pool size chosen.
        edits: as given.
        data: as given.
        mixture: the mixture; None for a plan of one store.
        stores: stores by source name.
        names: source names, in the order of their numbers in rows. A single store is called ``data``.
        orders: order of each source, its counts, and the timeline that serves them.
        run: positions that carry data, and the sequence of each one.

    Raises:
        PlanError: a source has no documents, gives no sequence, or has an overlong document with
            overlong='error'; weights cannot be met; an edit cannot be applied.
        SettingsError: settings or edits contradict the mixture, or a mixture that repeats has no ``steps``; lists
            each problem.
    """

    def __init__(
        self,
        data: PlanStore | Mixture,
        spec: PlanSpec,
        edits: Sequence[Edit] = (),
        previous_orders: SourceOrders | None = None,
    ) -> None:
        self.orders = SourceOrders(data, spec, edits, previous_orders)
        self.data = data
        self.mixture = data if isinstance(data, Mixture) else None
        self.spec = self.orders.spec
        self.edits = self.orders.edits
        self.stores = self.orders.stores
        self.names = self.orders.names
        self.run = RunPositions(self.orders)
        self._identity: dict[str, Any] | None = None
        self._journal: list[dict[str, Any]] | None = None

    def __reduce__(self) -> tuple[type["Plan"], tuple[Any, ...]]:
        return Plan, (self.data, self.spec, self.edits)

    def __copy__(self) -> "Plan":
        # The copy needs a new lock: after a fork, the lock of another thread may never be released.
        return Plan(self.data, self.spec, self.edits, self.orders)

    def __repr__(self) -> str:
        spec = self.spec
        steps = "" if spec.steps is None else f"{spec.steps:,} steps of "
        edits = f", {len(self.edits)} edits" if self.edits else ""
        return (
            f"Plan({', '.join(self.names)}: {steps}{spec.global_batch_size:,} sequences of {spec.seq_len:,} tokens, "
            f"packing {spec.packing}, seed {spec.seed}{edits})"
        )

    def _repr_html_(self) -> str | None:
        return make_notebook_html(self)

    def edited(self, *edits: Edit) -> "Plan":
        """Return the plan with further edits; it reuses the counts of this one.

        Raises:
            PlanError, SettingsError: an edit cannot be applied.
        """
        with self.orders.lock:
            return Plan(self.data, self.spec, (*self.edits, *edits), self.orders)

    @property
    def identity(self) -> dict[str, Any]:
        """All fields that determine the order, before any edit."""
        # Not a cached_property, which before Python 3.12 has a lock of its own: threads would take the two in turn.
        with self.orders.lock:
            if self._identity is None:
                self._identity = describe_origin(self.orders)
            return self._identity

    @property
    def journal(self) -> list[dict[str, Any]]:
        """Edits as plain values, each with the sources it adds and its new fingerprint."""
        with self.orders.lock:
            if self._journal is None:
                self._journal = build_journal(self.orders, self.identity)
            return self._journal

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the order, 32 hex digits.

        Equal fingerprints mean equal steps up to the end of the shorter run; past its end a run has empty
        sequences. An edit creates a new fingerprint from the old one and the edit.
        """
        return find_last_fingerprint(self.identity, self.journal)

    @property
    def positions(self) -> int:
        """Number of positions of the run's steps that carry data."""
        return self.run.end

    @property
    def steps(self) -> int:
        """Exact number of steps of the run.

        Exhausted sources may end the run before ``spec.steps``.
        """
        if self.spec.steps is not None and not self.run.may_run_out:
            return self.spec.steps
        end: int | None = None
        if self.spec.steps is None:
            end = self.positions
        else:
            with self.orders.lock:
                self.orders.timeline.segment_at(self.orders.run_layout.first_position(self.spec.steps) - 1)
                end = self.orders.timeline.end
            if end is None:
                return self.spec.steps
        step, inside = self.step_at(end)
        steps = step + (inside > 0 and self.spec.last == "fill")
        return steps if self.spec.steps is None else min(self.spec.steps, steps)

    def has_step(self, step: int) -> bool:
        """Return whether the run has a step, without counting pools far ahead."""
        if step < 0:
            return False
        if self.spec.steps is not None and (step >= self.spec.steps or not self.run.may_run_out):
            return step < self.spec.steps
        first, stop = self.positions_of(step)
        return self.run.carries_data(stop - 1 if self.spec.last == "drop" else first)

    def spec_at(self, step: int) -> PlanSpec:
        """Return the settings at a step.

        Edits may change ``global_batch_size`` and ``seq_len``.
        """
        if not self.edits:
            return self.spec
        segment = self.orders.run_layout.segment_of_step(step)
        if (segment.size, segment.seq_len) == (self.spec.global_batch_size, self.spec.seq_len):
            return self.spec
        return replace(self.spec, global_batch_size=segment.size, seq_len=segment.seq_len)

    def positions_of(self, step: int) -> tuple[int, int]:
        """Return the first and last + 1 position of a step."""
        segment = self.orders.run_layout.segment_of_step(step)
        first = segment.locate_step(step)
        return first, first + segment.size

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the run between stages and edits, in order."""
        return self.orders.run_layout.segments

    def step_at(self, position: int) -> tuple[int, int]:
        """Return the step and row of a position; the next step for a skipped one."""
        return self.orders.run_layout.step_at(position)

    def steps_until(self, position: int) -> int:
        """Return the number of steps that begin before a position."""
        return self.orders.run_layout.steps_until(position)

    def serve_until(self, end: int) -> ServedRun:
        """Return what serves the positions before ``end``.

        Where sources can be exhausted before it, their pools may be counted.
        """
        timeline = self.orders.timeline
        with self.orders.lock:
            timeline.segment_at(max(end - 1, 0))
            has_ended = timeline.end is not None and timeline.end <= end
            stop = min(end, timeline.end) if timeline.end is not None else end
            segments = [segment for segment in timeline.segments() if segment.position < stop]
            exhausted = {number: position for number, position in timeline.exhausted.items() if position < end}
        ends = [*(segment.position for segment in segments), stop][1:]
        # Sources that are exhausted at one position make empty segments.
        served_segments = [
            (segment, end) for segment, end in zip(segments, ends, strict=False) if segment.position < end
        ]
        return ServedRun(served_segments, exhausted, has_ended)

    def rows(self, start: int, stop: int, part: RowPart = WHOLE) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``.

        Rows past the end of the run are empty.

        Args:
            start: first position.
            stop: last position + 1; both must have the same ``seq_len``.
            part: rows to take of them.

        Raises:
            PlanError: the range is negative or reversed, or the store gives no sequence at all.
        """
        if not 0 <= start <= stop:
            raise PlanError(f"Positions {start} to {stop} are not a range of this plan.")
        with self.orders.lock:
            return self.run.rows(start, stop, part)

    def left_out(self) -> ExcludedDocuments:
        """Count the documents and tokens that ``overlong`` excludes from every epoch.

        This reads all lengths.
        """
        return self.orders.left_out()

    def epochs(self, position: int) -> dict[str, float]:
        """Return the passes before a position through each source with a weight.

        The count consists of complete slots, and the rows of the last of them.
        """
        with self.orders.lock:
            return _compute_epochs(self.orders, position)

    def state(self, position: int) -> dict[str, Any]:
        """Return one position as plain JSON values, with all that resuming needs.

        Keys: ``order_version``, ``fingerprint``, ``identity`` (its fields before any edit, so that an error can
        name the one that differs), ``edits`` (the journal), ``position``, ``end`` (the positions of the run that
        carry data if ``position`` is past them, else None), per source ``epoch``, ``slot`` (index of the slot in
        the epoch's order) and ``before`` (sequences before that slot); after edits and with exhausted sources
        ``cuts`` and ``exhausted``; and ``check``, the fingerprint of all the others.

        Raises:
            StateError: the position is negative.
        """
        with self.orders.lock:
            return build_state(self.run, self.identity, self.journal, position)

    def resume(self, state: dict[str, Any]) -> int:
        """Check a state against this plan and return the position to resume at.

        That is the state's own position, with one exception: if its run ended inside its last step and this plan
        continues, it is the first position of that step. Otherwise data of the next epoch would be lost.

        Raises:
            StateError: not a state, changed by hand, of another order version, or of another plan; names each
                field that differs.
        """
        with self.orders.lock:
            return resume_from_state(self.run, self.identity, self.journal, state)


def _compute_epochs(orders: SourceOrders, position: int) -> dict[str, float]:
    segment = orders.timeline.segment_at(position)
    if segment is None and orders.timeline.end:
        segment = orders.timeline.segment_at(orders.timeline.end - 1)
        position = orders.timeline.end
    if segment is None:
        return {}
    served = segment.served(position)
    epochs_by_source = {}
    for number in orders.weighted_sources_by_era[segment.era]:
        order = orders.order(number, segment.era)
        location = order.find(int(served[number]))
        if location is None:
            continue
        epoch, slot, _ = location.cursor
        inside = location.row / (location.row + location.remaining)
        share = (slot + inside) / len(order.epoch(epoch).slots)
        if slot == REMAINDER and order.remainder is not None:
            # The rest of a slot, packed again after an edit, has its share of the tokens.
            rest = int(order.remainder.lengths.sum()) / max(order.store.tokens, 1)
            share = max(order.begin.slot / len(order.epoch(epoch).slots) - (1 - inside) * rest, 0.0)
        max_epochs = orders.shares.get_epoch_limit(number)
        if len(orders.names) == 1 and orders.spec.steps is None:
            max_epochs = max_epochs or orders.spec.epochs or 1
        # Sequences that fill up the last step do not count as a pass.
        epochs_by_source[orders.names[number]] = epoch + share if max_epochs is None else min(epoch + share, max_epochs)
    return epochs_by_source


def with_journal(plan: Plan, state: Any) -> Plan:
    """Return the plan with the edits of a state's journal, if it has none of its own."""
    journal = state.get("edits") if isinstance(state, dict) else None
    if not journal or plan.edits:
        return plan
    try:
        number = find_broken_link(state.get("identity"), journal)
        if number is not None:
            _refuse_changed(number, journal[number])
        _refuse_without_stores(plan, journal)
        edits = [{k: v for k, v in entry.items() if k not in ("added", "fingerprint")} for entry in journal]
        return plan.edited(*(Edit(**edit) for edit in edits))
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, PlanError, SettingsError) as error:
        raise StateError(
            f"The state's journal of edits cannot be used: {error}. Use the state as it was saved."
        ) from error


def _refuse_without_stores(plan: Plan, journal: list[dict[str, Any]]) -> None:
    for entry in journal:
        for name in entry.get("added", {}):
            if name not in plan.stores:
                raise StateError(
                    f"The run's journal adds source {name!r} at step {entry['step']}: add its store to the stores of "
                    f"the mixture (fingerprint {entry['added'][name]['store'][:12]})."
                )


def _refuse_changed(number: int, edit: dict[str, Any]) -> NoReturn:
    fields = ", ".join(name for name in edit if name != "fingerprint")
    raise StateError(
        f"Edit {number} of the journal, at step {edit.get('step')}, was changed after it was written: one of "
        f"{fields} does not match its fingerprint. Use the journal as it was saved; append a new edit instead "
        "(loader.edit, batchloom edit)."
    )
