"""Plan of a run: the data order as a value, its identity and its states."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn, final

from batchloom.core.errors import PlanError, SettingsError, StateError
from batchloom.core.fingerprint import find_broken_link, fingerprint
from batchloom.core.report_output import make_notebook_html
from batchloom.core.settings import to_plain
from batchloom.plan.mixture import Mixture, PlanStore, list_weighted_sources
from batchloom.plan.order.edits import Edit, edit_to_plain
from batchloom.plan.order.rank_slices import WHOLE, RowPart
from batchloom.plan.order.run_positions import RunPositions
from batchloom.plan.order.segments import Segment
from batchloom.plan.order.source_order import REMAINDER, Cursor, SourceCut
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import ServedRun, ServedSegment
from batchloom.plan.packing.plan_spec import ORDER_VERSION, PlanSpec
from batchloom.plan.packing.pools import ExcludedDocuments
from batchloom.plan.packing.rows import Rows

# These fields may change between a run and its continuation without changing the order.
_NON_ORDER_FIELDS = ("epochs", "steps", "last")


def build_journal(orders: SourceOrders, origin: dict[str, Any]) -> list[dict[str, Any]]:
    """Return edits as plain values, each with added sources and its fingerprint."""
    sources = set(origin["sources"])
    order_fingerprint, entries = fingerprint(origin), []
    for edit in orders.edits:
        entry = edit_to_plain(edit)
        used_sources = list_weighted_sources(edit.weights, orders.names) if edit.weights is not None else set()
        added_sources = sorted(used_sources - sources)
        if added_sources:
            entry["added"] = {name: _describe_source(orders, orders.names.index(name)) for name in added_sources}
            sources |= set(added_sources)
        order_fingerprint = fingerprint([order_fingerprint, entry])
        entries.append({**entry, "fingerprint": order_fingerprint})
    return entries


def find_last_fingerprint(origin: dict[str, Any], journal: list[dict[str, Any]]) -> str:
    """Return the fingerprint of the order after all edits, 32 hex digits."""
    name: str = journal[-1]["fingerprint"] if journal else fingerprint(origin)
    return name


def describe_origin(orders: SourceOrders) -> dict[str, Any]:
    """Return the identity of a plan before any edit.

    Lanes, alignment, groups and mixture appear only if they are used.
    """
    spec = {k: v for k, v in orders.spec.identity_fields().items() if k not in _NON_ORDER_FIELDS}
    for name, default in (("lanes", 1), ("align", 1), ("group_by_length", 0)):
        if spec[name] == default:
            del spec[name]
    if orders.spec.group_by_length:
        spec |= _describe_end(orders.spec)
    identity: dict[str, Any] = {"order_version": ORDER_VERSION, "spec": spec}
    mixture = orders.data
    if not isinstance(mixture, Mixture):
        spec["block"] = orders.pools.blocks[0]
        return {**identity, "sources": {orders.names[0]: _describe_source(orders, 0)}}
    used = _list_used_sources(orders, mixture)
    identity["sources"] = {orders.names[n]: _describe_source(orders, n) for n in used}
    identity["mixture"] = {
        "unit": mixture.unit,
        "exhausted": mixture.exhausted,
        "temperature": mixture.temperature,
        "most_epochs": mixture.most_epochs,
        "weights": _weights_to_plain(mixture.weights),
        "stages": [{**to_plain(stage), "weights": _weights_to_plain(stage.weights)} for stage in mixture.stages],
    }
    if mixture.most_epochs is not None:
        # Weights that are bounded by most_epochs depend on the number of steps.
        identity["mixture"]["steps"] = orders.spec.steps
    return identity


def _describe_end(spec: PlanSpec) -> dict[str, int]:
    """Return the end of the run if its last length-group window may be incomplete.

    In that case the end determines the order of the window's rows.
    """
    if spec.epochs is not None or spec.steps is None:
        return {"epochs": spec.epochs or 1}
    return {"steps": spec.steps} if spec.steps % spec.group_by_length else {}


def _describe_source(orders: SourceOrders, number: int) -> dict[str, Any]:
    name, pools = orders.names[number], orders.order(number).pools
    identity = {"store": orders.stores[name].fingerprint, "documents": pools.documents}
    if isinstance(orders.data, Mixture):
        source_settings = {k: v for k, v in to_plain(orders.shares.get_source_spec(number)).items() if v is not None}
        identity.update(block=pools.blocks[0], **source_settings)
    return {**identity, **pools.layers_identity()}


def _list_used_sources(orders: SourceOrders, mixture: Mixture) -> list[int]:
    source_names: set[str] = set()
    for weights in (mixture.weights, *(stage.weights for stage in mixture.stages)):
        source_names |= list_weighted_sources(weights, orders.names)
    return [n for n, name in enumerate(orders.names) if name in source_names]


def _weights_to_plain(weights: Any) -> Any:
    """Return weights as plain values, with numbers as floats: 1 and 1.0 are equal."""
    if isinstance(weights, str):
        return weights
    return {
        name: {
            "weight": float(weight["weight"]),
            "sources": _weights_to_plain(weight["sources"])
            if hasattr(weight["sources"], "items")
            else list(weight["sources"]),
        }
        if hasattr(weight, "items")
        else float(weight)
        for name, weight in weights.items()
    }


def build_state(
    run: RunPositions, origin: dict[str, Any], journal: list[dict[str, Any]], position: int
) -> dict[str, Any]:
    if position < 0:
        raise StateError(f"Position {position} does not exist; positions count from 0.")
    orders = run.orders
    is_past_end = orders.spec.steps is None and not run.carries_data(position)
    # Past the end, use the pool of the last sequence, because a longer run continues from there.
    cursor_position = _find_window_start(run, position, run.end if is_past_end else None)
    segment = orders.timeline.segment_at(cursor_position)
    plain: dict[str, Any] = {
        "order_version": ORDER_VERSION,
        "fingerprint": find_last_fingerprint(origin, journal),
        "identity": origin,
        "edits": journal,
        "position": position,
        "end": run.end if is_past_end else None,
        "sources": _collect_cursors(orders, segment, cursor_position) if segment else {},
    }
    exhausted_sources = {
        orders.names[n]: exhausted_at
        for n, exhausted_at in orders.timeline.exhausted.items()
        if exhausted_at <= cursor_position
    }
    if exhausted_sources:
        plain["exhausted"] = exhausted_sources
    if segment and segment.era:
        eras = range(1, segment.era + 1)
        plain["cuts"] = {
            name: [_cut_to_plain(orders.get_source_cut(orders.names.index(name), era)) for era in eras]
            for name in plain["sources"]
        }
    return {**plain, "check": fingerprint(plain)}


def _find_window_start(run: RunPositions, position: int, end: int | None) -> int:
    return run.window(position if end is None else max(min(position, end) - 1, 0))[0]


def _collect_cursors(orders: SourceOrders, segment: ServedSegment, position: int) -> dict[str, Any]:
    """Return the start of the slot of each source's next sequence."""
    served = segment.served(position)
    return {
        orders.names[number]: _cursor_to_plain(orders.order(number, segment.era).find_cursor(int(served[number])))
        for number in orders.weighted_sources
    }


def _cut_to_plain(source_cut: SourceCut) -> list[int]:
    """Return a cut as three numbers, or four with several lanes."""
    return list(source_cut) if source_cut.before else list(source_cut[:3])


def _cursor_to_plain(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "slot": cursor.slot, "before": cursor.before}


def resume_from_state(
    run: RunPositions, origin: dict[str, Any], journal: list[dict[str, Any]], state: dict[str, Any]
) -> int:
    orders = run.orders
    position, end, cursors = _parse_state(orders, origin, journal, state)
    names = {name: number for number, name in enumerate(orders.names)}
    # A state past the end of its run does not list the sources that are exhausted there.
    last_position = position if end is None else max(min(position, end) - 1, 0)
    cursor_position = _find_window_start(run, position, end) if orders.spec.group_by_length else last_position
    exhausted = {names[n]: exhausted_at for n, exhausted_at in state.get("exhausted", {}).items()}
    orders.timeline.adopt(exhausted, cursor_position)
    for name, plain_cuts in state.get("cuts", {}).items():
        for era, plain_cut in enumerate(plain_cuts, 1):
            orders.source_cuts[era, names[name]] = SourceCut(*plain_cut)
    era = len(state.get("cuts", {}) and next(iter(state["cuts"].values())))
    for name, cursor in cursors.items():
        orders.order(names[name], era).anchor(cursor)
    if end is not None and position > end and run.carries_data(end):
        step, inside = orders.run_layout.step_at(end)
        return orders.run_layout.first_position(step) if inside else int(end)
    return position


def _parse_state(
    orders: SourceOrders, origin: dict[str, Any], journal: list[dict[str, Any]], state: dict[str, Any]
) -> tuple[int, int | None, dict[str, Cursor]]:
    with wrap_state_errors():
        state_identity, state_edits, state_fingerprint = (state[name] for name in ("identity", "edits", "fingerprint"))
        cursors = {
            name: Cursor(plain_cursor["epoch"], plain_cursor["slot"], plain_cursor["before"])
            for name, plain_cursor in state["sources"].items()
        }
        position, end = state["position"], state["end"]
        if not isinstance(state_edits, list):
            raise TypeError(f"edits is {state_edits!r}")
    check_state(state)
    if state_fingerprint != find_last_fingerprint(origin, journal):
        if state_edits != journal and not list_differences(state_identity, origin):
            raise StateError(
                f"The state's journal ({len(state_edits)} edits) differs from the plan's ({len(journal)}): "
                f"{_describe_first_edit(state_edits, journal)}. Make the loader without edits: it takes those "
                "of the state. Then add new edits to the resumed loader."
            )
        raise StateError(_describe_other_plan(orders, origin, state_identity, state_fingerprint))
    return int(position), end, cursors


@contextmanager
def wrap_state_errors() -> Iterator[None]:
    """Convert errors of reading a state's fields to StateError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fault = f"it lacks {error}" if isinstance(error, KeyError) else repr(error)
        raise StateError(f"This is not a loader's state ({fault}). Give what state_dict() returned.") from error


def check_state(state: Mapping[str, Any]) -> None:
    """Refuse a state of another version, or one that was changed.

    Raises:
        StateError: the state is of another version, was changed after it was saved, or is not a loader's state.
    """
    with wrap_state_errors():
        checked_fields = {name: value for name, value in state.items() if name != "check"}
        version = state["order_version"]
        is_unchanged = state["check"] == fingerprint(checked_fields)
    if version != ORDER_VERSION:
        raise StateError(
            f"The state has order_version {version}, and this batchloom writes {ORDER_VERSION}. Continue with the "
            "version that wrote it, or start without it."
        )
    if not is_unchanged:
        raise StateError(
            "The state was changed after it was saved: its check does not match its fields. Use the state as it was "
            "saved."
        )


def _describe_other_plan(
    orders: SourceOrders, origin: dict[str, Any], state_identity: Any, state_fingerprint: str
) -> str:
    differences = list_differences(state_identity, origin)
    only_mixture_differs = (
        isinstance(orders.data, Mixture) and differences and all(d.startswith("mixture.") for d in differences)
    )
    has_added_source = any(d.startswith("sources.") and " was None and is " in d for d in differences)
    if isinstance(orders.data, Mixture) and orders.data.weights == "size" and has_added_source:
        return (
            f"The state belongs to another plan: {'; '.join(differences)}. Weights by size cover every given store: "
            "give the stores the run started with. Sources can be added only to weights that are numbers."
        )
    if only_mixture_differs:
        return (
            f"The state belongs to another plan: {'; '.join(differences)}. Give the weights the run started with, "
            "and change them at a later step by an edit (loader.edit)."
        )
    return describe_other_settings(state_identity, origin, state_fingerprint)


def describe_other_settings(state_identity: Any, plan_identity: dict[str, Any], state_fingerprint: str) -> str:
    differences = "; ".join(list_differences(state_identity, plan_identity)) or f"fingerprint was {state_fingerprint!r}"
    return (
        f"The state belongs to another plan: {differences}. Give the settings and the store the state was made "
        "with, or start without it."
    )


def _describe_first_edit(state_edits: Any, plan_edits: list[dict[str, Any]]) -> str:
    for number, (state_edit, plan_edit) in enumerate(zip(state_edits, plan_edits, strict=False)):
        if state_edit != plan_edit:
            return f"edit {number} " + "; ".join(list_differences(state_edit, plan_edit))
    return "one of them has more edits"


def list_differences(old_value: Any, new_value: Any, path: str = "") -> list[str]:
    """List the fields in which two plain values differ: ``path was ... and is ...``."""
    if isinstance(old_value, dict) and isinstance(new_value, dict):
        return [
            line
            for key in sorted({*old_value, *new_value})
            for line in list_differences(old_value.get(key), new_value.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old_value == new_value else [f"{path} was {old_value!r} and is {new_value!r}"]


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
        self.spec, self.edits = self.orders.spec, self.orders.edits
        self.stores, self.names = self.orders.stores, self.orders.names
        self.run = RunPositions(self.orders)

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
            timeline = self.orders.timeline
            timeline.segment_at(self.orders.run_layout.first_position(self.spec.steps) - 1)
            if timeline.end is None:
                return self.spec.steps
            step, inside = self.step_at(timeline.end)
            return min(self.spec.steps, step + (inside > 0 and self.spec.last == "fill"))
        step, inside = self.step_at(self.positions)
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
        ends = [*(segment.position for segment in segments[1:]), stop]
        return ServedRun(list(zip(segments, ends, strict=True)) if segments else [], exhausted, has_ended)

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
        segment, position = orders.timeline.segment_at(orders.timeline.end - 1), orders.timeline.end
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
        # The rest of a slot before an edit has no share of the epoch.
        share = 0.0
        if slot != REMAINDER:
            inside = location.row / (location.row + location.run)
            share = (slot + inside) / len(order.epoch(epoch).slots)
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
