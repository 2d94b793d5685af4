"""Runs with random edits, sizes, crashes and resumes serve undisturbed rows."""

import copy
import json

import numpy as np
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from batchloom import Edit, Mixture, Plan, PlanSpec
from batchloom.batches import BatchSpec, RowCosts, make_rank_share, select_rank_rows
from batchloom.plan import SourceSpec, Stage, with_journal
from plan.test_mixture import check_epochs, list_rows, list_spans, make_stores
from tiers import examples

LENGTHS = st.lists(st.integers(1, 40), min_size=6, max_size=40)
WEIGHTS = st.fixed_dictionaries(
    {"a": st.sampled_from([1, 2, 5]), "b": st.sampled_from([0, 1, 3])},
    optional={"c": st.sampled_from([0.5, 1])},
)
STEPS = 60


class Runs(RuleBasedStateMachine):
    """Run with changing processes; ``served`` holds their rows of each step."""

    @initialize(
        lengths=st.tuples(LENGTHS, LENGTHS, LENGTHS),
        weights=WEIGHTS,
        exhausted=st.sampled_from(["repeat", "repeat", "redistribute"]),
        stages=st.lists(st.tuples(st.integers(1, 40), WEIGHTS), max_size=2, unique_by=lambda s: s[0]),
        lanes=st.sampled_from([1, 1, 2, 4]),
        pool_size=st.sampled_from([2, 4, 8]),
        packing=st.sampled_from(["best_fit", "wrap", "none"]),
        shuffle=st.booleans(),
        seed=st.integers(0, 99),
    )
    def begin(self, lengths, weights, exhausted, stages, lanes, pool_size, packing, shuffle, seed):
        self.lengths, self.weights, self.exhausted = lengths, weights, exhausted
        self.stages = [Stage(step=step, weights=of) for step, of in sorted(stages, key=lambda s: s[0])]
        self.spec = PlanSpec(
            seq_len=16,
            global_batch_size=12,
            lanes=lanes,
            pool_size=pool_size,
            packing=packing,
            shuffle=shuffle,
            seed=seed,
            steps=STEPS,
        )
        self.plan = self.make_plan()
        self.step, self.world, self.balance, self.served = 0, 1, False, {}
        self.saved = self.state()

    def make_plan(self, edits=()):
        """Make a plan with its own stores, as in another process."""
        sources = dict.fromkeys("abc", SourceSpec(epochs=3)) if self.exhausted != "repeat" else {}
        mixture = Mixture(
            self.weights,
            stores=make_stores(*self.lengths),
            exhausted=self.exhausted,
            stages=self.stages,
            sources=sources,
        )
        return Plan(mixture, self.spec, edits)

    def state(self):
        return json.loads(json.dumps(self.plan.state(self.plan.positions_of(self.step)[0])))

    @rule(steps=st.integers(1, 9))
    def train(self, steps):
        for step in range(self.step, min(self.step + steps, STEPS)):
            rows_by_position = {}
            for rank in range(self.world):
                batch_spec = BatchSpec(rank=rank, world_size=self.world, uneven="pad", balance=self.balance)
                share = make_rank_share(self.plan.spec_at(step), batch_spec)
                rows, positions = select_rank_rows(self.plan, step, share, RowCosts() if self.balance else None)
                assert len(rows) == len(positions) == share.rows
                rank_rows = zip(positions.tolist(), list_rows(rows), strict=True)
                rows_by_position.update({position: row for position, row in rank_rows if position >= 0})
            assert sorted(rows_by_position) == list(range(*self.plan.positions_of(step)))
            assert self.served.setdefault(step, rows_by_position) == rows_by_position
            self.step = step + 1

    @rule(world=st.sampled_from([1, 2, 3, 4, 5, 6, 12]), balance=st.booleans())
    def resize(self, world, balance):
        self.world, self.balance = world, balance

    @rule(late=st.booleans(), fork=st.booleans(), count=st.sampled_from([False, False, True]))
    def crash(self, late, fork, count):
        """Resume from the state saved last, or from one saved now."""
        edits = self.plan.edits
        if late:
            self.saved = self.state()
        self.plan = with_journal(self.make_plan(), self.saved)
        position = self.plan.resume(self.saved)
        self.step, inside = self.plan.step_at(position)
        assert not inside
        self.plan = copy.copy(self.plan) if fork else self.plan
        if count:
            self.plan.orders.count_all()
        if self.plan.edits != edits:
            # Edits made after the state was saved are lost.
            self.served = {step: rows for step, rows in self.served.items() if step < self.step}

    @precondition(lambda self: len(self.plan.edits) < 5)
    @rule(
        ahead=st.sampled_from([0, 0, 1, 5]),
        change=st.one_of(
            WEIGHTS.map(lambda weights: {"weights": weights}),
            st.sampled_from([8, 12, 24]).map(lambda n: {"seq_len": n}),
            st.sampled_from([12, 16, 20]).map(lambda n: {"seq_len": n}),
            st.sampled_from([4, 8, 12, 24]).map(lambda n: {"global_batch_size": n}),
            st.integers(0, 5).map(lambda n: {"ban": {"a": [n]}}),
            st.integers(1, 3).map(lambda n: {"skip": n}),
        ),
    )
    def edit(self, ahead, change):
        step = max([self.step + ahead, *(edit.step for edit in self.plan.edits)])
        if step < STEPS:
            self.plan = self.plan.edited(Edit(step=step, **change))
            # After a crash, steps served before it may be edited.
            self.served = {served_step: rows for served_step, rows in self.served.items() if served_step < step}

    def teardown(self):
        if not hasattr(self, "plan"):
            return
        undisturbed = self.make_plan(self.plan.edits)
        assert undisturbed.fingerprint == self.plan.fingerprint
        for step, rows in sorted(self.served.items()):
            start, stop = undisturbed.positions_of(step)
            assert rows == dict(enumerate(list_rows(undisturbed.rows(start, stop)), start))
        self.check_positions(undisturbed)

    def check_positions(self, plan):
        """Check shares and epochs of all positions, including skipped ones."""
        end = plan.positions_of(self.step)[0]
        if not end:
            return
        spans = []
        for segment, stop in plan.serve_until(end).segments:
            rows = plan.rows(segment.position, stop)
            spans += list_spans(rows)
            sources = segment.at(np.arange(segment.position, stop))[0]
            served = np.cumsum(sources[:, None] == segment.sources, axis=0)
            counts = np.array(segment.schedule.counts)
            share = np.arange(1, len(sources) + 1)[:, None] * counts / counts.sum()
            # A source has the positions of all lanes in turn.
            assert np.abs(served - share).max() < self.plan.spec.lanes
        check_epochs(plan, spans)


Runs.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
TestRuns = Runs.TestCase
