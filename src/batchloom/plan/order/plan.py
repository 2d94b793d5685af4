"""Plan of a run: the complete data order as a value, computed from lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, final

import numpy as np

from batchloom.core.errors import PlanError, SettingsError, StateError
from batchloom.core.fingerprint import find_broken_link
from batchloom.core.report_output import make_notebook_html
from batchloom.plan.mixture.mixture_spec import Mixture, PlanStore
from batchloom.plan.order.plan_state import (
    build_journal,
    build_state,
    describe_origin,
    find_last_fingerprint,
    resume_from_state,
)
from batchloom.plan.order.run_positions import WHOLE, RunPositions
from batchloom.plan.order.source_order import SourceOrder
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import Edit, TimelineSegment
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
        self.spec, self.edits = self.orders.spec, self.orders.edits
        self.stores, self.names = self.orders.stores, self.orders.names
        self.run = RunPositions(self.orders)

    def __reduce__(self) -> tuple[type["Plan"], tuple[Any, ...]]:
        return Plan, (self.orders.data, self.spec, self.edits)

    def __copy__(self) -> "Plan":
        # The copy needs a new lock: after a fork, the lock of another thread may never be released.
        return Plan(self.orders.data, self.spec, self.edits, self.orders)

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
            return Plan(self.orders.data, self.spec, (*self.edits, *edits), self.orders)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All fields that determine the order, before any edit."""
        return describe_origin(self.orders)

    @cached_property
    def journal(self) -> list[dict[str, Any]]:
        """Edits as plain values, each with the sources it adds and its new fingerprint."""
        return build_journal(self.orders, self.identity)

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
        if self.spec.steps is not None:
            if not self.run.may_run_out:
                return self.spec.steps
            timeline, course = self.orders.timeline, self.orders.run_layout
            timeline.segment_at(course.first_position(self.spec.steps) - 1)
            if timeline.end is None:
                return self.spec.steps
            step, inside = course.step_at(timeline.end)
            return min(self.spec.steps, step + (inside > 0 and self.spec.last == "fill"))
        step, inside = self.orders.run_layout.step_at(self.positions)
        return step + (inside > 0 and self.spec.last == "fill")

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
        step_range = self.orders.run_layout.range_of_step(step)
        if (step_range.size, step_range.seq_len) == (self.spec.global_batch_size, self.spec.seq_len):
            return self.spec
        return replace(self.spec, global_batch_size=step_range.size, seq_len=step_range.seq_len)

    def positions_of(self, step: int) -> tuple[int, int]:
        """Return the first and last + 1 position of a step."""
        step_range = self.orders.run_layout.range_of_step(step)
        first = step_range.position + (step - step_range.step) * step_range.size
        return first, first + step_range.size

    def rows(self, start: int, stop: int, part: tuple[int, int] = WHOLE) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``.

        Rows past the end of the run are empty.

        Args:
            start: first position.
            stop: last position + 1; both must have the same ``seq_len``.
            part: (r, R) selects the positions whose lane is r modulo R, in their order.

        Raises:
            PlanError: the range is negative or reversed, or the store gives no sequence at all.
        """
        if not 0 <= start <= stop:
            raise PlanError(f"Positions {start} to {stop} are not a range of this plan.")
        if part != WHOLE and (start % self.spec.lanes or stop % self.spec.lanes):
            raise PlanError(f"Positions {start} to {stop} are not multiples of {self.spec.lanes} lanes.")
        with self.orders.lock:
            return self.run.rows(start, stop, part)

    def left_out(self) -> ExcludedDocuments:
        """Count the documents and tokens that ``overlong`` excludes from every epoch.

        This reads all lengths.
        """
        return self.orders.left_out()

    def epochs(self, position: int) -> dict[str, float]:
        """Return the passes before a position through each source with a weight.

        The count consists of complete pools, and the rows of the last of them in lane 0.
        """
        with self.orders.lock:
            return _compute_epochs(self.orders, position)

    def state(self, position: int) -> dict[str, Any]:
        """Return one position as plain JSON values, with all that resuming needs.

        Keys: ``order_version``, ``fingerprint``, ``identity`` (its fields before any edit, so that an error can
        name the one that differs), ``edits`` (the journal), ``position``, ``end`` (the positions of the run that
        carry data if ``position`` is past them, else None), per source ``epoch``, ``slot`` (index of the pool in
        the epoch's order) and ``before`` (sequences before that pool), or a list of them per lane; after edits
        and with exhausted sources ``cuts`` and ``exhausted``; and ``check``, the fingerprint of all the others.

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
        segment, position = orders.timeline.segment_at(orders.timeline.end - 1), orders.timeline.end
    if segment is None:
        return {}
    if segment.plain:
        served = {int(segment.sources[0]): segment.index(position)}
    else:
        counts = segment.served(position)
        served = {n: int(counts[n, 0]) for n in orders.weighted_sources_by_era[segment.era]}
    epochs_by_source = {}
    for number, index in served.items():
        order = orders.order(number, segment.era)
        location = order.find(0, index)
        if location is None:
            continue
        # The remainder of a pool before an edit, and sequences lent by another lane, have no slot in the epoch.
        share = 0.0
        if location.cursor is not None:
            inside = location.row / (location.row + location.run)
            share = (location.cursor.slot + inside) / len(order.epoch(location.epoch).orders[0])
        max_epochs = orders.epoch_limit(number)
        if len(orders.names) == 1 and orders.spec.steps is None:
            max_epochs = max_epochs or orders.spec.epochs or 1
        # Sequences that fill up the last step do not count as a pass.
        epochs_by_source[orders.names[number]] = (
            location.epoch + share if max_epochs is None else min(location.epoch + share, max_epochs)
        )
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


@dataclass(frozen=True, slots=True)
class DocumentPosition:
    """Sequence that holds a document."""

    step: int
    row: int
    position: int
    epoch: int


def find_document_positions(plan: Plan, number: int, document: int, last_step: int) -> list[DocumentPosition]:
    """Return all sequences up to a step that hold a document, sorted by position.

    Past and future steps are included. Pools of the source that are not counted yet are counted.
    """
    last = min(last_step, plan.steps - 1)
    end = plan.positions_of(last)[1]
    # Grouping by length may serve a row at any position of its window, so the search includes the full window.
    end = min(plan.run.window(end - 1)[1], plan.positions)
    plan.orders.timeline.segment_at(max(end - 1, 0))
    segments = [s for s in plan.orders.timeline.segments() if number in s.sources.tolist()]
    document_positions: list[DocumentPosition] = []
    for era in sorted({segment.era for segment in segments}):
        era_segments = [segment for segment in segments if segment.era == era]
        document_positions += _find_in_era(plan, era_segments, (number, document), end)
    document_positions = [position for position in document_positions if position.step <= last]
    return sorted(document_positions, key=lambda position: position.position)


def _find_in_era(
    plan: Plan, segments: list[TimelineSegment], source_document: tuple[int, int], end: int
) -> list[DocumentPosition]:
    number, document = source_document
    order = plan.orders.order(number, segments[0].era)
    if not order.is_counted:
        order.count_all()
    epoch, epochs = order.first_epoch, plan.orders.epoch_limit(number)
    document_positions = [
        position
        for lane, index, epoch_number in _find_remainder_indices(order, document)
        if (epochs is None or epoch_number < epochs)
        and (position := _locate_sequence(plan, segments, (number, lane, index), epoch_number))
    ]
    last = segments[-1]
    until = min(plan.orders.timeline.until(last) or end, end)
    served = last.served(max(until, last.position))[number]
    # An epoch has begun if any lane is past its start.
    while (epochs is None or epoch < epochs) and (served > order.quotas(epoch)).any():
        document_positions += [
            position
            for lane, index in _find_indices(order, document, epoch)
            if (position := _locate_sequence(plan, segments, (number, lane, index), epoch))
        ]
        epoch += 1
    document_positions = [entry for entry in document_positions if entry.position < end]
    return _group_by_length(plan, document_positions) if plan.spec.group_by_length else document_positions


def _group_by_length(plan: Plan, document_positions: list[DocumentPosition]) -> list[DocumentPosition]:
    """Map sequences to the positions where they are served after length grouping."""
    with plan.orders.lock:
        positions = [plan.run.find_served_position(entry.position) for entry in document_positions]
    return [
        DocumentPosition(*plan.orders.run_layout.step_at(position), position, entry.epoch)
        for position, entry in zip(positions, document_positions, strict=True)
    ]


def _locate_sequence(
    plan: Plan, segments: list[TimelineSegment], sequence: tuple[int, int, int], epoch: int
) -> DocumentPosition | None:
    """Return the position that serves a sequence; None if skipped or retired."""
    number, lane, index = sequence
    last = segments[-1]
    tail = plan.orders.timeline.tail(number, last, plan.orders.timeline.until(last) or plan.orders.timeline.sure)
    turn = tail.turn(lane, index) if tail else None
    for segment in reversed(segments):
        position = segment.find_position(number, lane, index) if turn is None else segment.turn(number, turn)
        if position is None:
            continue
        until = plan.orders.timeline.until(segment)
        if until is not None and position >= until:
            return None
        step, row = plan.orders.run_layout.step_at(position)
        first, stop = plan.positions_of(step)
        # A position that an edit skipped belongs to no step.
        return DocumentPosition(step, row, position, epoch) if first + row == position < stop else None
    return None


def _find_indices(order: SourceOrder, document: int, epoch: int) -> list[tuple[int, int]]:
    """Return (lane, index) of the sequences of an epoch that hold a document."""
    pool = order.pools.find_pool(document)
    lane, pools = pool % order.lanes, order.epoch(epoch)
    slot = int(np.flatnonzero(pools.orders[lane] == pool)[0])
    if (epoch, slot) < order.begins[lane][:2]:
        return []
    earlier_rows = int(pools.ends[lane][slot - 1]) if slot else pools.remainder_counts[lane]
    rows = _find_rows_with(order.get_pool_rows(pool, epoch), document)
    return [_find_server(order, epoch, lane, earlier_rows + row) for row in rows]


def _find_remainder_indices(order: SourceOrder, document: int) -> list[tuple[int, int, int]]:
    """Return (lane, index, epoch) of the repacked sequences that hold a document."""
    return [
        (*_find_server(order, order.begins[lane].epoch, lane, row), order.begins[lane].epoch)
        for lane, remainder_rows in enumerate(order.remainders)
        for row in (_find_rows_with(remainder_rows, document) if remainder_rows is not None else [])
    ]


def _find_server(order: SourceOrder, epoch: int, lane: int, inside: int) -> tuple[int, int]:
    """Return the lane that serves a lane's sequence of an epoch, and its index there."""
    lanes, indices = order.find_servers(epoch, np.array([lane]), np.array([inside]))
    return int(lanes[0]), int(indices[0])


def _find_rows_with(rows: Rows, document: int) -> list[int]:
    spans = np.flatnonzero(rows.documents == document)
    numbers: list[int] = np.unique(rows.pointers.searchsorted(spans, side="right") - 1).tolist()
    return numbers
