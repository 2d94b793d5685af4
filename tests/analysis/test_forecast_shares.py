"""Sequences of each source by ranges of steps, against the rows of the plan."""

import numpy as np
import pytest

from batchloom import Edit, Mixture, Plan, PlanSpec
from batchloom.analysis import forecast_shares
from batchloom.plan import Stage
from batchloom.testing import write_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    return {
        name: write_store(folder / name, [[1] * int(length) for length in rng.integers(2, 30, count)])
        for name, count in (("web", 400), ("code", 90), ("math", 40))
    }


def count_rows(plan, first, stop):
    """Count the rows of each source in steps; a row holds one source."""
    counts = {}
    for step in range(first, stop):
        rows = plan.rows(*plan.positions_of(step))
        filled = np.diff(rows.pointers) > 0
        for number in rows.sources[rows.pointers[:-1][filled]].tolist():
            counts[plan.names[number]] = counts.get(plan.names[number], 0) + 1
    return counts


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("exhausted", ["repeat", "redistribute"])
def test_windows_count_the_rows_of_their_steps(stores, lanes, exhausted):
    weights = {"web": 0.6, "code": 0.3, "math": 0.1}
    stages = [Stage(step=20, weights={"web": 0.2, "code": 0.3, "math": 0.5})]
    mixture = Mixture(weights, stores=stores, stages=stages, exhausted=exhausted)
    edits = [Edit(step=41, weights={"web": 1, "code": 2}), Edit(step=50, skip=3, global_batch_size=8)]
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=6, steps=60, lanes=lanes), edits)
    steps = min(60, plan.steps)
    windows = forecast_shares(plan, 3, steps, windows=9)
    assert [windows[0].first, windows[-1].stop] == [3, steps]
    for window in windows:
        counts = {name: count for name, count in window.sequences.items() if count}
        assert counts == count_rows(plan, window.first, window.stop)
        assert sum(window.expected.values()) == pytest.approx(sum(counts.values()))
        assert all(abs(deviation) < lanes for deviation in window.deviations.values())


def test_an_empty_range_has_no_window(stores):
    mixture = Mixture({"web": 1, "code": 1}, stores={name: stores[name] for name in ("web", "code")})
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=6, steps=60))
    assert forecast_shares(plan, 5, 5, windows=9) == ()
