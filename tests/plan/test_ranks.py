"""Rows and tokens of each rank, compared with Megatron."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Plan, PlanError, PlanSpec, SettingsError
from batchloom.plan import (
    Mesh,
    check_world,
    compute_imbalance,
    compute_row_costs,
    deal_balanced,
    deal_contiguous,
    rank_positions,
    slice_indices,
)
from batchloom.plan.order import count_rank_rows, sort_by_cost
from batchloom.plan.order.rank_slices import compute_max_load
from plan.length_stores import LengthStore
from tiers import examples

SIZES = st.integers(1, 4)


@given(step=st.integers(0, 1000), size=st.integers(1, 300), world=st.integers(1, 300))
def test_rank_ranges_cover_a_step_and_are_nearly_equal(step, size, world):
    ranges = [rank_positions(step, size, rank, world) for rank in range(world)]
    assert ranges[0][0] == step * size
    assert ranges[-1][1] == (step + 1) * size
    assert all(previous[1] == following[0] for previous, following in itertools.pairwise(ranges))
    counts = {stop - start for start, stop in ranges}
    assert counts <= {size // world, -(-size // world)}
    assert max(counts) == count_rank_rows(size, world, uneven="pad")
    ranks = deal_contiguous(size, world)
    assert np.array_equal(np.bincount(ranks, minlength=world), [b - a for a, b in ranges])


@given(size=st.integers(1, 300), world=st.integers(1, 20), micro=st.integers(1, 40))
def test_a_micro_batch_divides_or_is_refused(size, world, micro):
    rows = -(-size // world)
    filled = count_rank_rows(size, world, micro, "pad")
    assert filled % micro == 0
    assert 0 <= filled - rows < micro
    if rows % micro == 0:
        assert count_rank_rows(size, world, micro) == rows
        return
    with pytest.raises(PlanError, match="uneven='pad'") as caught:
        count_rank_rows(size, world, micro)
    sizes = str(caught.value).split("Sizes that divide it: ")[1].split(".")[0]
    assert all(rows % int(n) == 0 for n in sizes.split(", "))


def test_a_world_size_that_does_not_divide_can_be_padded():
    with pytest.raises(PlanError, match="pad with rows that carry no loss: uneven='pad'"):
        check_world(10, 0, 4)
    check_world(10, 3, 4, "pad")
    with pytest.raises(PlanError, match="rank 4 of world_size 4 does not exist"):
        check_world(10, 4, 4, "pad")


@given(tensor=SIZES, context=SIZES, pipeline=SIZES, data=SIZES)
@settings(max_examples=examples(40))
@pytest.mark.parametrize(
    ("megatron_order", "order"),
    [
        ("tp-cp-ep-dp-pp", ("tensor", "context", "data", "pipeline")),
        ("tp-cp-ep-pp-dp", ("tensor", "context", "pipeline", "data")),
    ],
)
def test_placements_are_those_of_megatron(megatron_order, order, tensor, context, pipeline, data):
    state = pytest.importorskip("megatron.core.parallel_state")
    groups = state.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=megatron_order).get_ranks
    mesh = Mesh(tensor=tensor, context=context, pipeline=pipeline, order=order)
    world = tensor * context * pipeline * data
    placements = [mesh.get_placement(rank, world) for rank in range(world)]
    for group in groups("dp"):
        assert [placements[rank].rank for rank in group] == list(range(data))
    for group in groups("cp"):
        assert [placements[rank].context_rank for rank in group] == list(range(context))
        assert len({placements[rank].rank for rank in group}) == 1
    for peers in (*groups("tp"), *groups("pp")):
        assert len({placements[rank] for rank in peers}) == 1


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(PlanError, match=r"tensor 2 x context 4 x pipeline 1: .* 8 of them. Numbers that fit: 8 or 16"):
        Mesh(tensor=2, context=4).get_placement(0, 12)
    with pytest.raises(PlanError, match="rank 8 of world_size 8 does not exist"):
        Mesh(tensor=2, context=4).get_placement(8, 8)
    with pytest.raises(SettingsError) as caught:
        Mesh(tensor=0, slices="zigzg", order=("tensor", "data"))
    assert "mesh.tensor: 0 is not a whole number" in str(caught.value)
    assert "did you mean 'zigzag'?" in str(caught.value)
    assert "must name tensor, context, data, pipeline" in str(caught.value)


@pytest.mark.parametrize("context", [2, 3, 5])
@pytest.mark.parametrize("chunk", [1, 4])
def test_zigzag_is_megatrons_own(monkeypatch, context, chunk):
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.utils")
    # Without processes, the rank stands for the group.
    monkeypatch.setattr(utils, "get_pg_size", lambda _: context)
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group)
    length = 2 * context * chunk
    tokens = torch.arange(3 * length).reshape(3, length)
    mesh = Mesh(context=context, slices="zigzag")
    for rank in range(context):
        expected = utils.get_batch_on_this_cp_rank({"tokens": tokens}, rank)["tokens"]
        actual = tokens.numpy()[:, slice_indices(np.array([length]), mesh, rank)]
        assert np.array_equal(actual, expected.numpy())


def compute_thd_indices(bounds, total, world, rank):
    """Return the indices of TransformerEngine's kernel (fused_attn/thd_utils.cu)."""
    rank_bounds = [bound // world for bound in bounds]
    indices = []
    for token in range(total // world):
        span = max(n for n, bound in enumerate(rank_bounds[:-1]) if bound <= token)
        length, inside = rank_bounds[span + 1] - rank_bounds[span], token - rank_bounds[span]
        offset = rank if inside < length // 2 else (world - 1) * 2 - rank
        indices.append(inside + rank_bounds[span] * world + length // 2 * offset)
    return indices


@given(
    context=st.integers(2, 4),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    slices=st.sampled_from(["contiguous", "zigzag"]),
)
def test_every_document_is_sliced_by_itself(context, chunks, slices):
    mesh = Mesh(context=context, slices=slices)
    lengths = np.array(chunks) * mesh.chunk_count
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    rank_indices = [slice_indices(lengths, mesh, rank) for rank in range(context)]
    assert sorted(np.concatenate(rank_indices)) == list(range(bounds[-1]))
    for rank, indices in enumerate(rank_indices):
        if slices == "zigzag":
            assert indices.tolist() == compute_thd_indices(bounds.tolist(), bounds[-1], context, rank)
            continue
        document_slices = [
            np.arange(bounds[n] + rank * length // context, bounds[n] + (rank + 1) * length // context)
            for n, length in enumerate(lengths)
        ]
        assert np.array_equal(indices, np.concatenate(document_slices))


@given(
    costs=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=80),
    world=st.integers(1, 20),
)
def test_balanced_dealing_is_never_worse_than_contiguous(costs, world):
    costs = np.array(costs, np.int64)
    balanced, contiguous = deal_balanced(costs, world), deal_contiguous(len(costs), world)
    assert np.array_equal(balanced, deal_balanced(costs, world))
    assert np.bincount(balanced, minlength=world).max() <= -(-len(costs) // world)
    assert compute_max_load(costs, balanced, world) <= compute_max_load(costs, contiguous, world)
    assert compute_imbalance(costs, balanced, world) >= 1.0


def test_dealing_evens_out_long_documents():
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(6.2, 1.4, 8192)).astype(np.int64) + 1, 8192)
    plan = Plan(LengthStore(lengths), PlanSpec(seq_len=8192, global_batch_size=512))
    costs = compute_row_costs(plan.rows(0, 512))
    assert compute_imbalance(costs, deal_contiguous(512, 64), 64) > 1.3
    assert compute_imbalance(costs, deal_balanced(costs, 64), 64) < 1.01


def test_dealing_of_small_costs():
    costs = np.array([9, 4, 1, 4, 1, 1], np.int64)
    # 9 goes to rank 0, the 4s to ranks 1 and 2, the 1s to the ranks with the least load and with room.
    assert deal_balanced(costs, 3).tolist() == [0, 1, 1, 2, 2, 0]
    assert deal_balanced(costs[:0], 3).tolist() == []


TWO_COSTS = st.lists(st.tuples(st.integers(0, 1 << 48), st.integers(0, 1 << 24)), min_size=1, max_size=60)


@given(costs=TWO_COSTS, world=st.integers(1, 20))
def test_balanced_dealing_of_several_costs_is_never_worse_than_contiguous(costs, world):
    costs = np.array(costs, np.int64).T
    count = costs.shape[1]
    balanced, contiguous = deal_balanced(costs, world), deal_contiguous(count, world)
    assert np.array_equal(balanced, deal_balanced(costs.copy(), world))
    assert np.bincount(balanced, minlength=world).max() <= -(-count // world)
    assert compute_imbalance(costs, balanced, world) <= compute_imbalance(costs, contiguous, world)
    assert sorted(sort_by_cost(costs).tolist()) == list(range(count))


@given(costs=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=60), world=st.integers(1, 9))
def test_a_cost_of_zero_changes_nothing(costs, world):
    """A step without media is dealt like a step of a store without media."""
    single = np.array(costs, np.int64)
    with_zeros = np.stack([single, np.zeros_like(single)])
    assert np.array_equal(deal_balanced(with_zeros, world), deal_balanced(single, world))
    assert np.array_equal(sort_by_cost(with_zeros), sort_by_cost(single))
    assert compute_imbalance(with_zeros, deal_contiguous(len(single), world), world) == compute_imbalance(
        single, deal_contiguous(len(single), world), world
    )


def test_dealing_evens_out_media_and_attention_at_once():
    """Balancing the attention of texts and images alone leaves vision towers waiting."""
    rng = np.random.default_rng(0)
    attention = rng.integers(1 << 18, 1 << 24, 256)
    media = np.where(rng.random(256) < 0.4, rng.integers(64, 4096, 256), 0)
    costs = np.stack([attention, media])
    contiguous, attention_only = deal_contiguous(256, 32), deal_balanced(attention, 32)
    balanced = deal_balanced(costs, 32)
    assert compute_imbalance(media, contiguous, 32) > 1.5
    assert compute_imbalance(media, attention_only, 32) > 1.5
    assert compute_imbalance(media, balanced, 32) < 1.1
    assert compute_imbalance(attention, balanced, 32) < 1.1


def test_dealing_of_several_costs():
    # Rows 0 and 1 have half of the first cost and a quarter of the second each; rows 2 and 3 only the latter.
    costs = np.array([[4, 4, 0, 0], [2, 2, 2, 2]], np.int64)
    assert sort_by_cost(costs).tolist() == [0, 1, 2, 3]
    assert deal_balanced(costs, 2).tolist() == [0, 1, 0, 1]


def test_the_cost_of_a_row_is_the_sum_of_its_squares():
    plan = Plan(LengthStore([3, 4, 8]), PlanSpec(seq_len=8, global_batch_size=1, shuffle=False))
    assert sorted(compute_row_costs(plan.rows(0, 4)).tolist()) == [0, 0, 25, 64]


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=60).filter(any),
    align=st.sampled_from([2, 3, 8]),
    packing=st.sampled_from(["best_fit", "wrap", "first_fit", "window_4", "none"]),
    overlong=st.sampled_from(["split", "drop", "truncate"]),
)
def test_aligned_documents_begin_at_multiples_and_are_complete(lengths, align, packing, overlong):
    seq_len = 24
    spec = PlanSpec(seq_len=seq_len, global_batch_size=1, packing=packing, overlong=overlong, align=align)
    plan = Plan(LengthStore(lengths), spec)
    if overlong == "drop" and not any(0 < length <= seq_len for length in lengths):
        return
    rows = plan.rows(0, plan.orders.sequences_per_epoch)
    assert not (rows.row_offsets % align).any()
    aligned_lengths = -(-rows.lengths // align) * align
    for first, stop in zip(rows.pointers, rows.pointers[1:], strict=False):
        assert stop > first
        assert (
            rows.row_offsets[first:stop] == np.cumsum(aligned_lengths[first:stop]) - aligned_lengths[first:stop]
        ).all()
        assert rows.row_offsets[stop - 1] + aligned_lengths[stop - 1] <= seq_len
    served_lengths = {"split": lambda n: n, "drop": lambda n: n if n <= seq_len else 0}
    for number, length in enumerate(lengths):
        spans = sorted(
            zip(
                rows.starts[rows.documents == number].tolist(),
                rows.lengths[rows.documents == number].tolist(),
                strict=True,
            )
        )
        expected = served_lengths.get(overlong, lambda n: min(n, seq_len))(length)
        assert sum(n for _, n in spans) == expected
        assert [start for start, _ in spans] == [sum(n for _, n in spans[:index]) for index in range(len(spans))]


def test_alignment_is_part_of_the_order_only_if_set():
    source = LengthStore([3, 5, 8])
    plain = Plan(source, PlanSpec(seq_len=8, global_batch_size=1))
    same = Plan(source, PlanSpec(seq_len=8, global_batch_size=1, align=1))
    aligned = Plan(source, PlanSpec(seq_len=8, global_batch_size=1, align=4))
    assert plain.fingerprint == same.fingerprint != aligned.fingerprint
    assert "align" not in plain.identity["spec"]
    assert "align" not in plain.orders.order(0).table_identity
    assert aligned.orders.order(0).table_identity["align"] == 4
    with pytest.raises(SettingsError, match="seq_len: 10 is not a multiple of align 4; give 8 or 12"):
        PlanSpec(seq_len=10, global_batch_size=1, align=4)
