"""Rows grouped by length: every window holds what it would have held, in steps of about one length."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanError, PlanSpec, SettingsError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan import LanePlan, SourceSpec, Stage
from batchloom.plan.order.length_groups import order_by_length
from plan.sources import LengthsOnly
from tiers import examples

LENGTHS = st.lists(st.integers(0, 40), min_size=3, max_size=80).filter(any)


def spec_of(window, **changes):
    given = {"seq_len": 32, "global_batch_size": 4, "packing": "none", "pool_size": 8}
    return PlanSpec(**{**given, "group_by_length": window, **changes})


def spans(rows):
    """Of each row its one span, and None of an empty one."""
    held = list(
        zip(
            rows.sources.tolist(),
            rows.documents.tolist(),
            rows.starts.tolist(),
            rows.lengths.tolist(),
            strict=True,
        )
    )
    return [held[a] if a < b else None for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]


def steps_of(plan):
    return [spans(plan.rows(*plan.positions_of(step))) for step in range(plan.steps)]


def padded_share(lengths, size):
    """The share of places without a token where each ``size`` rows are padded to the longest of them."""
    batches = [lengths[at : at + size] for at in range(0, len(lengths) - size + 1, size)]
    places = sum(max(batch) * size for batch in batches)
    return 1 - sum(map(sum, batches)) / places


@st.composite
def runs(draw):
    """The data and the settings of a run, and its edits, which begin where windows of 3 steps do."""
    lengths, more = draw(LENGTHS), draw(LENGTHS)
    how = draw(st.sampled_from(["epochs", "steps", "mixture", "stop", "redistribute", "edited"]))
    stores = {"a": LengthsOnly(lengths, "a"), "b": LengthsOnly(more, "b")}
    settings = {
        "seed": draw(st.integers(0, 9)),
        "last": draw(st.sampled_from(["fill", "drop"])),
        "shuffle": draw(st.booleans()),
    }
    weights = {"a": 2, "b": 1}
    if how in ("stop", "redistribute"):
        sources = {"b": SourceSpec(epochs=2)}
        return Mixture(weights, stores=stores, exhausted=how, sources=sources), settings, []
    if how == "epochs":
        return stores["a"], {**settings, "epochs": draw(st.integers(1, 3))}, []
    settings["steps"] = draw(st.integers(1, 20))
    if how == "steps":
        return stores["a"], settings, []
    stages = [Stage(weights={"b": 1, "a": 1}, step=6)] if draw(st.booleans()) else []
    edits = [
        {"step": 3, "global_batch_size": 6},
        {"step": 9, "skip": 3, "seq_len": 20},
        {"step": 12, "weights": {"b": 1}, "ban": {"b": [0]}},
    ]
    return (
        Mixture(weights, stores=stores, stages=stages),
        settings,
        edits if how == "edited" else [],
    )


def made(run, window):
    data, settings, edits = run
    return Plan(data, spec_of(window, **settings), [Edit(**edit) for edit in edits])


@given(run=runs())
@settings(max_examples=examples(120), deadline=None)
def test_a_window_holds_the_rows_it_would_have_held(run):
    plain, grouped = made(run, 0), made(run, 3)
    assert grouped.steps == plain.steps
    before, after = steps_of(plain), steps_of(grouped)
    for first in range(0, plain.steps, 3):
        one, other = (
            sorted(str(row) for step in steps[first : first + 3] for row in step) for steps in (before, after)
        )
        assert one == other
        # Each step holds neighbours in the order of lengths, and the steps lie apart.
        whole = [step for step in after[first : first + 3] if None not in step]
        ranges = sorted((min(s[3] for s in step), max(s[3] for s in step)) for step in whole)
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    # What fills no whole step comes last, and no step before it lacks a row.
    assert all(None not in step for step in after[:-1])


@given(run=runs(), step=st.integers(0, 25), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(80), deadline=None)
def test_any_step_is_the_same_asked_alone_and_resumed(run, step, order):
    plan = made(run, 3)
    steps = steps_of(plan)
    asked = list(range(plan.steps))
    order.shuffle(asked)
    fresh = made(run, 3)
    for one in asked[:6]:
        start, stop = fresh.positions_of(one)
        assert spans(fresh.rows(start, stop)) == steps[one]
        # A part of a step, as ranks of any world size ask for it.
        cut = (start + stop) // 2
        assert spans(fresh.rows(start, cut)) + spans(fresh.rows(cut, stop)) == steps[one]
    step = min(step, plan.steps)
    resumed = made(run, 3)
    position = resumed.resume(plan.state(plan.positions_of(step)[0]))
    first, _ = resumed.orders.run_layout.step_at(position)
    assert first == step
    for one in range(step, min(plan.steps, step + 5)):
        assert spans(resumed.rows(*resumed.positions_of(one))) == steps[one]


@given(
    lengths=st.lists(st.integers(1, 1000), max_size=60),
    size=st.integers(1, 7),
    key=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_by_length_is_a_permutation_whose_steps_are_of_neighbours(lengths, size, key):
    order = order_by_length(np.array(lengths, np.int64), size, key)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    whole = len(lengths) // size * size
    assert order[whole:].tolist() == list(range(whole, len(lengths)))
    steps = [[lengths[at] for at in order[n : n + size]] for n in range(0, whole, size)]
    assert all(step == sorted(step, reverse=True) for step in steps)
    joined = [length for step in sorted(steps, key=lambda s: (-s[0], -s[-1])) for length in step]
    assert joined == sorted(lengths[:whole], reverse=True)


def test_padding_is_about_what_transformers_saves():
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).clip(2, 2048).astype(int).tolist()
    size = 8
    sampler = LengthGroupedSampler(size, lengths=lengths, generator=torch.Generator().manual_seed(0))
    theirs = padded_share([lengths[n] for n in sampler], size)
    shares = {}
    # 50 batches are one of its windows.
    for window in (0, 50):
        plan = Plan(
            LengthsOnly(lengths),
            spec_of(window, seq_len=2048, global_batch_size=size, pool_size=0),
        )
        shares[window] = padded_share(plan.rows(0, 20_000).lengths.tolist(), size)
    assert shares[0] > 0.5
    assert shares[50] < 0.1
    assert abs(shares[50] - theirs) < 0.01


def test_long_rows_do_not_come_first():
    rng = np.random.default_rng(1)
    plan = Plan(LengthsOnly(rng.integers(1, 1000, 8000)), spec_of(100, seq_len=1000))
    means = plan.rows(0, 8000).lengths.reshape(-1, 4).mean(1)
    for first in range(0, 2000, 100):
        window = means[first : first + 100]
        assert abs(np.corrcoef(np.arange(100), window)[0, 1]) < 0.4
        assert np.corrcoef(np.arange(100), np.sort(window))[0, 1] > 0.9


def test_a_pinned_order():
    store = LengthsOnly([5, 3, 8, 2, 7, 4, 1, 6, 3, 9, 2])
    plan = Plan(store, spec_of(2, seq_len=8, global_batch_size=2, pool_size=6, epochs=1))
    told = [" ".join(f"{d}[{a}:{a + n}]" for _, d, a, n in step) for step in steps_of(plan)]
    assert plan.fingerprint == "fd4650a019616af1c60a2b9076b253e6"
    assert told == [
        *("8[0:3] 9[8:9]", "9[0:8] 1[0:3]", "2[0:8] 4[0:7]"),
        *("7[0:6] 6[0:1]", "3[0:2] 10[0:2]", "0[0:5] 5[0:4]"),
    ]


def test_a_state_inside_a_window_tells_where_it_began():
    store = LengthsOnly([5, 3, 8, 13, 2] * 30)
    plan = Plan(store, spec_of(5, steps=20))
    states = [plan.state(4 * step) for step in range(10, 16)]
    assert [state["position"] for state in states] == [40, 44, 48, 52, 56, 60]
    assert all(state["sources"] == states[0]["sources"] for state in states[:5])
    assert states[5]["sources"] != states[0]["sources"]
    resumed = Plan(store, plan.spec)
    resumed.resume(states[3])
    assert [one.before for one in resumed.orders.order(0).anchors[0]] == [
        0,
        states[0]["sources"]["data"]["before"],
    ]


def test_without_it_nothing_has_changed():
    store = LengthsOnly([5, 3, 8])
    plan = Plan(store, spec_of(0))
    assert "group_by_length" not in plan.identity["spec"]
    assert set(plan.identity["spec"]) & {"epochs", "steps", "last"} == set()
    lanes = LanePlan(store, spec_of(0, steps=4), lanes=1, bounds=np.array([0, 3]))
    assert "group_by_length" not in lanes.identity["spec"]
    assert Plan(store, spec_of(2)).fingerprint != plan.fingerprint


def test_the_end_of_a_run_is_of_its_order_where_it_cuts_a_window():
    store = LengthsOnly([5, 3, 8] * 20)

    def named(**changes):
        return Plan(store, spec_of(5, **changes)).fingerprint

    assert named(steps=10) == named(steps=20)
    assert named(steps=10) == named(steps=20, last="drop")
    assert len({named(steps=10), named(steps=11), named(epochs=1), named(epochs=2)}) == 4
    assert named() == named(epochs=1)
    with pytest.raises(StateError, match="steps was 11 and is 12"):
        Plan(store, spec_of(5, steps=12)).resume(Plan(store, spec_of(5, steps=11)).state(8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packing": "best_fit"}, "packed by 'best_fit' are full.*packing='none'"),
        ({"lanes": 2}, "with 2 lanes"),
        ({"group_by_length": -1}, "group_by_length: -1"),
        ({"group_by_length": 1.5}, "group_by_length: 1.5"),
        ({"global_batch_size": 1 << 21}, "are 6291456 rows, more than 4194304; give at most 2"),
    ],
)
def test_settings_that_cannot_be_grouped(changes, said):
    with pytest.raises(SettingsError, match=said):
        spec_of(**{"window": changes.pop("group_by_length", 3), **changes})


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        ({"step": 4, "seq_len": 9}, PlanError, "step 4 is inside a window of 3 steps.*step=6"),
        ({"step": 3, "skip": 4}, SettingsError, "skip: 4 steps do not end at a window.*; give 6"),
        ({"step": 3, "global_batch_size": 1 << 21}, SettingsError, "give at most 2"),
    ],
)
def test_edits_begin_where_windows_do(edit, error, said):
    plan = Plan(LengthsOnly([5, 3, 8]), spec_of(3, steps=12))
    with pytest.raises(error, match=said):
        plan.edited(Edit(**edit))


def test_a_skip_of_whole_windows_leaves_out_their_steps():
    plan = Plan(LengthsOnly([5, 3, 8, 13, 2] * 30), spec_of(3, steps=30))
    steps, edited = steps_of(plan), steps_of(plan.edited(Edit(step=6, skip=9)))
    assert edited == steps[:6] + edited[6:]
    assert edited[6:15] == steps[15:24]


@pytest.mark.parametrize("stage", [{"step": 4}, {"tokens": 4 * 4 * 32}])
def test_stages_begin_where_windows_do(stage):
    mixture = Mixture(
        {"a": 1},
        stores={"a": LengthsOnly([5, 3, 8], "a"), "b": LengthsOnly([5, 3], "b")},
        stages=[Stage(weights={"b": 1}, **stage)],
    )
    with pytest.raises(PlanError, match="stage of the mixture begins at step 4.*step=6"):
        Plan(mixture, spec_of(3, steps=12))


def test_a_plan_of_lanes_is_not_grouped():
    with pytest.raises(PlanError, match="cannot be grouped by length.*order='pools'"):
        LanePlan(LengthsOnly([5, 3, 8]), spec_of(3, steps=4), lanes=1, bounds=np.array([0, 3]))


def test_a_plan_made_again_of_its_identity_is_the_same():
    store = LengthsOnly([5, 3, 8] * 9)
    plan = Plan(store, spec_of(2, epochs=2))
    assert fingerprint(plan.identity) == Plan(store, PlanSpec(**plan.identity["spec"])).fingerprint
