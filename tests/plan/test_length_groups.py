"""Rows grouped by length: the same windows, with similar lengths in each step."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanError, PlanSpec, SettingsError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan import SourceSpec, Stage
from batchloom.plan.order.run_positions import order_by_length
from plan.length_stores import LengthStore
from tiers import examples

LENGTHS = st.lists(st.integers(0, 40), min_size=3, max_size=80).filter(any)


def make_spec(window, **changes):
    settings = {"seq_len": 32, "global_batch_size": 4, "packing": "none", "pool_size": 8}
    return PlanSpec(**{**settings, "group_by_length": window, **changes})


def list_rows(rows):
    """Return the only span of each row, None for an empty row."""
    spans = list(
        zip(
            rows.sources.tolist(),
            rows.documents.tolist(),
            rows.starts.tolist(),
            rows.lengths.tolist(),
            strict=True,
        )
    )
    return [spans[a] if a < b else None for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]


def list_steps(plan):
    return [list_rows(plan.rows(*plan.positions_of(step))) for step in range(plan.steps)]


def compute_padding(lengths, size):
    """Return the padding share if every ``size`` rows are padded to their longest."""
    batches = [lengths[start : start + size] for start in range(0, len(lengths) - size + 1, size)]
    positions = sum(max(batch) * size for batch in batches)
    return 1 - sum(map(sum, batches)) / positions


@st.composite
def runs(draw):
    """Generate data, settings and edits of a run; edits begin at windows of 3 steps."""
    lengths, other_lengths = draw(LENGTHS), draw(LENGTHS)
    kind = draw(st.sampled_from(["epochs", "steps", "mixture", "stop", "redistribute", "edited"]))
    stores = {"a": LengthStore(lengths, "a"), "b": LengthStore(other_lengths, "b")}
    settings = {
        "seed": draw(st.integers(0, 9)),
        "last": draw(st.sampled_from(["fill", "drop"])),
        "shuffle": draw(st.booleans()),
    }
    weights = {"a": 2, "b": 1}
    if kind in ("stop", "redistribute"):
        sources = {"b": SourceSpec(epochs=2)}
        return Mixture(weights, stores=stores, exhausted=kind, sources=sources), settings, []
    if kind == "epochs":
        return stores["a"], {**settings, "epochs": draw(st.integers(1, 3))}, []
    settings["steps"] = draw(st.integers(1, 20))
    if kind == "steps":
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
        edits if kind == "edited" else [],
    )


def make_plan(run, window):
    data, settings, edits = run
    return Plan(data, make_spec(window, **settings), [Edit(**edit) for edit in edits])


@given(run=runs())
@settings(max_examples=examples(120), deadline=None)
def test_a_window_holds_the_rows_of_an_ungrouped_window(run):
    plain, grouped = make_plan(run, 0), make_plan(run, 3)
    assert grouped.steps == plain.steps
    before, after = list_steps(plain), list_steps(grouped)
    for first in range(0, plain.steps, 3):
        rows_before, rows_after = (
            sorted(str(row) for step in steps[first : first + 3] for row in step) for steps in (before, after)
        )
        assert rows_before == rows_after
        # Each step holds neighbours in the order of lengths, and steps do not overlap.
        full_steps = [step for step in after[first : first + 3] if None not in step]
        ranges = sorted((min(s[3] for s in step), max(s[3] for s in step)) for step in full_steps)
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    # An incomplete step comes last, and no step before it lacks a row.
    assert all(None not in step for step in after[:-1])


@given(run=runs(), step=st.integers(0, 25), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(80), deadline=None)
def test_any_step_is_the_same_read_alone_and_resumed(run, step, order):
    plan = make_plan(run, 3)
    steps = list_steps(plan)
    step_order = list(range(plan.steps))
    order.shuffle(step_order)
    fresh = make_plan(run, 3)
    for other_step in step_order[:6]:
        start, stop = fresh.positions_of(other_step)
        assert list_rows(fresh.rows(start, stop)) == steps[other_step]
        # Part of a step, as ranks of any world size request it.
        middle = (start + stop) // 2
        assert list_rows(fresh.rows(start, middle)) + list_rows(fresh.rows(middle, stop)) == steps[other_step]
    step = min(step, plan.steps)
    resumed = make_plan(run, 3)
    position = resumed.resume(plan.state(plan.positions_of(step)[0]))
    first, _ = resumed.step_at(position)
    assert first == step
    for other_step in range(step, min(plan.steps, step + 5)):
        assert list_rows(resumed.rows(*resumed.positions_of(other_step))) == steps[other_step]


@given(
    lengths=st.lists(st.integers(1, 1000), max_size=60),
    size=st.integers(1, 7),
    key=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_length_order_is_a_permutation_with_neighbours_in_each_step(lengths, size, key):
    order = order_by_length(np.array(lengths, np.int64), size, key)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    full_size = len(lengths) // size * size
    assert order[full_size:].tolist() == list(range(full_size, len(lengths)))
    steps = [[lengths[index] for index in order[n : n + size]] for n in range(0, full_size, size)]
    assert all(step == sorted(step, reverse=True) for step in steps)
    sorted_lengths = [length for step in sorted(steps, key=lambda s: (-s[0], -s[-1])) for length in step]
    assert sorted_lengths == sorted(lengths[:full_size], reverse=True)


def test_padding_is_about_what_transformers_saves():
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).clip(2, 2048).astype(int).tolist()
    size = 8
    sampler = LengthGroupedSampler(size, lengths=lengths, generator=torch.Generator().manual_seed(0))
    expected = compute_padding([lengths[n] for n in sampler], size)
    shares = {}
    # A window of transformers has 50 batches.
    for window in (0, 50):
        plan = Plan(
            LengthStore(lengths),
            make_spec(window, seq_len=2048, global_batch_size=size, pool_size=0),
        )
        shares[window] = compute_padding(plan.rows(0, 20_000).lengths.tolist(), size)
    assert shares[0] > 0.5
    assert shares[50] < 0.1
    assert abs(shares[50] - expected) < 0.01


def test_long_rows_do_not_come_first():
    rng = np.random.default_rng(1)
    plan = Plan(LengthStore(rng.integers(1, 1000, 8000)), make_spec(100, seq_len=1000))
    means = plan.rows(0, 8000).lengths.reshape(-1, 4).mean(1)
    for first in range(0, 2000, 100):
        window = means[first : first + 100]
        assert abs(np.corrcoef(np.arange(100), window)[0, 1]) < 0.4
        assert np.corrcoef(np.arange(100), np.sort(window))[0, 1] > 0.9


def test_a_pinned_order():
    store = LengthStore([5, 3, 8, 2, 7, 4, 1, 6, 3, 9, 2])
    plan = Plan(store, make_spec(2, seq_len=8, global_batch_size=2, pool_size=6, epochs=1))
    steps = [" ".join(f"{d}[{a}:{a + n}]" for _, d, a, n in step) for step in list_steps(plan)]
    assert plan.fingerprint == "fd4650a019616af1c60a2b9076b253e6"
    assert steps == [
        *("8[0:3] 9[8:9]", "9[0:8] 1[0:3]", "2[0:8] 4[0:7]"),
        *("7[0:6] 6[0:1]", "3[0:2] 10[0:2]", "0[0:5] 5[0:4]"),
    ]


def test_a_state_inside_a_window_holds_the_start_of_the_window():
    store = LengthStore([5, 3, 8, 13, 2] * 30)
    plan = Plan(store, make_spec(5, steps=20))
    states = [plan.state(4 * step) for step in range(10, 16)]
    assert [state["position"] for state in states] == [40, 44, 48, 52, 56, 60]
    assert all(state["sources"] == states[0]["sources"] for state in states[:5])
    assert states[5]["sources"] != states[0]["sources"]
    resumed = Plan(store, plan.spec)
    resumed.resume(states[3])
    anchors = [anchor.before for anchor in resumed.orders.order(0).anchors]
    assert anchors == [0, states[0]["sources"]["data"]["before"]]


def test_ungrouped_plans_have_no_group_setting():
    store = LengthStore([5, 3, 8])
    plan = Plan(store, make_spec(0))
    assert "group_by_length" not in plan.identity["spec"]
    assert set(plan.identity["spec"]) & {"epochs", "steps", "last"} == set()
    assert Plan(store, make_spec(2)).fingerprint != plan.fingerprint


def test_the_end_of_a_run_is_part_of_the_order_if_it_cuts_a_window():
    store = LengthStore([5, 3, 8] * 20)

    def compute_fingerprint(**changes):
        return Plan(store, make_spec(5, **changes)).fingerprint

    assert compute_fingerprint(steps=10) == compute_fingerprint(steps=20)
    assert compute_fingerprint(steps=10) == compute_fingerprint(steps=20, last="drop")
    assert (
        len(
            {
                compute_fingerprint(steps=10),
                compute_fingerprint(steps=11),
                compute_fingerprint(epochs=1),
                compute_fingerprint(epochs=2),
            }
        )
        == 4
    )
    assert compute_fingerprint() == compute_fingerprint(epochs=1)
    with pytest.raises(StateError, match="steps was 11 and is 12"):
        Plan(store, make_spec(5, steps=12)).resume(Plan(store, make_spec(5, steps=11)).state(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "best_fit"}, "packed by 'best_fit' are full.*packing='none'"),
        ({"lanes": 2}, "with 2 lanes"),
        ({"group_by_length": -1}, "group_by_length: -1"),
        ({"group_by_length": 1.5}, "group_by_length: 1.5"),
        ({"global_batch_size": 1 << 21}, "are 6291456 rows, more than 4194304; give at most 2"),
    ],
)
def test_settings_that_exclude_grouping(changes, message):
    with pytest.raises(SettingsError, match=message):
        make_spec(**{"window": changes.pop("group_by_length", 3), **changes})


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ({"step": 4, "seq_len": 9}, PlanError, "step 4 is inside a window of 3 steps.*step=6"),
        ({"step": 3, "skip": 4}, SettingsError, "skip: 4 steps do not end at a window.*; give 6"),
        ({"step": 3, "global_batch_size": 1 << 21}, SettingsError, "give at most 2"),
    ],
)
def test_edits_begin_where_windows_do(edit, error, message):
    plan = Plan(LengthStore([5, 3, 8]), make_spec(3, steps=12))
    with pytest.raises(error, match=message):
        plan.edited(Edit(**edit))


def test_a_skip_of_whole_windows_leaves_out_their_steps():
    plan = Plan(LengthStore([5, 3, 8, 13, 2] * 30), make_spec(3, steps=30))
    steps, edited = list_steps(plan), list_steps(plan.edited(Edit(step=6, skip=9)))
    assert edited == steps[:6] + edited[6:]
    assert edited[6:15] == steps[15:24]


@pytest.mark.parametrize("stage", [{"step": 4}, {"tokens": 4 * 4 * 32}])
def test_stages_begin_where_windows_do(stage):
    mixture = Mixture(
        {"a": 1},
        stores={"a": LengthStore([5, 3, 8], "a"), "b": LengthStore([5, 3], "b")},
        stages=[Stage(weights={"b": 1}, **stage)],
    )
    with pytest.raises(PlanError, match="stage of the mixture begins at step 4.*step=6"):
        Plan(mixture, make_spec(3, steps=12))


def test_a_plan_rebuilt_from_its_identity_is_the_same():
    store = LengthStore([5, 3, 8] * 9)
    plan = Plan(store, make_spec(2, epochs=2))
    assert fingerprint(plan.identity) == Plan(store, PlanSpec(**plan.identity["spec"])).fingerprint
