import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Plan, PlanError, PlanSpec, SettingsError, StateError
from batchloom.plan import check_world, rank_positions
from plan.length_stores import LengthStore
from tiers import examples

PINNED_FINGERPRINT = "28de7f0b314dc72e78823bcc5ba667d1"
PINNED_ROWS = [[10], [35, 26], [31, 25], [1, 20, 38]]
PINNED_MEMBERS = {
    0: [21, 28, 20, 16, 17, 7, 4, 18, 6, 19, 5, 22, 29, 23],
    1: [26, 8, 12, 11, 2, 25, 27, 0, 1, 14, 9, 3, 10, 24, 15, 13],
}
PINNED_SECOND_EPOCH = [17, 8, 34, 14, 32, 4, 5, 3]

SPECS = st.builds(
    dict,
    seq_len=st.integers(1, 40),
    global_batch_size=st.sampled_from([1, 2, 6, 12]),
    packing=st.sampled_from(["best_fit", "wrap", "first_fit", "none", "window_5"]),
    seed=st.integers(-5, 2**40),
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
    pool_size=st.sampled_from([1, 4, 8, 64]),
    block=st.sampled_from([0, 1, 2, 4]),
).filter(lambda s: not s["block"] or s["pool_size"] % s["block"] == 0)
LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=80).filter(any)


def list_spans(rows):
    return list(zip(rows.documents.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True))


def count_coverage(lengths, spans):
    covered = [np.zeros(n, int) for n in lengths]
    for document, start, length in spans:
        assert length > 0
        assert start + length <= lengths[document]
        covered[document][start : start + length] += 1
    return covered


@given(lengths=LENGTHS, spec=SPECS, data=st.data())
@settings(max_examples=examples(200))
def test_every_epoch_holds_every_token_once_whatever_the_ranks(lengths, spec, data):
    plan = Plan(LengthStore(lengths), PlanSpec(**spec))
    size = spec["global_batch_size"]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    spans = []
    for step in range(plan.steps):
        world = data.draw(st.sampled_from(divisors))
        for rank in range(world):
            spans += list_spans(plan.rows(*rank_positions(step, size, rank, world)))
    assert all((c == spec["epochs"]).all() for c in count_coverage(lengths, spans))
    assert not plan.has_step(plan.steps)
    assert plan.has_step(plan.steps - 1)


@given(lengths=LENGTHS, spec=SPECS)
@settings(max_examples=examples(60))
def test_each_single_epoch_is_complete(lengths, spec):
    plan = Plan(LengthStore(lengths), PlanSpec(**spec))
    per_epoch = plan.orders.sequences_per_epoch
    for epoch in range(spec["epochs"]):
        rows = plan.rows(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert all((c == 1).all() for c in count_coverage(lengths, list_spans(rows)))


@given(lengths=LENGTHS, spec=SPECS, data=st.data())
@settings(max_examples=examples(100))
def test_any_position_is_the_same_however_it_is_reached(lengths, spec, data):
    """From the start, from a state, with and without the table, alone and in ranges."""
    spec = PlanSpec(**spec)
    walked_plan = Plan(LengthStore(lengths), spec)
    total = Plan(LengthStore(lengths), spec).positions
    position = data.draw(st.integers(0, total - 1))
    counted_plan = Plan(LengthStore(lengths), spec)
    counted_plan.orders.count_all()
    resumed_plan = Plan(LengthStore(lengths), spec)
    state = json.loads(json.dumps(walked_plan.state(position)))
    assert resumed_plan.resume(state) == position
    spans = [list_spans(plan.rows(position, position + 3)) for plan in (walked_plan, counted_plan, resumed_plan)]
    assert spans[0] == spans[1] == spans[2]
    all_rows = walked_plan.rows(0, total + 5)
    first_span = all_rows.pointers[position]
    assert list_spans(all_rows)[first_span : first_span + len(spans[0])] == spans[0]
    assert np.diff(all_rows.pointers)[total:].sum() == 0


@given(lengths=LENGTHS, spec=SPECS)
@settings(max_examples=examples(60))
def test_rows_fit_their_sequence_without_holes(lengths, spec):
    rows = Plan(LengthStore(lengths), PlanSpec(**spec)).rows(0, 50)
    for row in range(len(rows)):
        first, stop = rows.pointers[row], rows.pointers[row + 1]
        ends = np.cumsum(rows.lengths[first:stop])
        assert rows.row_offsets[first:stop].tolist() == [0, *ends[:-1].tolist()][: stop - first]
        assert ends.size == 0 or ends[-1] <= spec["seq_len"]


def test_epochs_have_orders_of_their_own_and_packs_in_common():
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    plan = Plan(LengthStore(lengths), PlanSpec(seq_len=64, global_batch_size=1, epochs=2, pool_size=100))
    count = plan.orders.sequences_per_epoch
    packs = []
    for epoch in range(2):
        rows = plan.rows(epoch * count, (epoch + 1) * count)
        spans = list_spans(rows)
        packs.append([tuple(spans[a:b]) for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)])
    assert packs[0] != packs[1]
    assert sorted(packs[0]) == sorted(packs[1])


def test_without_shuffle_documents_come_in_store_order():
    plan = Plan(
        LengthStore([3] * 20),
        PlanSpec(seq_len=4, global_batch_size=2, shuffle=False, packing="none"),
    )
    assert plan.rows(0, 20).documents.tolist() == list(range(20))
    wrapped = Plan(
        LengthStore([3] * 20),
        PlanSpec(seq_len=4, global_batch_size=2, shuffle=False, packing="wrap"),
    )
    assert wrapped.rows(0, 15).documents.tolist() == sorted(wrapped.rows(0, 15).documents.tolist())


@pytest.mark.parametrize(("overlong", "tokens"), [("split", 3 + 10 + 4), ("drop", 3 + 4), ("truncate", 3 + 4 + 4)])
@pytest.mark.parametrize("packing", ["best_fit", "wrap", "first_fit", "none"])
def test_overlong_documents(overlong, tokens, packing):
    spec = PlanSpec(seq_len=4, global_batch_size=1, overlong=overlong, packing=packing)
    plan = Plan(LengthStore([3, 10, 4]), spec)
    assert plan.rows(0, plan.positions).lengths.sum() == tokens
    left_out = plan.left_out()
    assert (left_out.documents, left_out.tokens) == ({"drop": 1}.get(overlong, 0), 17 - tokens)


def test_overlong_error_names_the_document_before_anything_is_served():
    with pytest.raises(PlanError, match=r"Document 1 .* has 10 tokens, more than seq_len 4"):
        Plan(LengthStore([3, 10, 4]), PlanSpec(seq_len=4, global_batch_size=1, overlong="error"))


def test_steps_run_on_across_epochs_and_stop_in_time():
    plan = Plan(LengthStore([4] * 5), PlanSpec(seq_len=4, global_batch_size=2, steps=9))
    assert plan.steps == 9
    assert sorted(np.bincount(plan.rows(0, 18).documents).tolist()) == [3, 3, 4, 4, 4]
    assert np.diff(plan.rows(0, 20).pointers).tolist() == [1] * 18 + [0, 0]


def test_the_last_step_is_filled_or_left_out():
    fill = Plan(LengthStore([4] * 5), PlanSpec(seq_len=4, global_batch_size=2))
    drop = Plan(LengthStore([4] * 5), PlanSpec(seq_len=4, global_batch_size=2, last="drop"))
    assert (fill.steps, drop.steps) == (3, 2)
    assert np.diff(fill.rows(4, 6).pointers).tolist() == [1, 0]
    assert drop.has_step(1)
    assert not drop.has_step(2)


def test_a_plan_without_any_sequence_is_refused():
    with pytest.raises(PlanError, match="no documents"):
        Plan(LengthStore([]), PlanSpec(seq_len=4, global_batch_size=2))
    for spec in (
        PlanSpec(seq_len=4, global_batch_size=1, overlong="drop"),
        PlanSpec(seq_len=4, global_batch_size=1),
    ):
        lengths = [9, 9] if spec.overlong == "drop" else [0, 0]
        with pytest.raises(PlanError, match="No sequence can be made"):
            Plan(LengthStore(lengths), spec).rows(0, 1)
        with pytest.raises(PlanError, match="No sequence can be made"):
            _ = Plan(LengthStore(lengths), spec).steps


def test_the_fingerprint_names_the_order_and_nothing_else():
    base = {"seq_len": 4, "global_batch_size": 2}
    fingerprint = Plan(LengthStore([1, 2, 3]), PlanSpec(**base)).fingerprint
    same = [{"epochs": 3}, {"steps": 7}, {"last": "drop"}, {"block": 1}]
    different = [
        {"seq_len": 5},
        {"seed": 1},
        {"packing": "wrap"},
        {"shuffle": False},
        {"overlong": "drop"},
        {"pool_size": 8},
    ]
    assert {Plan(LengthStore([1, 2, 3]), PlanSpec(**{**base, **changes})).fingerprint for changes in same} == {
        fingerprint
    }
    different_fingerprints = {
        Plan(LengthStore([1, 2, 3]), PlanSpec(**{**base, **changes})).fingerprint for changes in different
    }
    assert fingerprint not in different_fingerprints
    assert len(different_fingerprints) == len(different)
    assert Plan(LengthStore([1, 2, 3], "g"), PlanSpec(**base)).fingerprint != fingerprint


def test_a_state_of_another_plan_is_refused_by_field():
    plan = Plan(LengthStore([5] * 9), PlanSpec(seq_len=4, global_batch_size=2))
    other_plan = Plan(LengthStore([5] * 9, "another"), PlanSpec(seq_len=8, global_batch_size=2))
    with pytest.raises(StateError, match="sources.data.store was 'another' and is 'f'; spec.seq_len was 8 and is 4"):
        plan.resume(other_plan.state(2))
    for state in ({}, {**plan.state(2), "position": -1}, {**plan.state(2), "position": "2"}, []):
        with pytest.raises(StateError):
            plan.resume(state)


@pytest.mark.parametrize("name", ["epoch", "slot", "before"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_state_changed_by_hand_is_refused(name, change):
    plan = Plan(LengthStore([5] * 90), PlanSpec(seq_len=4, global_batch_size=2, pool_size=8))
    state = plan.state(60)
    state["sources"]["data"][name] += change
    with pytest.raises(StateError, match="changed after it was saved"):
        plan.resume(state)
    for field, value, sentence in (
        ("position", 62, "changed after"),
        ("edits", [1], "changed after"),
        ("order_version", 99, "order_version 99"),
    ):
        with pytest.raises(StateError, match=sentence):
            plan.resume({**plan.state(60), field: value})


def test_a_state_carries_its_pool():
    """Resuming late in a run counts no earlier pools."""
    source = LengthStore([3] * 4000)
    spec = PlanSpec(seq_len=8, global_batch_size=4, pool_size=10, epochs=3)
    state = Plan(source, spec).state(1000)
    plan = Plan(source, spec)
    assert plan.resume(state) == 1000
    plan.rows(1000, 1040)
    assert (plan.orders.order(0).counts.by_pool >= 0).sum() < 20
    plan.state(1004)
    assert (plan.orders.order(0).counts.by_pool >= 0).sum() < 20


def test_a_longer_run_goes_on_where_a_shorter_one_ended():
    """Empty sequences fill the last step of the short run, so nothing is lost."""
    source = LengthStore([4] * 5)
    short = Plan(source, PlanSpec(seq_len=4, global_batch_size=2))
    long = Plan(source, PlanSpec(seq_len=4, global_batch_size=2, epochs=2))
    state = short.state(short.steps * 2)
    assert short.resume(state) == 6
    assert long.resume(state) == 4


def test_a_table_of_another_plan_is_refused_when_it_contradicts():
    spec = PlanSpec(seq_len=8, global_batch_size=4, pool_size=10)
    plan = Plan(LengthStore([3] * 100), spec)
    for difference in (2, -2):
        other_plan = Plan(LengthStore([3] * 100), spec)
        other_plan.orders.order(0).counts.adopt(plan.orders.order(0).counts.count_all() + difference)
        with pytest.raises(PlanError, match="belongs to another plan"):
            other_plan.rows(0, 50)
    with pytest.raises(PlanError, match="and this plan has"):
        plan.orders.order(0).counts.adopt(np.ones(3, np.int64))


def test_the_table_identity_depends_on_what_counts_depend_on():
    def table_identity(**changes):
        spec = PlanSpec(**{"seq_len": 4, "global_batch_size": 2, **changes})
        return str(Plan(LengthStore([3] * 9), spec).orders.order(0).table_identity)

    same = [{"epochs": 2}, {"global_batch_size": 8}, {"last": "drop"}, {"steps": 4}]
    different = [
        {"seq_len": 5},
        {"packing": "wrap"},
        {"overlong": "drop"},
        {"seed": 1},
        {"shuffle": False},
    ]
    different += [{"pool_size": 4}, {"block": 2}]
    assert {table_identity(**change) for change in same} == {table_identity()}
    assert len({table_identity(), *(table_identity(**change) for change in different)}) == len(different) + 1


def test_plans_travel_to_other_processes():
    plan = Plan(LengthStore([3] * 100), PlanSpec(seq_len=8, global_batch_size=4, pool_size=10))
    unpickled = pickle.loads(pickle.dumps(plan))
    assert unpickled.fingerprint == plan.fingerprint
    assert list_spans(unpickled.rows(5, 9)) == list_spans(plan.rows(5, 9)) == list_spans(copy.copy(plan).rows(5, 9))


def test_all_settings_are_checked_at_once():
    with pytest.raises(SettingsError) as caught:
        PlanSpec(
            seq_len=0,
            global_batch_size=-1,
            packing="bestfit",
            epochs=1,
            steps=2,
            seed=1.5,
            pool_size=10,
            block=3,
        )
    assert len(caught.value.problems) == 6
    assert "did you mean 'best_fit'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("seq_len", 2**24 + 1, "16777217 is not a whole number from 1 to 16777216"),
        ("seq_len", "8", "'8' is not"),
        ("seq_len", np.float64(8), r"np.float64\(8.0\) is not"),
        ("global_batch_size", 2**24 + 1, "from 1 to 16777216"),
        ("steps", 2**48 + 1, "from 1 to 281474976710656"),
        ("epochs", 2**24 + 1, "from 1 to 16777216"),
        ("epochs", True, "True is not"),
        ("pool_size", 2**24 + 1, "from 0 to 16777216"),
        ("seed", 2**128, "is not a whole number from -340282366920938463463374607431768211455 to"),
        ("seed", 2**300, "a number of 301 bits is not"),
    ],
)
def test_settings_have_bounds(name, value, sentence):
    base = {"seq_len": 8, "global_batch_size": 4}
    with pytest.raises(SettingsError, match=f"^{name}: .*{sentence}"):
        PlanSpec(**{**base, name: value})


@pytest.mark.parametrize("seq_len", [2**20, pytest.param(2**24, marks=pytest.mark.slow)])
def test_the_largest_settings_give_an_order_at_its_start_and_its_end(seq_len):
    spec = PlanSpec(seq_len=seq_len, global_batch_size=2**15 - 1, steps=2**48, seed=2**128 - 1)
    plan = Plan(LengthStore([3, 4]), spec)
    assert sorted(plan.rows(0, 1).documents.tolist()) == [0, 1]
    last = plan.positions - 1
    assert len(plan.rows(last, last + 2).documents) == 2
    assert Plan(LengthStore([3, 4]), spec).resume(plan.state(last)) == last
    with pytest.raises(SettingsError, match=f"are {2**63} sequences, more than the maximum of {2**63 - 1}; lower"):
        PlanSpec(seq_len=1, global_batch_size=2**15, steps=2**48)


@pytest.mark.parametrize(("size", "world"), [(64, 7), (6, 4), (1, 2)])
def test_a_world_size_that_does_not_divide_is_refused(size, world):
    with pytest.raises(PlanError, match="World sizes that divide it: 1") as caught:
        check_world(size, 0, world)
    listed = str(caught.value).split("divide it: ")[1].split(";")[0]
    assert all(size % int(n) == 0 for n in listed.split(", "))


def test_the_order_is_pinned():
    """Any change here changes every user's order: it needs a new order_version."""
    lengths = np.arange(1, 41)
    plan = Plan(
        LengthStore(lengths),
        PlanSpec(seq_len=64, global_batch_size=4, seed=7, pool_size=16, epochs=2),
    )
    rows = plan.rows(0, 4)
    documents_by_row = [rows.documents[a:b].tolist() for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]
    assert plan.fingerprint == PINNED_FINGERPRINT
    assert documents_by_row == PINNED_ROWS
    assert (
        plan.rows(plan.orders.sequences_per_epoch, plan.orders.sequences_per_epoch + 2).documents.tolist()
        == PINNED_SECOND_EPOCH
    )


def test_blocks_keep_neighbours_together_and_cover_all():
    plan = Plan(LengthStore([2] * 1000), PlanSpec(seq_len=2, global_batch_size=1, pool_size=64, block=8))
    members = [plan.orders.pools.members(pool) for pool in range(plan.orders.pools.count)]
    assert sorted(np.concatenate(members).tolist()) == list(range(1000))
    for pool in members:
        blocks = np.unique(pool // 8)
        assert np.isin(pool, np.concatenate([np.arange(b * 8, b * 8 + 8) for b in blocks])).all()
        assert blocks.size <= 8
    assert PlanSpec(seq_len=1, global_batch_size=1).block_for(3_999_999) == 1
    assert PlanSpec(seq_len=1, global_batch_size=1).block_for(4_000_000) == 64


def test_documents_of_blocks_are_shuffled_over_their_pool():
    spec = PlanSpec(seq_len=2, global_batch_size=1, pool_size=16, block=4, seed=3)
    plan = Plan(LengthStore([2] * 30), spec)
    for pool, expected in PINNED_MEMBERS.items():
        assert plan.orders.pools.members(pool).tolist() == expected


def test_without_shuffle_sequences_come_by_their_first_span():
    """Rows keep store order although best fit begins with the longest document."""
    lengths = [3, 9, 2, 8, 5, 21, 4, 7, 1]
    for packing in ("best_fit", "first_fit", "window_4"):
        spec = PlanSpec(seq_len=10, global_batch_size=1, shuffle=False, packing=packing)
        plan = Plan(LengthStore(lengths), spec)
        rows = plan.rows(0, plan.positions)
        spans_by_row = [list_spans(rows)[a:b] for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]
        assert all(row == sorted(row) for row in spans_by_row)
        assert spans_by_row == sorted(spans_by_row)
        assert [row[0][:2] for row in spans_by_row if row[0][0] == 5][:2] == [(5, 0), (5, 10)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", ["best_fit", "wrap", "none"])
def test_a_repeated_pool_equals_a_repacked_one(shuffle, packing):
    lengths = np.random.default_rng(1).integers(1, 40, 90)
    spec = PlanSpec(seq_len=32, global_batch_size=4, epochs=9, pool_size=60, shuffle=shuffle, packing=packing)
    plan = Plan(LengthStore(lengths), spec)
    served_spans = list_spans(plan.rows(0, plan.positions))
    repacked_spans = []
    for epoch in range(9):
        for pool in plan.orders.pools.order(epoch).tolist():
            repacked_spans += list_spans(Plan(LengthStore(lengths), spec).orders.pools.rows(pool, epoch))
    assert served_spans == repacked_spans


EXAMPLE = [5, 3, 8, 2, 7, 4, 1, 6, 3, 9]
SMALL = {"seq_len": 8, "global_batch_size": 2, "pool_size": 6}


def test_an_edit_of_seq_len_at_the_end_adds_no_epoch():
    plan = Plan(LengthStore(EXAMPLE), PlanSpec(**SMALL, epochs=1), [Edit(step=4, seq_len=12)])
    assert plan.steps == 4
    assert [plan.has_step(step) for step in range(6)] == [True] * 4 + [False] * 2
    assert plan.state(8)["end"] == 7


@pytest.mark.parametrize(("longer", "position"), [({"epochs": 2}, 6), ({"steps": 7}, 6), ({"steps": 3}, 8)])
def test_a_longer_run_repeats_the_last_step_that_was_not_full(longer, position):
    store = LengthStore(EXAMPLE)
    state = Plan(store, PlanSpec(**SMALL, epochs=1)).state(8)
    assert Plan(store, PlanSpec(**SMALL, **longer)).resume(state) == position


@pytest.mark.parametrize("lanes", [1, 4])
def test_epochs_go_on_after_an_edit_of_seq_len(lanes):
    lengths = np.random.default_rng(0).integers(1, 30, 1000)
    spec = PlanSpec(seq_len=32, global_batch_size=4, epochs=1, pool_size=50, lanes=lanes)
    plan = Plan(LengthStore(lengths), spec, [Edit(step=70, seq_len=16)])
    epochs = [plan.epochs(plan.positions_of(step)[0])["data"] for step in range(0, plan.steps, 3)]
    assert epochs == sorted(epochs)
    assert epochs[-1] > 0.9
