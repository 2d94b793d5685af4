"""Pinned orders: a change affects every run and needs a new ``order_version``."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from batchloom import Edit, Mixture, Plan, PlanSpec
from batchloom.plan import ORDER_VERSION, Schedule, SourceSpec, Stage
from plan.length_stores import LengthStore

STORES = {
    "a": LengthStore([5, 3, 8, 2, 7, 4, 1, 6, 3, 9], "a"),
    "b": LengthStore([4, 6, 2, 8], "b"),
    "c": LengthStore([3, 3, 3, 3, 3], "c"),
}
SPEC = PlanSpec(seq_len=8, global_batch_size=2, pool_size=4, steps=6)
TWO = {"a": 3, "b": 1}


def make_mixture_plan(weights=TWO, spec=SPEC, edits=(), **settings):
    return Plan(Mixture(weights, stores=STORES, **settings), spec, [Edit(**edit) for edit in edits])


def make_single_plan(spec=SPEC, edits=()):
    return Plan(STORES["a"], spec, [Edit(**edit) for edit in edits])


LANES = replace(SPEC, lanes=2)
ENDLESS = replace(SPEC, steps=None)
PLANS = {
    "one store": make_single_plan,
    "one store, 2 lanes": lambda: make_single_plan(LANES),
    "one store, seq_len 12 from step 2": lambda: make_single_plan(edits=[{"step": 2, "seq_len": 12}]),
    "mixture": lambda: make_mixture_plan({"a": 3, "b": 2, "c": 1}),
    "mixture in documents": lambda: make_mixture_plan({"a": 1, "b": 1}, unit="documents"),
    "mixture in epochs": lambda: make_mixture_plan({"a": 1, "b": 1}, unit="epochs"),
    "mixture by size": lambda: make_mixture_plan("size", temperature=2),
    "mixture by size, capped": lambda: make_mixture_plan("size", most_epochs=2.0),
    "mixture with groups": lambda: make_mixture_plan({"a": 1, "g": {"weight": 1, "sources": {"b": 2, "c": 1}}}),
    "mixture with a seed of its own": lambda: make_mixture_plan(sources={"b": SourceSpec(seed=7)}),
    "mixture, 2 lanes": lambda: make_mixture_plan(spec=LANES),
    "mixture unshuffled": lambda: make_mixture_plan(spec=replace(SPEC, shuffle=False)),
    "mixture wrapped": lambda: make_mixture_plan(spec=replace(SPEC, packing="wrap")),
    "mixture in blocks": lambda: make_mixture_plan(spec=replace(SPEC, block=2)),
    "mixture, aligned": lambda: make_mixture_plan(spec=replace(SPEC, align=4)),
    "stages": lambda: make_mixture_plan(
        stages=[Stage(weights={"b": 1}, step=2), Stage(weights={"c": 1, "b": 1}, step=4)]
    ),
    "stage by tokens": lambda: make_mixture_plan(stages=[Stage(weights={"b": 1}, tokens=33)]),
    "stop": lambda: make_mixture_plan(spec=ENDLESS, exhausted="stop", sources={"b": SourceSpec(epochs=2)}),
    "redistribute": lambda: make_mixture_plan({"a": 1, "b": 2}, ENDLESS, exhausted="redistribute"),
    "redistribute, 2 lanes": lambda: make_mixture_plan(
        {"a": 1, "b": 2}, replace(LANES, steps=None), exhausted="redistribute"
    ),
    "weights from step 2": lambda: make_mixture_plan(edits=[{"step": 2, "weights": {"a": 1, "c": 1}}]),
    "3 steps skipped at step 2": lambda: make_mixture_plan(edits=[{"step": 2, "skip": 3}]),
    "a ban from step 1": lambda: make_mixture_plan(edits=[{"step": 1, "ban": {"a": [4, 0]}}]),
    "batches of 3 from step 2": lambda: make_mixture_plan(edits=[{"step": 2, "global_batch_size": 3}]),
    "seq_len 12 from step 2": lambda: make_mixture_plan(edits=[{"step": 2, "seq_len": 12}]),
    "seq_len 12 from step 2, 2 lanes": lambda: make_mixture_plan(spec=LANES, edits=[{"step": 2, "seq_len": 12}]),
    "one store, 4 lanes, seq_len 12 and 5": lambda: make_single_plan(
        replace(SPEC, lanes=4, global_batch_size=4, pool_size=2, steps=8),
        edits=[{"step": 1, "seq_len": 12}, {"step": 4, "seq_len": 5}],
    ),
    "every edit, 2 lanes": lambda: make_mixture_plan(
        spec=LANES,
        edits=[
            {"step": 1, "weights": {"a": 1, "b": 1, "c": 1}},
            {"step": 2, "skip": 1, "global_batch_size": 4},
            {"step": 3, "ban": {"c": [0, 1, 2]}, "note": "asked for by its author"},
        ],
    ),
    "every edit": lambda: make_mixture_plan(
        edits=[
            {"step": 1, "seq_len": 5},
            {"step": 2, "skip": 1, "global_batch_size": 4, "seq_len": 12},
            {"step": 3, "ban": {"b": [3]}, "weights": {"a": 1, "b": 1, "c": 1}},
        ]
    ),
}


def describe_plan(plan):
    """Return steps separated by |, rows by commas; banned spans end with !."""
    steps = []
    for step in range(plan.steps):
        rows = plan.rows(*plan.positions_of(step))
        banned = np.zeros(len(rows.documents), bool) if rows.banned is None else rows.banned
        spans = [
            f"{plan.names[s] if len(plan.names) > 1 else ''}{d}[{a}:{a + n}]{'!' * bool(b)}"
            for s, d, a, n, b in zip(rows.sources, rows.documents, rows.starts, rows.lengths, banned, strict=True)
        ]
        pointers = rows.pointers.tolist()
        steps.append(", ".join(" ".join(spans[a:b]) for a, b in pairwise(pointers)).strip())
    return " | ".join(steps)


GOLDENS = {
    "one store": (
        "631965637dcd29aff4d3a98bb06e0240",
        "8[0:3], 4[0:7] 9[8:9] | 7[0:6], 9[0:8] | 0[0:5] 3[0:2], 2[0:8] | 6[0:1] 1[0:3] 5[0:4], 0[0:5] 3[0:2] | 8[0:3], 9[0:8] | 7[0:6], 4[0:7] 9[8:9]",
    ),
    "one store, 2 lanes": (
        "56223b07fa1f125d829b27a4c5d25ac2",
        "8[0:3], 2[0:8] | 4[0:7] 9[8:9], 6[0:1] 1[0:3] 5[0:4] | 7[0:6], 0[0:5] 3[0:2] | 9[0:8], 6[0:1] 1[0:3] 5[0:4] | 0[0:5] 3[0:2], 2[0:8] | 8[0:3], 7[0:6]",
    ),
    "one store, seq_len 12 from step 2": (
        "d4f1dcf5178b9c7a3d8918f985f5372f",
        "8[0:3], 4[0:7] 9[8:9] | 7[0:6], 9[0:8] | 0[0:5] 3[0:2], 6[0:1] 1[0:3] | 2[0:8] 5[0:4], 0[0:5] 3[0:2] | 7[0:6], 4[0:7] | 8[0:3] 9[0:9], 2[0:8] 5[0:4]",
    ),
    "mixture": (
        "a77fdbd5d1db316aa791658556158ac1",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | b0[0:4], a9[0:8] | c1[0:3], b2[0:2] b1[0:6] | a8[0:3], a2[0:8] | b3[0:8], a0[0:5] | c4[0:3] c3[0:3], b0[0:4]",
    ),
    "mixture in documents": (
        "7f05f12ae82ee1cb70ce06c7493e6b03",
        "a3[0:2], b0[0:4] | a1[0:3] a5[0:4] a9[8:9], b2[0:2] b1[0:6] | a9[0:8], b3[0:8] | a8[0:3], b0[0:4] | a2[0:8], b2[0:2] b1[0:6] | a0[0:5], b3[0:8]",
    ),
    "mixture in epochs": (
        "bb4709f1bd0e21877310b38ca27855ba",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | b0[0:4], a9[0:8] | a8[0:3], a2[0:8] | b2[0:2] b1[0:6], a0[0:5] | a4[0:7] a6[0:1], b3[0:8] | a7[0:6], a7[0:6]",
    ),
    "mixture by size": (
        "f6d21eb2611f0c21dfbc6f78b3ca5c96",
        "a3[0:2], b0[0:4] | c1[0:3], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b2[0:2] b1[0:6] | c4[0:3] c3[0:3], a8[0:3] | b3[0:8], a2[0:8] | c2[0:3] c0[0:3], a0[0:5]",
    ),
    "mixture by size, capped": (
        "85b2a15a0cc9c5082c6739f40520b026",
        "a3[0:2], b0[0:4] | c1[0:3], a1[0:3] a5[0:4] a9[8:9] | b2[0:2] b1[0:6], c4[0:3] c3[0:3] | a9[0:8], b3[0:8] | c2[0:3] c0[0:3], a8[0:3] | b0[0:4], c2[0:3] c0[0:3]",
    ),
    "mixture with groups": (
        "baf29f1cc8ceffa4d1e13f1199d847c6",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | b0[0:4], a9[0:8] | c1[0:3], b2[0:2] b1[0:6] | a8[0:3], a2[0:8] | b3[0:8], a0[0:5] | c4[0:3] c3[0:3], b0[0:4]",
    ),
    "mixture with a seed of its own": (
        "318e187acb8060b9d8a76e85ca2f63a4",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a8[0:3], a2[0:8] | a0[0:5], b1[0:6] b2[0:2] | a4[0:7] a6[0:1], a7[0:6] | a7[0:6], b3[0:8]",
    ),
    "mixture, 2 lanes": (
        "0ed3266b82480bb22b71ec85f5df907a",
        "a8[0:3], a3[0:2] | a2[0:8], a1[0:3] a5[0:4] a9[8:9] | a0[0:5], a9[0:8] | b0[0:4], b3[0:8] | a4[0:7] a6[0:1], a7[0:6] | a7[0:6], a3[0:2]",
    ),
    "mixture unshuffled": (
        "9b5019ca99bb8e18ab43d4beb165b303",
        "a0[0:5] a1[0:3], a2[0:8] | a3[0:2], b0[0:4] | a4[0:7] a6[0:1], a5[0:4] | a7[0:6], b1[0:6] b2[0:2] | a8[0:3] a9[8:9], a9[0:8] | a0[0:5] a1[0:3], b3[0:8]",
    ),
    "mixture wrapped": (
        "47542264e32890d9a2dd496d95428278",
        "a1[2:3] a9[0:7], a3[0:2] a5[0:4] a1[0:2] | a9[7:9], b1[4:6] b2[0:2] b3[0:4] | a8[0:3] a2[0:5], a2[5:8] | a0[2:5], b0[0:4] b1[0:4] | a4[0:7] a7[0:1], a7[1:6] a6[0:1] a0[0:2] | a7[1:6] a6[0:1] a0[0:2], b3[4:8]",
    ),
    "mixture in blocks": (
        "d6618894a63a701a0aef062f3201aa2f",
        "a6[0:1], a3[0:2] a7[0:6] | a2[0:8], b0[0:4] | a4[0:7], a5[0:4] | a9[0:8], b2[0:2] b1[0:6] | a8[0:3] a0[0:5], a9[8:9] a1[0:3] | a9[8:9] a1[0:3], b3[0:8]",
    ),
    "mixture, aligned": (
        "9390c0cec5c691b995b55be01c133bef",
        "a1[0:3] a9[8:9], a5[0:4] a3[0:2] | a9[0:8], a8[0:3] | b1[0:6], a2[0:8] | a7[0:6], a6[0:1] | a0[0:5], b0[0:4] b2[0:2] | a4[0:7], a4[0:7]",
    ),
    "stages": (
        "a27b3e6479ddc230cf866d9c33058768",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | b2[0:2] b1[0:6], b3[0:8] | b0[0:4], b2[0:2] b1[0:6] | c1[0:3], b3[0:8] | c4[0:3] c3[0:3], b2[0:2] b1[0:6]",
    ),
    "stage by tokens": (
        "0c7192cd7d94a858b30c6200e2995f9e",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a8[0:3], a2[0:8] | b2[0:2] b1[0:6], b3[0:8] | b0[0:4], b2[0:2] b1[0:6] | b3[0:8], b2[0:2] b1[0:6]",
    ),
    "stop": (
        "9fb46c26f0b46b9a95dc30b79dfdeb2d",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a8[0:3], a2[0:8] | a0[0:5], b2[0:2] b1[0:6] | a4[0:7] a6[0:1], a7[0:6]",
    ),
    "redistribute": (
        "d436973e036fe8844a8f15fc40b6ac76",
        "b0[0:4], a3[0:2] | b2[0:2] b1[0:6], b3[0:8] | a1[0:3] a5[0:4] a9[8:9], a9[0:8] | a8[0:3], a2[0:8] | a0[0:5], a4[0:7] a6[0:1] | a7[0:6],",
    ),
    "redistribute, 2 lanes": (
        "e58df1eb3a298390133c4f0762a97174",
        "b0[0:4], b3[0:8] | a8[0:3], a3[0:2] | b2[0:2] b1[0:6], a2[0:8] | a1[0:3] a5[0:4] a9[8:9], a0[0:5] | a9[0:8], a4[0:7] a6[0:1] | a7[0:6],",
    ),
    "weights from step 2": (
        "cf1f6b1cd11e141a88afd52ef4e2c2b6",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | c1[0:3], a8[0:3] | c4[0:3] c3[0:3], a2[0:8] | c2[0:3] c0[0:3], a0[0:5] | c2[0:3] c0[0:3], a4[0:7] a6[0:1]",
    ),
    "3 steps skipped at step 2": (
        "73ae610b32a6d1cced3c3a76cb36a4a1",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a7[0:6], b3[0:8] | a4[0:7] a6[0:1], a0[0:5] | a3[0:2], b0[0:4] | a9[0:8], a1[0:3] a5[0:4] a9[8:9]",
    ),
    "a ban from step 1": (
        "8e83f4ebf617aedb869c7574831eedb2",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a8[0:3], a2[0:8] | a0[0:5]!, b2[0:2] b1[0:6] | a4[0:7]! a6[0:1], a7[0:6] | a7[0:6], b3[0:8]",
    ),
    "batches of 3 from step 2": (
        "535d5a32266e8b87c2e7fd824bdd0ead",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a8[0:3], a2[0:8], a0[0:5] | b2[0:2] b1[0:6], a4[0:7] a6[0:1], a7[0:6] | a7[0:6], b3[0:8], a4[0:7] a6[0:1] | a0[0:5], a3[0:2], b0[0:4]",
    ),
    "seq_len 12 from step 2": (
        "62fb5fc5e59f9378bd584eb6e14c3ee5",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:8], b0[0:4] | a2[0:8] a8[0:3], a4[0:7] a0[0:5] | a6[0:1] a7[0:6], b2[0:2] b3[0:8] | a6[0:1] a7[0:6], a4[0:7] a0[0:5] | a5[0:4] a3[0:2], b1[0:6]",
    ),
    "seq_len 12 from step 2, 2 lanes": (
        "869f7a8e0b975794490d96a05a36fc47",
        "a8[0:3], a3[0:2] | a2[0:8], a1[0:3] a5[0:4] a9[8:9] | a7[0:6], a0[0:5] a4[0:7] | a6[0:1] a9[0:8], a5[0:4] a3[0:2] | a6[0:1] a7[0:6], a1[0:3] a9[0:9] | b2[0:2] b1[0:6], b0[0:4] b3[0:8]",
    ),
    "one store, 4 lanes, seq_len 12 and 5": (
        "023d770712f76a8daf4888817e4fdb78",
        "4[0:7], 9[0:8], 2[0:8], 6[0:1] 5[0:4] | 8[0:3] 1[0:3] 3[0:2], 9[8:9] 0[0:5] 7[0:6], 1[0:3] 2[0:8], 6[0:1] 5[0:4] | 0[0:5] 3[0:2], 9[0:9], 8[0:3] 4[0:7], 7[0:6] | 0[0:5] 3[0:2], 9[0:9], 1[0:3] 2[0:8], 6[0:1] 5[0:4] | 4[0:5], 7[5:6], 8[0:3] 4[5:7], 7[0:5] | 8[0:3] 4[5:7], 9[0:5], 1[0:3], 6[0:1] 5[0:4] | 4[0:5], 7[5:6] 9[5:9], 2[5:8], 3[0:2] | 0[0:5], 7[0:5], 2[0:5], 6[0:1] 5[0:4]",
    ),
    "every edit, 2 lanes": (
        "3ea0d006f231687c7d794815d4eadc96",
        "a8[0:3], a3[0:2] | c4[0:3] c3[0:3], c1[0:3] | b0[0:4], b3[0:8], c2[0:3] c0[0:3], c1[0:3] | a0[0:5], a9[0:8], b2[0:2] b1[0:6], b2[0:2] b1[0:6] | c2[0:3]! c0[0:3]!, c4[0:3] c3[0:3], a4[0:7] a6[0:1], a7[0:6] | b0[0:4], b3[0:8], c2[0:3]! c0[0:3]!, c1[0:3]!",
    ),
    "every edit": (
        "1358e363626b670876b5720096871253",
        "a3[0:2], a1[0:3] a5[0:4] a9[8:9] | a9[0:5], a9[5:8] | a2[5:8] a8[0:3], a4[0:7] a0[0:5], a6[0:1] a7[0:6], b0[0:4] b1[0:6] b2[0:2] | a6[0:1] a7[0:6], b3[5:8]!, c1[0:3], a4[0:7] a0[0:5] | b2[0:2] b1[0:6], c4[0:3] c2[0:3] c0[0:3] c3[0:3], a5[0:4] a3[0:2], b0[0:4] b3[0:8]! | a1[0:3] a9[0:9], c4[0:3] c2[0:3] c0[0:3] c3[0:3], b0[0:4] b3[0:8]!, a2[0:8] a8[0:3]",
    ),
}


def test_every_golden_is_of_this_version():
    assert ORDER_VERSION == 1
    assert set(GOLDENS) == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_the_order_is_the_pinned_one(name):
    plan = PLANS[name]()
    assert (plan.fingerprint, describe_plan(plan)) == GOLDENS[name]


@pytest.mark.parametrize(
    ("counts", "expected_sources"),
    [((5, 2, 1), "0010010200100102"), ((4, 2, 2), "0102010201020102"), ((3, 3, 2), "0120101201201012"), ((6,), "0000")],
)
def test_the_schedule_is_the_pinned_one(counts, expected_sources):
    assert "".join(map(str, Schedule(counts).at(np.arange(len(expected_sources)))[0])) == expected_sources


def test_a_long_schedule_is_the_pinned_one():
    sources, numbers = Schedule((*range(1, 101), 6)).at(np.arange(20_000, 30_000))
    weights = np.arange(1, 10_001)
    assert [int((weights * values).sum()) for values in (sources, numbers)] == [3303724008, 17643160426]
