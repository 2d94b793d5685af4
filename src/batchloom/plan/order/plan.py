"""The plan: the whole order of a run as a value. Every answer is arithmetic on lengths."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan.mixture import (
    Caps,
    Measured,
    Mixture,
    PlanStore,
    SourceSpec,
    Weights,
    apportion,
    flat_weights,
    measure,
    sequence_shares,
    weighed_in,
)
from batchloom.plan.order.edits import Edit, edit_plain
from batchloom.plan.order.epochs import epochs_at
from batchloom.plan.order.length_groups import Grouped, check_windows
from batchloom.plan.order.plan_checks import check_run
from batchloom.plan.order.plan_identity import origin_identity, source_identity
from batchloom.plan.order.plan_state import resume_at, state_at
from batchloom.plan.order.row_windows import WHOLE, Windows
from batchloom.plan.order.source_cuts import Cut, continued, cut_at
from batchloom.plan.order.source_order import Found, Known, SourceOrder, quotas
from batchloom.plan.order.timeline import Stretch, Timeline, course_of
from batchloom.plan.packing import LeftOut, PlanSpec, Pools, Rows

SOURCE = "data"


class Learned(NamedTuple):
    """What a plan found out, by era and number of the source: of its order, its measures and where it was cut."""

    orders: dict[tuple[int, int], Known]
    measured: dict[tuple[int, int], Measured]
    cuts: dict[tuple[int, int], Cut | None]


@final
class Plan:
    """The order of one store, or of a mixture, under one spec: position p of the run is one sequence.

    Step s holds positions [s * global_batch_size, (s + 1) * global_batch_size), where no edit
    changed that. Answers depend on the arguments of the constructor alone; what is kept inside (pools
    entered before, counts of sequences) only saves work. Safe to share between threads.

    Args:
        data: what to order: a store (anything with ``lengths``, ``tokens`` and a ``fingerprint``), or a mixture.
        spec: settings of the order.
        edits: what changes later in the run, in the order it was decided.
        learned: what a plan of the same data and spec found out; it saves work alone.

    Attributes:
        data, spec, edits: as given; the spec with the size of its pools chosen.
        names: of the sources, in the order of their numbers in rows; of a lone store ``data``.
        grouped: where rows of about the same length are brought together; its positions are those of the steps.

    Raises:
        PlanError: a source without documents, that gives no sequence, or with a document too long with
            overlong='error'; weights that cannot be met; a mixture that says nothing of its end; an edit that cannot
            be.
        SettingsError: settings or edits that contradict the mixture; every problem.
    """

    def __init__(
        self,
        data: PlanStore | Mixture,
        spec: PlanSpec,
        edits: Sequence[Edit] = (),
        learned: "Learned | None" = None,
    ) -> None:
        self.data, self.edits = data, tuple(edits)
        self._stores: dict[str, PlanStore] = (
            dict(sorted(data.stores.items())) if isinstance(data, Mixture) else {SOURCE: data}
        )
        self.names = tuple(self._stores)
        self.spec = spec.with_pools_for(self._begins_with())
        check_run(data, self._stores, spec, self.edits)
        self._lock = threading.RLock()
        self._orders: dict[tuple[int, int], SourceOrder] = {}
        self._learned = learned or Learned({}, {}, {})
        self._measured = self._learned.measured
        # Where an edit of seq_len left each source: found, or told by a state.
        self.cuts = self._learned.cuts
        self._windows = Windows(self)
        self.grouped = Grouped(self, self._windows)
        mixture = data if isinstance(data, Mixture) else None
        first = Stretch(0, 0, spec.global_batch_size, spec.seq_len)
        weights: Weights = mixture.weights if mixture else {SOURCE: 1.0}
        self.course = course_of(weights, first, mixture.stages if mixture else (), self.edits)
        check_windows(self.course, spec.group_by_length)
        # Lengths of sequences by era.
        self._seq_lens = (spec.seq_len, *(seq_len for _, seq_len in self.course.cuts))
        self._check_lengths()
        self.timeline = Timeline(
            self.course,
            self._slots,
            (len(self.names), spec.lanes),
            self._limit,
            stop=mixture is not None and mixture.exhausted == "stop",
        )
        self._check_weights()

    def __reduce__(self) -> tuple[type["Plan"], tuple[Any, ...]]:
        return Plan, (self.data, self.spec, self.edits)

    def __repr__(self) -> str:
        spec = self.spec
        steps = "" if spec.steps is None else f"{spec.steps:,} steps of "
        edits = f", {len(self.edits)} edits" if self.edits else ""
        return (
            f"Plan({', '.join(self.names)}: {steps}{spec.global_batch_size:,} sequences of {spec.seq_len:,} tokens, "
            f"packing {spec.packing}, seed {spec.seed}{edits})"
        )

    def twin(self) -> "Plan":
        """The same plan with what is known of it so far and a lock of its own, for after a fork."""
        return self.with_edits(self.edits)

    def edited(self, edit: Edit) -> "Plan":
        """The plan with one more edit, and with what is known of this one.

        Raises:
            PlanError, SettingsError: the edit cannot be.
        """
        with self._lock:
            return self.with_edits((*self.edits, edit))

    def with_edits(self, edits: Sequence[Edit]) -> "Plan":
        """The plan with other edits, and with what is known of its sources.

        Raises:
            PlanError, SettingsError: an edit cannot be.
        """
        edits = tuple(edits)
        orders = {
            **self._learned.orders,
            **{k: order.known for k, order in list(self._orders.items())},
        }
        if edits[: len(self.edits)] == self.edits:
            learned = Learned(orders, dict(self._measured), dict(self.cuts))
        else:
            first = {key: known for key, known in orders.items() if not key[0]}
            learned = Learned(first, {k: m for k, m in self._measured.items() if not k[0]}, {})
        plan = Plan(self.data, self.spec, edits, learned)
        if edits[: len(self.edits)] == self.edits:
            # What lies before the first edit that is new stays as it was.
            new = edits[len(self.edits) :]
            until = self.timeline.sure
            if new:
                until = min(until, self.course.position_of(new[0].step) - 1)
            gone = self.timeline.exhausted.items()
            tails = {n: quotas(s, self.spec.lanes) for n, s in self.timeline.tails(until).items()}
            plan.timeline.adopt({n: p for n, p in gone if p <= until}, max(until, 0), tails)
        return plan

    def _begins_with(self) -> int:
        """How many sources have a weight before any edit: what is added later changes no pool."""
        if not isinstance(self.data, Mixture):
            return 1
        found = weighed_in(self.data.weights, self.names)
        for stage in self.data.stages:
            found |= weighed_in(stage.weights, self.names)
        return len(found)

    def _check_lengths(self) -> None:
        """Refuse what would end the run at some step: a document that is too long, a source that gives nothing."""
        # What nobody edits gives something at its first step, or has none: then what is left out can be asked for.
        later = isinstance(self.data, Mixture)
        for era, numbers in enumerate(self.weighed_by_era):
            for number in numbers:
                # What was measured was looked at before.
                if (era, number) in self._measured:
                    continue
                spec, store = self._spec_of(number, era), self._stores[self.names[number]]
                if spec.overlong == "error":
                    Pools(store.lengths, spec, self.names[number]).refuse_overlong()
                if spec.overlong == "error" or ((later or era) and _may_give_nothing(spec, store)):
                    self.measured(number, era)

    def _check_weights(self) -> None:
        """Refuse weights of later in the run that cannot be met then; the timeline has begun with the first."""
        eras = enumerate(self.course.weights_by_era())
        for era, weights in [(era, one) for era, held in eras for one in held][1:]:
            self._slots(weights, frozenset(), era)

    @property
    def store(self) -> PlanStore:
        """The store of a plan of one.

        Raises:
            PlanError: it is a mixture; ``stores`` has all.
        """
        if isinstance(self.data, Mixture):
            raise PlanError("A mixture has several stores; plan.stores names them.")
        return self.data

    @property
    def stores(self) -> Mapping[str, PlanStore]:
        """The stores by the names of the sources, in the order of ``names``."""
        return self._stores

    @property
    def pools(self) -> Pools:
        """The pools of a plan of one store."""
        return self.order(self._only()).pools

    def _only(self) -> int:
        _ = self.store
        return 0

    def source_spec(self, number: int) -> SourceSpec:
        """What is said of one source alone."""
        given = self.data.sources if isinstance(self.data, Mixture) else {}
        return given.get(self.names[number], SourceSpec())

    def _spec_of(self, number: int, era: int) -> PlanSpec:
        own = self.source_spec(number)
        return self.spec.for_source(self._seq_lens[era], own.seed, own.overlong)

    def order(self, number: int, era: int = 0) -> SourceOrder:
        """The order of a source, by its number, after so many changes of ``seq_len``."""
        with self._lock:
            known = self._orders.get((era, number))
            if known is None:
                known = self._make_order(number, era)
                self._orders[era, number] = known
            return known

    def _make_order(self, number: int, era: int) -> SourceOrder:
        name, spec = self.names[number], self._spec_of(number, era)
        store = self._stores[name]
        if era == 0:
            order = SourceOrder(name, store, spec)
        else:
            before = self.order(number, era - 1)
            cut = self.cut(number, era)
            served = self.served_in(number, era - 1)
            order = continued(before, spec, cut, served, self.epochs_of(number))
        known = self._learned.orders.pop((era, number), None)
        if known is not None:
            order.learn(known)
        if len(self.names) > 1:
            order.kept = 2
        return order

    def cut(self, number: int, era: int) -> Cut | None:
        """Where a source was left when an era began; None where lanes lent each other."""
        if (era, number) not in self.cuts:
            served = self.served_in(number, era - 1)
            self.cuts[era, number] = cut_at(self.order(number, era - 1), served)
        return self.cuts[era, number]

    def served_in(self, number: int, era: int) -> NDArray[np.int64]:
        """Sequences of a source that its lanes have served of their own in an era which another follows."""
        position = self.course.cuts[era][0]
        if position:
            # Not further: whether anything is exhausted behind the cut follows from the cut.
            self.timeline.segment_at(position - 1)
        if self.timeline.end is not None:
            position = min(position, self.timeline.end)
        mine = [s for s in self.timeline.segments() if s.era == era]
        if not mine:
            return np.zeros(self.spec.lanes, np.int64)
        tail = self.timeline.tail(number, mine[-1], position)
        served: NDArray[np.int64] = mine[-1].served(position)[number]
        return served if tail is None else tail.served_at(int(served.sum()))

    def orders(self) -> list[SourceOrder]:
        """The orders of all sources that have a weight from somewhere on, in their last packing.

        Where a later packing begins follows from the counts of the one before: without them, that one.
        """
        found: dict[int, SourceOrder] = {}
        for era, numbers in enumerate(self.weighed_by_era):
            told = all(self.cuts.get((era, number)) for number in numbers)
            if era and not told and not all(order.counted for order in found.values()):
                break
            found |= {number: self.order(number, era) for number in numbers}
        return list(found.values())

    def forget_rows(self, era: int) -> None:
        """Keep no rows of entered pools of packings before ``era``."""
        for (earlier, _), order in self._orders.items():
            if earlier < era:
                order.forget_rows()

    @cached_property
    def weighed(self) -> tuple[int, ...]:
        """Numbers of the sources that have a weight somewhere in the run."""
        return tuple(sorted({number for numbers in self.weighed_by_era for number in numbers}))

    @cached_property
    def weighed_by_era(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the sources that have a weight somewhere after so many changes of ``seq_len``."""
        found = []
        for held in self.course.weights_by_era():
            named = set().union(*(weighed_in(weights, self.names) for weights in held))
            found.append(tuple(n for n, name in enumerate(self.names) if name in named))
        return tuple(found)

    def measured(self, number: int, era: int = 0) -> Measured:
        """What the weights of a source are counted with."""
        known = self._measured.get((era, number))
        if known is None:
            name = self.names[number]
            store = self._stores[name]
            known = measure(name, store, self._spec_of(number, era))
            self._measured[era, number] = known
        return known

    def shares(self, weights: Weights, era: int = 0) -> dict[str, float]:
        """The weight of every source of a mixture that has one above 0, adding up to 1.

        Raises:
            SettingsError: weights bounded by epochs, in a run without a number of steps.
            PlanError: with that bound the sources are too small for the run.
        """
        mixture = self.data
        if not isinstance(mixture, Mixture):
            return {SOURCE: 1.0}
        caps = None
        if mixture.most_epochs is not None:
            if self.spec.steps is None:
                raise SettingsError(
                    ["steps: missing; most_epochs is of a run of a known number of steps"]
                )
            caps = Caps(
                mixture.most_epochs,
                self.spec.steps * self.spec.global_batch_size * self.spec.seq_len,
            )

        def size(name: str) -> float:
            return self.measured(self.names.index(name), era).tokens

        return flat_weights(weights, self.names, size, mixture.temperature, caps)

    def _slots(self, weights: Weights, gone: frozenset[int], era: int) -> dict[int, int]:
        mixture = self.data
        if not isinstance(mixture, Mixture):
            return {0: 1}
        flat = {
            n: w for n, w in self.shares(weights, era).items() if self.names.index(n) not in gone
        }
        if not flat:
            return {}
        known = {name: self.measured(self.names.index(name), era) for name in flat}
        shares = sequence_shares(flat, mixture.unit, known)
        # Who is left when others are exhausted was not weighed for that.
        counts = apportion(shares, self.spec.lanes, near=bool(gone))
        return {self.names.index(name): count for name, count in counts.items()}

    def epochs_of(self, number: int) -> int | None:
        """How often a source of a mixture may be passed through; None for no bound."""
        if not isinstance(self.data, Mixture) or self.data.exhausted == "repeat":
            return None
        return self.source_spec(number).epochs or 1

    def _limit(self, number: int, era: int, counts: NDArray[np.int64]) -> NDArray[np.int64] | None:
        epochs = self.epochs_of(number)
        if epochs is None:
            return None
        order = self.order(number, era)
        if order.surely_has(counts, epochs):
            return None
        quotas = order.quotas(epochs)
        return quotas if (counts > quotas).any() else None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the fingerprint is made of, before any edit: every field that decides the order."""
        return origin_identity(self)

    @cached_property
    def journal(self) -> list[dict[str, Any]]:
        """The edits as plain values, each with the sources it adds and the fingerprint after it."""
        known = set(self.identity["sources"])
        name, entries = fingerprint(self.identity), []
        for edit in self.edits:
            entry = edit_plain(edit)
            used = weighed_in(edit.weights, self.names) if edit.weights is not None else set()
            added = sorted(used - known)
            if added:
                entry["added"] = {
                    source: source_identity(self, self.names.index(source)) for source in added
                }
                known |= set(added)
            name = fingerprint([name, entry])
            entries.append({**entry, "fingerprint": name})
        return entries

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name the order.

        Equal fingerprints give equal steps, up to where the shorter of two runs ends: past its
        end a run has empty sequences. An edit makes a new one, of the old and the edit.
        """
        name: str = self.journal[-1]["fingerprint"] if self.journal else fingerprint(self.identity)
        return name

    def left_out(self) -> LeftOut:
        """What ``overlong='drop'`` or ``'truncate'`` keeps out of every epoch; reads all lengths."""
        found = [order.pools.left_out() for order in self.orders()]
        return LeftOut(sum(one.documents for one in found), sum(one.tokens for one in found))

    def longest(self) -> int:
        """Tokens of the longest document; reads all lengths."""
        return max(order.pools.longest() for order in self.orders())

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(store.lengths.size for store in self._stores.values())

    @property
    def has_counts(self) -> bool:
        """Whether every pool's number of sequences is known, so that no question waits."""
        return all(order.counted for order in self.orders())

    def count_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Count the sequences of every pool of every source not yet known.

        Args:
            progress: called with (pools counted, pools) after each pool.
        """
        orders = self.orders()
        pools, done = sum(order.pools.count for order in orders), 0
        for order in orders:

            def tell(counted: int, _of: int, done: int = done) -> None:
                if progress:
                    progress(done + counted, pools)

            order.count_all(tell)
            done += order.pools.count
        if not self.has_counts:
            # What a later packing begins with is known now.
            self.count_all(progress)

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one epoch of a plan of one store; counts every pool when that has not been done."""
        return self.order(self._only(), len(self._seq_lens) - 1).sequences

    @cached_property
    def positions(self) -> int:
        """Positions of the run's steps that carry data; the first after the last of them."""
        if self.spec.steps is not None:
            return self.course.position_of(self.spec.steps)
        if isinstance(self.data, Mixture):
            return self.timeline.run_out()
        epochs = self.spec.epochs or 1
        marks = [position for position, _ in self.course.cuts]
        self.timeline.segment_at(max(marks, default=0))
        for segment in self.timeline.segments():
            order, until = self.order(0, segment.era), self.timeline.until(segment)
            if until is not None and order.surely_has(segment.served(until)[0], epochs):
                continue
            quotas = order.quotas(epochs).tolist()
            # The first position of any lane for which nothing is left.
            places = [segment.place(0, lane, end) for lane, end in enumerate(quotas)]
            end = min(segment.position if place is None else place for place in places)
            if until is None or end < until:
                return end
        raise AssertionError("the last segment of one store has no end but that of its epochs")

    def spec_at(self, step: int) -> PlanSpec:
        """The settings that hold at a step: ``global_batch_size`` and ``seq_len`` may have been edited."""
        if not self.edits:
            return self.spec
        at = self.course.stretch_of(step)
        if (at.size, at.seq_len) == (self.spec.global_batch_size, self.spec.seq_len):
            return self.spec
        return replace(self.spec, global_batch_size=at.size, seq_len=at.seq_len)

    def positions_of(self, step: int) -> tuple[int, int]:
        """First and last + 1 of the positions of a step."""
        at = self.course.stretch_of(step)
        first = at.position + (step - at.step) * at.size
        return first, first + at.size

    @property
    def steps(self) -> int:
        """Exact number of steps of the run; of ``steps`` those before its sources are exhausted, where they end it."""
        if self.spec.steps is not None:
            if not self._may_run_out:
                return self.spec.steps
            self.timeline.segment_at(self.course.position_of(self.spec.steps) - 1)
            if self.timeline.end is None:
                return self.spec.steps
            step, inside = self.course.step_at(self.timeline.end)
            return min(self.spec.steps, step + (inside > 0 and self.spec.last == "fill"))
        step, inside = self.course.step_at(self.positions)
        return step + (inside > 0 and self.spec.last == "fill")

    @property
    def _may_run_out(self) -> bool:
        """Whether sources that are exhausted end the run, also before its ``steps``."""
        return isinstance(self.data, Mixture) and self.data.exhausted != "repeat"

    def has_step(self, step: int) -> bool:
        """Whether the run has this step; answers without counting pools far ahead."""
        if step < 0:
            return False
        if self.spec.steps is not None and (step >= self.spec.steps or not self._may_run_out):
            return step < self.spec.steps
        first, stop = self.positions_of(step)
        return self.holds(stop - 1 if self.spec.last == "drop" else first)

    def holds(self, position: int) -> bool:
        """Whether a position of a run without a number of steps carries data."""
        with self._lock:
            segment = self.timeline.segment_at(position)
            if segment is None:
                return False
            if isinstance(self.data, Mixture):
                return True
            order = self.order(0, segment.era)
            if segment.plain:
                return order.find(0, segment.index(position), self.spec.epochs or 1) is not None
            _, lanes, indices = segment.at(np.array([position]))
            return order.find(int(lanes[0]), int(indices[0]), self.spec.epochs or 1) is not None

    def locate(self, position: int) -> Found | None:
        """Where a position of a plan of one store stands; None when the run ends before it."""
        with self._lock:
            position = self.grouped.held(position)
            segment = self.timeline.segment_at(position)
            if segment is None or not self.holds(position):
                return None
            sources, lanes, indices = segment.at(np.array([position]))
            order = self.order(int(sources[0]), segment.era)
            return order.find(int(lanes[0]), int(indices[0]))

    def rows(self, start: int, stop: int, part: tuple[int, int] = WHOLE) -> Rows:
        """The rows of positions ``start`` to ``stop - 1``; rows past the end of the run are empty.

        Args:
            start: the first position.
            stop: the one after the last; both under one ``seq_len``.
            part: (r, R) gives the positions whose lane is r modulo R only, in their order.

        Raises:
            PlanError: a negative or reversed range, or a store that gives no sequence at all.
        """
        if not 0 <= start <= stop:
            raise PlanError(f"Positions {start} to {stop} are no range of this plan.")
        if part != WHOLE and (start % self.spec.lanes or stop % self.spec.lanes):
            raise PlanError(
                f"Positions {start} to {stop} are no whole groups of {self.spec.lanes} lanes."
            )
        with self._lock:
            return self.grouped.rows(start, stop, part)

    def positions_in(self, start: int, stop: int, part: tuple[int, int]) -> NDArray[np.int64]:
        """The positions of a part of ``start`` to ``stop - 1``, in the order of its rows."""
        with self._lock:
            return self._windows.positions(start, stop, part)

    def served_at(self, position: int) -> int:
        """Where the row is served that has a position before rows are grouped by length."""
        with self._lock:
            return self.grouped.served(position)

    def lanes_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """The lane of each of the positions ``start`` to ``stop - 1``, int64 [stop - start]."""
        with self._lock:
            return self._windows.lanes(start, stop)

    def epochs(self, position: int) -> dict[str, float]:
        """Passes through each source with a weight before a position, by pools and the rows of the last (of lane 0)."""
        with self._lock:
            return epochs_at(self, position)

    def state(self, position: int) -> dict[str, Any]:
        """One position as plain JSON values, with what it takes to go on there at once.

        Keys: ``order_version``, ``fingerprint``, ``identity`` (its fields before any edit, so that a
        refusal can name the one that differs), ``edits`` (the journal), ``position``, ``end`` (the positions
        of the run that carry data, where ``position`` lies past them, else None), per source ``epoch``,
        ``slot`` (the pool's place in the epoch's order) and ``before`` (sequences before that pool), or for each
        lane a list of them; after edits and where sources are exhausted ``cuts`` and ``exhausted``; and
        ``check``, the fingerprint of all the others.

        Raises:
            PlanError: a negative position.
        """
        with self._lock:
            return state_at(self, position)

    def resume(self, state: dict[str, Any]) -> int:
        """Check a state against this plan and return the position to go on with.

        That is the state's own, except where its run ended inside its last step and this plan
        runs on: then it is the first of that step, so that nothing of the next epoch is lost.

        Raises:
            StateError: not a state, changed by hand, of another order version, or of another
                plan; names each field that differs.
        """
        with self._lock:
            return resume_at(self, state)


def _may_give_nothing(spec: PlanSpec, store: PlanStore) -> bool:
    return spec.overlong == "drop" or not store.tokens
