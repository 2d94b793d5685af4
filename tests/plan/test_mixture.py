"""Mixtures: shares of sources, coverage of documents, edits and stages."""

import copy
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanError, PlanSpec, SettingsError, StateError
from batchloom.plan import (
    Permutation,
    Schedule,
    SourceSpec,
    Stage,
    find_document_positions,
    with_journal,
)
from batchloom.plan.order import RowPart
from plan.length_stores import LengthStore
from tiers import examples

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)
WEIGHT = st.sampled_from([1, 2, 3, 0.5, 7])
NAMES = ("a", "b", "c")


def make_stores(*lengths):
    return {name: LengthStore(store_lengths, name) for name, store_lengths in zip(NAMES, lengths, strict=False)}


def list_spans(rows):
    return list(
        zip(
            rows.sources.tolist(),
            rows.documents.tolist(),
            rows.starts.tolist(),
            rows.lengths.tolist(),
            strict=True,
        )
    )


def list_rows(rows):
    spans = list_spans(rows)
    return [tuple(spans[a:b]) for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]


@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=20), data=st.data())
@settings(max_examples=examples(150))
def test_every_prefix_of_a_schedule_is_within_one_of_its_share(counts, data):
    schedule = Schedule(tuple(counts))
    length = 3 * schedule.period + 5
    sources, numbers = schedule.at(np.arange(length))
    served = np.zeros((length + 1, len(counts)))
    served[1:] = np.cumsum(sources[:, None] == np.arange(len(counts)), axis=0)
    share = np.arange(length + 1)[:, None] * np.array(counts) / sum(counts)
    assert np.abs(served - share).max() < 1
    turn = data.draw(st.integers(0, length - 1))
    source = int(sources[turn])
    assert numbers[turn] == served[turn, source]
    assert schedule.find(source, int(numbers[turn])) == turn
    assert schedule.count(turn).tolist() == served[turn].tolist()


def test_a_source_has_a_position_of_each_lane_in_turn():
    stores = make_stores([16] * 400, [16] * 400)
    spec = PlanSpec(seq_len=16, global_batch_size=8, steps=40, lanes=4)
    plan = Plan(Mixture({"a": 3, "b": 2}, stores=stores), spec)
    rows = plan.rows(0, plan.positions)
    turns = rows.sources.reshape(-1, 4)
    assert (turns == turns[:, :1]).all()
    shares = np.cumsum(turns[:, 0] == 0) - 0.6 * np.arange(1, len(turns) + 1)
    assert np.abs(shares).max() < 1


@st.composite
def mixtures(draw, lanes=(1,), **settings):
    lengths = [draw(LENGTHS) for _ in range(draw(st.integers(2, 3)))]
    stores = make_stores(*lengths)
    weights = {name: draw(WEIGHT) for name in stores}
    spec = PlanSpec(
        seq_len=draw(st.sampled_from([8, 16])),
        global_batch_size=4,
        seed=draw(st.integers(0, 99)),
        pool_size=draw(st.sampled_from([2, 4, 8])),
        packing=draw(st.sampled_from(["best_fit", "wrap", "none"])),
        shuffle=draw(st.booleans()),
        steps=draw(st.integers(20, 60)),
        lanes=draw(st.sampled_from(lanes)),
    )
    return Mixture(weights, stores=stores, **settings), spec


def check_epochs(plan, spans, complete=True):
    """Check that the spans of each source are consecutive complete epochs."""
    for number, name in enumerate(plan.names):
        lengths = plan.stores[name].lengths.take(np.arange(plan.stores[name].lengths.size))
        counts = [np.zeros(n, int) for n in lengths]
        for source, document, start, length in spans:
            if source == number:
                counts[document][start : start + length] += 1
        token_counts = np.concatenate(counts)
        if complete:
            assert token_counts.max() - token_counts.min() <= 1


@given(mixture_and_spec=mixtures(lanes=(1, 2, 4)))
@settings(max_examples=examples(100), deadline=None)
def test_no_source_repeats_before_its_epoch_ends(mixture_and_spec):
    mixture, spec = mixture_and_spec
    plan = Plan(mixture, spec)
    check_epochs(plan, list_spans(plan.rows(0, plan.positions)))


@given(mixture_and_spec=mixtures(lanes=(1, 2, 4)), data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_position_is_the_same_however_it_is_reached(mixture_and_spec, data):
    mixture, spec = mixture_and_spec
    plan = Plan(mixture, spec)
    rows = list_rows(plan.rows(0, plan.positions))
    step = data.draw(st.integers(0, spec.steps - 1))
    start, stop = plan.positions_of(step)
    counted, resumed = Plan(mixture, spec), Plan(mixture, spec)
    counted.orders.count_all()
    state = json.loads(json.dumps(plan.state(start)))
    assert resumed.resume(state) == start
    for other_plan in (Plan(mixture, spec), counted, resumed, copy.copy(plan)):
        assert list_rows(other_plan.rows(start, stop)) == rows[start:stop]
        assert list_rows(other_plan.rows(start, stop + 4))[: stop - start] == rows[start:stop]
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    rank_rows = [list_rows(plan.rows(start, stop, RowPart(rank, ranks))) for rank in range(ranks)]
    assert {len(rank_share) for rank_share in rank_rows} == {4 // ranks}
    assert sorted(row for rank_share in rank_rows for row in rank_share) == sorted(rows[start:stop])


@given(lengths=LENGTHS, lanes=st.sampled_from([2, 4, 8]), seed=st.integers(0, 50), data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_lanes_together_hold_every_token_once_per_epoch(lengths, lanes, seed, data):
    spec = PlanSpec(seq_len=16, global_batch_size=8, seed=seed, pool_size=4, epochs=2, lanes=lanes)
    plan = Plan(LengthStore(lengths), spec)
    rows = plan.rows(0, plan.positions)
    counts = [np.zeros(n, int) for n in lengths]
    for _, document, start, length in list_spans(rows):
        counts[document][start : start + length] += 1
    assert (np.concatenate(counts) == 2).all()
    assert plan.positions == 2 * plan.orders.sequences_per_epoch
    step = data.draw(st.integers(0, plan.steps - 1))
    fresh_plan = Plan(LengthStore(lengths), spec)
    start, stop = fresh_plan.positions_of(step)
    assert list_rows(fresh_plan.rows(start, stop)) == list_rows(plan.rows(start, stop))
    assert not plan.has_step(plan.steps)


def test_a_lane_is_served_from_its_own_pools():
    """All except the last sequences of an epoch come from pools of their own lane."""
    plan = Plan(
        LengthStore([7] * 4000),
        PlanSpec(seq_len=16, global_batch_size=8, pool_size=50, lanes=8, epochs=1),
    )
    pool_of = np.zeros(4000, int)
    for pool in range(plan.orders.pools.count):
        pool_of[plan.orders.pools.members(pool)] = pool
    rows = plan.rows(0, plan.positions)
    lanes = np.repeat(np.arange(len(rows)) % 8, np.diff(rows.pointers))
    assert (pool_of[rows.documents] % 8 == lanes).mean() > 0.95


EDITS = st.lists(
    st.one_of(
        st.builds(lambda n, w: ("weights", {"a": n, "b": w}), st.integers(1, 5), st.integers(0, 5)),
        st.builds(lambda n: ("seq_len", n), st.sampled_from([8, 16, 24])),
        st.builds(lambda n: ("global_batch_size", n), st.sampled_from([2, 4, 12])),
        st.builds(lambda n: ("ban", {"a": [n]}), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=4,
)


@given(
    a=st.lists(st.integers(1, 40), min_size=4, max_size=40),
    b=LENGTHS,
    c=LENGTHS,
    edits=EDITS,
    seed=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=examples(150), deadline=None)
def test_edits_lose_and_repeat_nothing(a, b, c, edits, seed, data):
    mixture = Mixture({"a": 2, "b": 1}, stores=make_stores(a, b, c))
    spec = PlanSpec(seq_len=16, global_batch_size=4, steps=40, pool_size=4, seed=seed)
    unedited = Plan(mixture, spec)
    steps = sorted(data.draw(st.integers(0, 39)) for _ in edits)
    plan, previous_plan = unedited, unedited
    for step, (name, value) in zip(steps, edits, strict=True):
        previous_plan, plan = plan, plan.edited(Edit(step=step, **{name: value}))
        assert plan.fingerprint != previous_plan.fingerprint
        for earlier in range(step):
            positions = plan.positions_of(earlier)
            assert positions == previous_plan.positions_of(earlier)
            assert list_rows(plan.rows(*positions)) == list_rows(previous_plan.rows(*positions))
    served_steps, spans = [], []
    for step in range(40):
        rows = plan.rows(*plan.positions_of(step))
        served_steps.append(list_rows(rows))
        spans += list_spans(rows)
        assert len(rows) == plan.spec_at(step).global_batch_size
        assert max((sum(s[3] for s in row) for row in list_rows(rows)), default=0) <= plan.spec_at(step).seq_len
    # No token repeats before the epoch of its source ends, although documents are repacked.
    check_epochs(plan, spans)
    step = data.draw(st.integers(0, 39))
    start = plan.positions_of(step)[0]
    state = json.loads(json.dumps(plan.state(start)))
    resumed = with_journal(Plan(mixture, spec), state)
    assert resumed.fingerprint == plan.fingerprint
    assert resumed.resume(state) == start
    assert list_rows(resumed.rows(*resumed.positions_of(step))) == served_steps[step]


@pytest.mark.parametrize("seed", range(3))
def test_spans_with_a_served_gap_between_them_are_not_joined(seed):
    """Spans of a long document are served in any order when seq_len changes."""
    spec = PlanSpec(seq_len=16, global_batch_size=2, steps=60, pool_size=8, seed=seed)
    plan = Plan(LengthStore([100] * 8), spec).edited(Edit(step=10, seq_len=24))
    spans = [span for step in range(60) for span in list_spans(plan.rows(*plan.positions_of(step)))]
    check_epochs(plan, spans)


def test_untouched_sources_continue_at_their_position():
    mixture = Mixture({"a": 1, "b": 1}, stores=make_stores([5] * 90, [3] * 90, [4] * 90))
    spec = PlanSpec(seq_len=16, global_batch_size=4, steps=30, pool_size=8)
    plan = Plan(mixture, spec)
    edited = plan.edited(Edit(step=10, weights={"b": 1, "c": 3}, note="code is done"))

    def rows_of_source(source_plan, source):
        return [row for row in list_rows(source_plan.rows(0, 120)) if row[0][0] == source]

    rows_before, rows_after = rows_of_source(plan, 1), rows_of_source(edited, 1)
    assert rows_after == rows_before[: len(rows_after)]
    retired_rows = rows_of_source(edited, 0)
    assert retired_rows == [row for row in list_rows(plan.rows(0, 40)) if row[0][0] == 0]
    restored = edited.edited(Edit(step=20, weights={"a": 1}))
    longer_plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=4, steps=60, pool_size=8))
    assert (
        rows_of_source(restored, 0)
        == [r for r in list_rows(longer_plan.rows(0, 240)) if r[0][0] == 0][: len(retired_rows) + 40]
    )


def test_steps_can_be_skipped():
    plan = Plan(LengthStore([4] * 100), PlanSpec(seq_len=4, global_batch_size=2, epochs=1))
    edited = plan.edited(Edit(step=10, skip=5, note="the loss spiked"))
    assert edited.steps == plan.steps - 5
    for step in range(10, edited.steps):
        assert list_rows(edited.rows(*edited.positions_of(step))) == list_rows(plan.rows(*plan.positions_of(step + 5)))
    assert edited.step_at(edited.positions_of(12)[0]) == (12, 0)


def test_a_banned_document_is_marked_and_others_stay():
    plan = Plan(LengthStore([4] * 40), PlanSpec(seq_len=8, global_batch_size=2, epochs=2))
    unbanned_rows = plan.rows(0, plan.positions)
    # Documents of the last sequence before the ban and of the first one after it.
    banned = plan.rows(9, 11).documents.tolist()
    edited = plan.edited(Edit(step=5, ban={"data": banned}))
    rows = edited.rows(0, plan.positions)
    assert list_spans(rows) == list_spans(unbanned_rows)
    is_late = np.repeat(np.arange(len(rows)), np.diff(rows.pointers)) >= 10
    assert (rows.banned == (is_late & np.isin(rows.documents, banned))).all()
    assert rows.banned[rows.pointers[10] : rows.pointers[11]].all()


def test_stages_change_the_weights_by_steps_or_tokens():
    def compute_shares(plan, first, last):
        rows = plan.rows(plan.positions_of(first)[0], plan.positions_of(last)[0])
        sources = rows.sources[rows.pointers[:-1]]
        return np.bincount(sources, minlength=2) / len(rows)

    stores = make_stores([16] * 200, [16] * 200)
    spec = PlanSpec(seq_len=16, global_batch_size=8, steps=60)
    for stages in (
        [Stage(weights={"a": 1, "b": 3}, step=20), Stage(weights={"b": 1}, step=40)],
        [
            Stage(weights={"a": 1, "b": 3}, tokens=20 * 8 * 16 - 3),
            Stage(weights={"b": 1}, tokens=40 * 8 * 16),
        ],
    ):
        plan = Plan(Mixture({"a": 3, "b": 1}, stores=stores, stages=stages), spec)
        assert compute_shares(plan, 0, 20).tolist() == [0.75, 0.25]
        assert compute_shares(plan, 20, 40).tolist() == [0.25, 0.75]
        assert compute_shares(plan, 40, 60).tolist() == [0, 1]
        edited = plan.edited(Edit(step=30, weights={"a": 1}))
        assert compute_shares(edited, 30, 60).tolist() == [1, 0]


@pytest.mark.parametrize("exhausted", ["stop", "redistribute"])
@given(a=LENGTHS, b=LENGTHS, epochs=st.integers(1, 2), seed=st.integers(0, 9))
@settings(max_examples=examples(60), deadline=None)
def test_exhausted_sources(exhausted, a, b, epochs, seed):
    mixture = Mixture(
        {"a": 1, "b": 2},
        stores=make_stores(a, b),
        exhausted=exhausted,
        sources={"a": SourceSpec(epochs=epochs)},
    )
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=4, seed=seed)
    plan = Plan(mixture, spec)
    counts = [plan.orders.order(0).counts.sequences * epochs, plan.orders.order(1).counts.sequences]
    rows = plan.rows(0, plan.positions + 8)
    sources = rows.sources[rows.pointers[:-1][np.diff(rows.pointers) > 0]]
    served = np.bincount(sources, minlength=2).tolist()
    assert len(sources) == plan.positions
    if exhausted == "redistribute":
        assert served == counts
        assert plan.positions == sum(counts)
    else:
        assert (served[0] == counts[0]) or (served[1] == counts[1])
        assert served[0] <= counts[0]
        assert served[1] <= counts[1]
    assert plan.has_step(plan.steps - 1)
    assert not plan.has_step(plan.steps)
    resumed = Plan(mixture, spec)
    middle = plan.positions_of(plan.steps // 2)[0]
    assert resumed.resume(json.loads(json.dumps(plan.state(middle)))) == middle
    assert list_rows(resumed.rows(middle, middle + 9)) == list_rows(plan.rows(middle, middle + 9))


def test_weights_count_tokens_documents_or_epochs():
    stores = make_stores([16] * 300, [4] * 300)
    spec = PlanSpec(seq_len=16, global_batch_size=8, steps=60)

    def count_served(unit):
        plan = Plan(Mixture({"a": 1, "b": 1}, stores=stores, unit=unit), spec)
        rows = plan.rows(0, plan.positions)
        documents = np.bincount(rows.sources, minlength=2)
        tokens = np.bincount(rows.sources, rows.lengths, minlength=2)
        return documents, tokens

    assert count_served("tokens")[1].tolist() == [3840, 3840]
    documents = count_served("documents")[0]
    assert abs(documents[0] - documents[1]) <= 4
    documents, _ = count_served("epochs")
    assert abs(documents[0] - documents[1]) <= 4


def test_groups_sizes_temperature_and_caps():
    stores = make_stores([16] * 800, [16] * 100, [16] * 100)
    spec = PlanSpec(seq_len=16, global_batch_size=8, steps=100)

    def compute_shares(weights, **settings):
        plan = Plan(Mixture(weights, stores=stores, **settings), spec)
        rows = plan.rows(0, plan.positions)
        return (np.bincount(rows.sources, minlength=3) / len(rows.sources)).round(3).tolist()

    group = {"weight": 1, "sources": {"b": 3, "c": 1}}
    assert compute_shares({"a": 1, "code": group}) == [0.5, 0.375, 0.125]
    assert compute_shares({"a": 1, "code": {**group, "weight": 3}}) == pytest.approx([0.25, 0.5625, 0.1875], abs=0.002)
    assert compute_shares({"b": 1, "rest": {"weight": 1, "sources": ["a", "c"]}}) == pytest.approx(
        [0.444, 0.5, 0.056], abs=0.002
    )
    assert compute_shares("size") == [0.8, 0.1, 0.1]
    root = np.sqrt([8, 1, 1])
    assert compute_shares("size", temperature=2) == pytest.approx(root / root.sum(), abs=0.002)
    # 800 sequences in all: two epochs of each small source are 200 each.
    assert compute_shares("size", most_epochs=2) == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("weights", "settings", "sentence"),
    [
        ({"a": -1, "b": 1}, {}, "weights.a: -1 is neither 0 nor a number from 1e-100"),
        ({"a": float("nan")}, {}, "weights.a: nan is neither"),
        ({"a": True}, {}, "weights.a: True is neither"),
        ({"a": 1e308, "b": 1e308}, {}, r"weights.a: 1e\+308 is neither"),
        ({"a": 10**400}, {}, "weights.a: .* is neither"),
        ({"a": 5e-324, "b": 1}, {}, "weights.a: 5e-324 is neither"),
        ({"g": {"weight": 1, "sources": {"a": 1e308, "b": 1}}}, {}, "weights.g.sources.a: 1e"),
        ("size", {"temperature": None}, "temperature: None is not a number"),
        ("size", {"sources": {"a": {"epochs": 2}}}, "sources.a: .* is not a SourceSpec"),
        ("size", {"sources": None}, "sources: None is not a mapping"),
        ("size", {"stages": [{"step": 3}]}, r"stages\[0\]: .* is not a Stage"),
        ("size", {"stages": 3}, "stages: 3 is not a list"),
        ({"a": 1}, {"most_epochs": 2}, "most_epochs: applies only to weights by size"),
        ({"a": 1}, {"sources": {"a": SourceSpec(epochs=1)}}, "sources.a.epochs: not allowed with exhausted"),
        ({"a": 0, "b": 0}, {}, "weights: all weights are 0"),
        ({"aa": 1}, {}, "weights.aa: unknown source; the sources are a, b; did you mean 'a'"),
        ({}, {}, "is neither a mapping"),
        ({"g": {"weight": 1}}, {}, "weights.g.sources: missing"),
        ({"g": {"weight": 1, "sources": {"a": 0}}}, {}, "weights.g.sources: all weights are 0"),
        ({"a": 1, "g": {"weight": 1, "sources": ["a"]}}, {}, "already has a weight"),
        ({"a": 1}, {"unit": "token"}, "unit: 'token' is none of .*did you mean 'tokens'"),
        ({"a": 1}, {"exhausted": "end"}, "exhausted: 'end' is none"),
        ("size", {"temperature": 0}, "temperature: 0 is not a number from"),
        ({"a": 1}, {"temperature": 2}, "temperature: applies only to weights by size"),
        ({"a": 1}, {"sources": {"z": SourceSpec()}}, "sources.z: unknown source"),
        (
            {"a": 1},
            {"stages": [Stage(weights={"b": 1}, step=5), Stage(weights={"a": 1}, step=5)]},
            "not in ascending order",
        ),
        (
            {"a": 1},
            {"stages": [Stage(weights={"b": 1}, step=5), Stage(weights={"a": 1}, tokens=5)]},
            "use one of the two",
        ),
    ],
)
def test_invalid_mixtures(weights, settings, sentence):
    with pytest.raises(SettingsError, match=sentence):
        Mixture(weights, stores=make_stores([4], [4]), **settings)


def test_a_path_is_no_store():
    with pytest.raises(SettingsError, match=r"stores.a: 'x/y' is a path; open it: open_store\('x/y'\)"):
        Mixture({"a": 1}, stores={"a": "x/y"})


def test_mixtures_that_repeat_need_a_number_of_steps():
    mixture = Mixture({"a": 1}, stores=make_stores([4]))
    with pytest.raises(SettingsError, match="steps: missing"):
        Plan(mixture, PlanSpec(seq_len=4, global_batch_size=1))
    with pytest.raises(SettingsError, match="only epochs per source"):
        Plan(mixture, PlanSpec(seq_len=4, global_batch_size=1, epochs=2))


def compute_period(weights):
    """Return how often each source is served in one period of the schedule."""
    stores = {name: LengthStore([16] * 40, name) for name in weights}
    spec = PlanSpec(seq_len=16, global_batch_size=64, steps=10)
    plan = Plan(Mixture(weights, stores=stores), spec)
    segment, _ = plan.serve_until(1).segments[0]
    names = [plan.names[number] for number in segment.sources]
    return dict(zip(names, segment.schedule.counts, strict=True))


def test_a_share_no_period_meets_is_refused_by_name():
    with pytest.raises(PlanError, match=r"Source 'b' has 1e-06 .*at least 4.8e-05"):
        compute_period({"a": 1 - 1e-6, "b": 1e-6})
    counts = compute_period({"a": 0.999, "b": 0.001})
    assert counts["b"] / sum(counts.values()) == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("later_stages", [{"stages": [Stage(step=5, weights={"a": 1, "b": 1e-7})]}, {}])
def test_weights_that_cannot_be_met_later_are_refused_first(later_stages):
    spec = PlanSpec(seq_len=16, global_batch_size=2, steps=10)
    edits = [] if later_stages else [Edit(step=5, weights={"a": 1, "b": 1e-7})]
    with pytest.raises(PlanError, match="Source 'b' has .*No period of at most"):
        Plan(Mixture({"a": 1}, stores=make_stores([5] * 30, [6] * 30), **later_stages), spec, edits)


@pytest.mark.parametrize(
    ("overlong", "sentence"),
    [("drop", "Source 'a' gives no sequence"), ("error", "Document 0 of source 'a' has 30 tokens")],
)
def test_an_edit_to_an_impossible_seq_len_is_refused(overlong, sentence):
    stores = make_stores([30] * 40, [5] * 40)
    spec = PlanSpec(seq_len=32, global_batch_size=2, steps=10, overlong=overlong)
    plan = Plan(Mixture({"a": 1, "b": 1}, stores=stores), spec)
    with pytest.raises(PlanError, match=sentence):
        plan.edited(Edit(step=3, seq_len=16))
    # Without that source, the edit is valid.
    plan = plan.edited(Edit(step=3, seq_len=16, weights={"b": 1}))
    plan.orders.count_all()
    assert all(row[0][0] == 1 for row in list_rows(plan.rows(*plan.positions_of(3))))
    single_plan = Plan(stores["a"], spec)
    with pytest.raises(PlanError, match=sentence.replace("'a'", "'data'")):
        single_plan.edited(Edit(step=3, seq_len=16))


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_source_without_weight_is_not_read(lanes):
    stores = make_stores([5] * 90, [20] * 90)
    spec = PlanSpec(seq_len=16, global_batch_size=4, steps=12, overlong="drop", lanes=lanes)
    edits = [Edit(step=4, seq_len=32), Edit(step=8, weights={"a": 1, "b": 1})]

    def make_plan():
        return Plan(Mixture({"a": 1}, stores=stores), spec, edits)

    steps = [list_rows(make_plan().rows(*make_plan().positions_of(step))) for step in range(12)]
    assert {row[0][0] for step in steps[8:] for row in step} == {0, 1}
    for counted in (False, True):
        plan = make_plan()
        if counted:
            plan.orders.count_all()
        for step in range(12):
            state = json.loads(json.dumps(plan.state(plan.positions_of(step)[0])))
            resumed = with_journal(Plan(Mixture({"a": 1}, stores=stores), spec), state)
            resumed.resume(state)
            assert list_rows(resumed.rows(*resumed.positions_of(11))) == steps[11]
            assert list_rows(plan.rows(*plan.positions_of(step))) == steps[step]


def test_an_epoch_limit_that_cannot_be_met_is_refused():
    spec = PlanSpec(seq_len=16, global_batch_size=8, steps=100)
    stores = make_stores([16] * 200, [16] * 200)
    with pytest.raises(PlanError, match=r"most_epochs 1 allows 6,400 tokens of a, b.*least 2\."):
        Plan(Mixture("size", stores=stores, most_epochs=1), spec)
    # Dropped overlong documents are served in no epoch.
    stores = make_stores([16] * 600 + [99] * 600, [16] * 400)
    spec = PlanSpec(seq_len=16, global_batch_size=8, steps=100, overlong="drop")
    plan = Plan(Mixture("size", stores=stores, most_epochs=1), spec)
    rows = plan.rows(0, plan.positions)
    assert np.bincount(rows.sources).tolist() == pytest.approx([400, 400], abs=1)
    mixture = Mixture("size", stores=make_stores([16] * 600, [16] * 400), most_epochs=1)
    plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=8, steps=100))
    with pytest.raises(SettingsError, match="by size are limited by most_epochs"):
        plan.edited(Edit(step=5, global_batch_size=64))
    plan.edited(Edit(step=5, global_batch_size=64, weights={"a": 1}))
    # For a group, the limit applies to the share of the group.
    stores = make_stores([16] * 900, [16] * 300, [16] * 100)
    weights = {"a": 1, "rest": {"weight": 1, "sources": ["b", "c"]}}
    plan = Plan(Mixture(weights, stores=stores, most_epochs=1), spec)
    rows = plan.rows(0, plan.positions)
    assert np.bincount(rows.sources).tolist() == pytest.approx([400, 300, 100], abs=1)


def test_a_source_smaller_than_one_sequence_is_repeated():
    plan = Plan(
        Mixture({"a": 1, "b": 1}, stores=make_stores([3], [16] * 50)),
        PlanSpec(seq_len=16, global_batch_size=2, steps=10),
    )
    rows = list_rows(plan.rows(0, 20))
    # A row of three tokens counts as three tokens.
    assert sum(row[0][0] == 0 for row in rows) == pytest.approx(20 * 16 / 19, abs=1)
    assert {row for row in rows if row[0][0] == 0} == {((0, 0, 0, 3),)}


def test_states_of_other_mixtures_name_what_differs():
    spec = PlanSpec(seq_len=16, global_batch_size=2, steps=10)
    stores = make_stores([5] * 30, [6] * 30)
    plan = Plan(Mixture({"a": 1, "b": 1}, stores=stores), spec)
    other_plan = Plan(Mixture({"a": 2, "b": 1}, stores=stores), spec)
    with pytest.raises(StateError, match=r"mixture.weights.a was 1.0 and is 2.0.*by an edit \(loader.edit\)"):
        other_plan.resume(plan.state(4))
    edited = plan.edited(Edit(step=3, weights={"a": 1}))
    state = json.loads(json.dumps(edited.state(8)))
    state["edits"][0]["weights"]["a"] = 5
    with pytest.raises(StateError, match="Edit 0 of the journal, at step 3, was changed"):
        with_journal(plan, state).resume(state)
    state["edits"] = None
    with pytest.raises(StateError, match="not a loader's state.*edits is None"):
        with_journal(plan, state).resume(state)
    grown_plan = Plan(Mixture({"a": 1, "b": 1}, stores=make_stores([5] * 30, [6] * 30, [4] * 9)), spec)
    edited_plan = grown_plan.edited(Edit(step=3, weights={"a": 1, "c": 1}))
    with pytest.raises(StateError, match="journal adds source 'c' at step 3: add its store"):
        with_journal(plan, edited_plan.state(8))


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ({"step": 3}, "changes nothing"),
        ({"step": -1, "skip": 1}, "step: -1 is not"),
        ({"step": 3, "weights": {"a": -1}}, "weights.a: -1 is neither"),
        ({"step": 3, "weights": {"x": 1}}, "weights.x: unknown source"),
        ({"step": 3, "weights": {"a": 1, "b": 1e-7}}, "Source 'b' has .*No period"),
        ({"step": 3, "ban": {"a": 99}}, "document 99 does not exist"),
        ({"step": 3, "ban": {"a": None}}, "ban.a: None is no"),
        ({"step": 3, "ban": {"a": [99]}}, "document 99 does not exist"),
        ({"step": 3, "ban": {"x": [1]}}, "ban.x: unknown source; the sources are a"),
        ({"step": 3, "ban": [17]}, r"'data': \[\.\.\.\]}$"),
        ({"step": 3, "ban": {"a": ["b"]}}, "'b' is not a document number"),
        ({"step": 3, "seq_len": 0}, "seq_len: 0 is not"),
        ({"step": 1, "skip": 1}, "precedes the edit at step 2"),
    ],
)
def test_invalid_edits(edit, sentence):
    plan = Plan(
        Mixture({"a": 1, "b": 1}, stores=make_stores([5] * 30, [6] * 30)),
        PlanSpec(seq_len=16, global_batch_size=2, steps=10),
    ).edited(Edit(step=2, skip=1))
    with pytest.raises((SettingsError, PlanError), match=sentence):
        plan.edited(Edit(**edit))


def test_skips_beyond_the_maximum_of_sequences_are_refused():
    plan = Plan(LengthStore([5] * 30), PlanSpec(seq_len=16, global_batch_size=8, steps=20))
    huge = Edit(step=3, skip=(1 << 48) - 1, global_batch_size=(1 << 14) + 1)
    plan = plan.edited(huge)
    assert len(plan.rows(*plan.positions_of(3))) == (1 << 14) + 1
    with pytest.raises(PlanError, match="a run has at most"):
        plan.edited(huge)


@given(mixture_and_spec=mixtures(lanes=(1, 2, 4)), edits=EDITS, data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_document_positions_are_the_inverse_of_steps(mixture_and_spec, edits, data):
    mixture, spec = mixture_and_spec
    plan = Plan(mixture, spec)
    step = 0
    for name, value in edits:
        step = data.draw(st.integers(step, spec.steps - 1))
        if name in ("weights", "seq_len"):
            plan = plan.edited(Edit(step=step, skip=data.draw(st.integers(0, 2)), **{name: value}))
    number = data.draw(st.integers(0, len(plan.names) - 1))
    document = data.draw(st.integers(0, plan.stores[plan.names[number]].lengths.size - 1))
    last = data.draw(st.integers(0, spec.steps - 1))
    expected = set()
    for step in range(last + 1):
        rows = list_rows(plan.rows(*plan.positions_of(step)))
        expected |= {
            (step, row_number)
            for row_number, row in enumerate(rows)
            if any(span[:2] == (number, document) for span in row)
        }
    positions = find_document_positions(Plan(mixture, spec, plan.edits), number, document, last)
    assert {(position.step, position.row) for position in positions} == expected
    assert len(positions) == len(expected)


@given(
    lengths=LENGTHS,
    lanes=st.sampled_from([1, 2, 8]),
    block=st.sampled_from([0, 2]),
    shuffle=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(80), deadline=None)
def test_document_positions_in_one_store(lengths, lanes, block, shuffle, data):
    spec = PlanSpec(
        seq_len=16,
        global_batch_size=8,
        pool_size=4,
        epochs=3,
        lanes=lanes,
        block=block,
        shuffle=shuffle,
    )
    plan = Plan(LengthStore(lengths), spec)
    document = data.draw(st.integers(0, len(lengths) - 1))
    rows = list_rows(plan.rows(0, plan.positions))
    expected = [p for p, row in enumerate(rows) if any(span[1] == document for span in row)]
    positions = find_document_positions(plan, 0, document, plan.steps)
    assert [position.position for position in positions] == expected
    assert {position.epoch for position in positions} == {0, 1, 2}


@pytest.mark.parametrize("size", [10, 65_537, 1_000_003])
def test_a_permutation_has_an_inverse(size):
    permutation = Permutation(size, (3, 4))
    positions = np.unique(np.linspace(0, size - 1, 5000).astype(np.int64))
    assert (permutation.find_positions(permutation.at(positions)) == positions).all()


@pytest.mark.slow
@pytest.mark.parametrize(("sources", "lanes"), [(200, 16), (1000, 1)])
def test_a_thousand_sources_hold_their_shares(sources, lanes):
    rng = np.random.default_rng(sources + lanes)
    weights = rng.pareto(1.5, sources) + 1
    stores = {f"s{n}": LengthStore([16] * 40, f"s{n}") for n in range(sources)}
    names = list(stores)
    spec = PlanSpec(seq_len=16, global_batch_size=512, steps=400, lanes=lanes)
    plan = Plan(Mixture(dict(zip(names, weights.tolist(), strict=True)), stores=stores), spec)
    segment, _ = plan.serve_until(1).segments[0]
    slots = np.array(segment.schedule.counts)
    expected = weights[[names.index(plan.names[n]) for n in segment.sources]] / weights.sum()
    assert np.abs(slots / slots.sum() / expected - 1).max() <= 0.0101
    sequence_sources = segment.schedule.at(np.arange(100_000))[0]
    positions = np.argsort(sequence_sources, kind="stable")
    source_counts = np.bincount(sequence_sources, minlength=sources)
    number = np.arange(sequence_sources.size) - np.repeat(np.cumsum(source_counts) - source_counts, source_counts)
    # A source has served j sequences before its j-th (from 0) and j + 1 after it: both are within one of its share.
    share = slots[sequence_sources[positions]] / slots.sum()
    assert np.abs(number - positions * share).max() < 1
    assert np.abs(number + 1 - (positions + 1) * share).max() < 1
    step = int(rng.integers(0, 400))
    rows = plan.rows(*plan.positions_of(step))
    served_sources = rows.sources[rows.pointers[:-1]]
    assert served_sources.tolist() == segment.at(np.arange(*plan.positions_of(step)))[0].tolist()
    state = plan.state(plan.positions_of(step)[0])
    resumed = Plan(plan.data, spec)
    assert resumed.resume(state) == plan.positions_of(step)[0]
    assert list_rows(resumed.rows(*plan.positions_of(step))) == list_rows(rows)


@pytest.mark.parametrize("exhausted", ["stop", "redistribute"])
def test_a_source_that_ends_may_be_repacked_before(exhausted):
    mixture = Mixture({"a": 1, "b": 2}, stores=make_stores([9] * 60, [7] * 50), exhausted=exhausted)
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=8)
    plan = Plan(mixture, spec, [Edit(step=2, seq_len=32)])
    spans = [span for step in range(plan.steps) for span in list_spans(plan.rows(*plan.positions_of(step)))]
    span_counts = Counter(source for source, *_ in spans)
    assert span_counts[1] >= 50
    assert max(Counter(spans).values()) == 1
    assert (span_counts[0] >= 60) == (exhausted == "redistribute")


def test_steps_end_with_the_sources_that_end_a_run():
    for exhausted in ("stop", "redistribute"):
        data = Mixture({"a": 1, "b": 1}, stores=make_stores([10] * 20, [10] * 60), exhausted=exhausted)
        unlimited = Plan(data, PlanSpec(seq_len=20, global_batch_size=4))
        limited = Plan(data, PlanSpec(seq_len=20, global_batch_size=4, steps=1000))
        assert limited.steps == unlimited.steps < 1000
        assert limited.has_step(unlimited.steps - 1)
        assert not limited.has_step(unlimited.steps)
        short = Plan(data, PlanSpec(seq_len=20, global_batch_size=4, steps=2))
        assert (short.steps, short.has_step(1), short.has_step(2)) == (2, True, False)


def test_a_journal_that_was_edited_by_hand_is_refused_with_its_edit():
    data = Mixture({"a": 1, "b": 1}, stores=make_stores([10] * 20, [10] * 60))
    plan = Plan(data, PlanSpec(seq_len=20, global_batch_size=4, steps=50))
    state = plan.edited(Edit(step=5, weights={"a": 1})).edited(Edit(step=9, skip=2)).state(0)
    assert with_journal(plan, state).journal == state["edits"]
    changed = json.loads(json.dumps(state))
    changed["edits"][1]["skip"] = 3
    with pytest.raises(StateError, match=r"Edit 1 of the journal, at step 9, was changed .* skip"):
        with_journal(plan, changed)
