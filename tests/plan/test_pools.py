"""Pools: the count of sequences and the members."""

import numpy as np
from hypothesis import given, settings, strategies as st

from batchloom import PlanSpec
from batchloom.plan import Pools
from plan.length_stores import ArrayLengths
from tiers import examples


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=200),
    block=st.sampled_from([0, 1, 4, 8]),
    packing=st.sampled_from(["best_fit", "wrap", "first_fit", "window_3", "none"]),
    overlong=st.sampled_from(["split", "drop", "truncate"]),
    align=st.sampled_from([1, 4]),
    shuffle=st.booleans(),
)
@settings(max_examples=examples(150), deadline=None)
def test_pool_counts_are_the_counts_of_its_rows(lengths, block, packing, overlong, align, shuffle):
    spec = PlanSpec(
        seq_len=32,
        global_batch_size=1,
        pool_size=16,
        block=block,
        packing=packing,
        overlong=overlong,
        align=align,
        shuffle=shuffle,
    )
    pools = Pools(ArrayLengths(lengths), spec, "data")
    for pool in range(pools.count):
        assert pools.count_sequences(pool) == len(pools.rows(pool, 0))
    members = np.concatenate([pools.members(pool) for pool in range(pools.count)])
    assert sorted(members.tolist()) == list(range(len(lengths)))
