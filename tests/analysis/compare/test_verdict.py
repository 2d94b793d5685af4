"""Whether a loss curve goes down, stays, or goes up."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.analysis.compare import judge_loss_curve
from batchloom.analysis.compare.verdict import (
    MIN_POINTS,
    MIN_RELATIVE_CHANGE,
    compute_theil_sen_slope,
)

# Losses of `batchloom train --model-name tiny --seq-len 64 --global-batch-size 8`, 120 steps at lr 3e-3 and 150 (of c4 the
# first 137) at
# 1e-3: on two texts (tinyshakespeare, c4), and on uniform random tokens (distributed_dummy) of 257 and 900 ids.
REAL = json.loads((Path(__file__).parent / "curves.json").read_text())


@pytest.mark.parametrize(
    ("name", "kind", "ids"),
    [
        ("text", "converging", None),
        ("text 2", "converging", None),
        ("random", "flat", 257),
        ("random 2", "flat", 900),
    ],
)
def test_text_converges_and_random_tokens_are_flat_at_an_even_guess(name, kind, ids):
    losses = REAL[name]
    found = judge_loss_curve(range(1, len(losses) + 1), losses)
    assert found.kind == kind, found.reason
    if ids is not None:
        assert found.level == pytest.approx(math.log(ids), rel=0.02)
        assert "an even guess among" in found.reason


def line(slope, count=100, level=3.0, noise=0.05, seed=0):
    x = np.arange(count)
    bumps = np.random.default_rng(seed).normal(0, noise, count)
    return x, level + slope * (x - 0.75 * count) + bumps


@given(st.floats(-0.02, 0.02), st.integers(0, 2**20), st.integers(MIN_POINTS, 1200))
def test_a_verdict_says_what_its_numbers_say(slope, seed, count):
    x, y = line(slope, count, seed=seed)
    found = judge_loss_curve(x.tolist(), y.tolist())
    assert found.low <= found.slope <= found.high
    sure = {"converging": found.high < 0, "diverging": found.low > 0, "flat": True}
    assert sure[found.kind]
    assert found.kind == "flat" or abs(found.change) >= MIN_RELATIVE_CHANGE * abs(found.level)


@given(st.integers(0, 2**20), st.sampled_from([-0.02, 0.02]))
def test_a_plain_trend_is_found_and_a_few_wild_points_change_nothing(seed, slope):
    x, y = line(slope, seed=seed)
    wild = np.random.default_rng(seed).choice(100, 5, replace=False)
    y[wild] *= 1 + 3 * (seed % 2)
    kind = "converging" if slope < 0 else "diverging"
    assert judge_loss_curve(x.tolist(), y.tolist()).kind == kind


@given(st.integers(0, 2**20))
def test_noise_alone_is_flat(seed):
    x, y = line(0.0, count=400, noise=0.02, seed=seed)
    assert judge_loss_curve(x.tolist(), y.tolist()).kind == "flat"


@given(
    st.lists(st.floats(0.5, 12), min_size=MIN_POINTS, max_size=80),
    st.sampled_from([0.25, 2.0, 8.0]),
    st.integers(1, 1000),
)
def test_units_of_losses_and_steps_decide_nothing(losses, scale, every):
    x = list(range(len(losses)))
    kind = judge_loss_curve(x, losses).kind
    assert judge_loss_curve(x, [scale * loss for loss in losses]).kind == kind
    assert judge_loss_curve([every * step for step in x], losses).kind == kind


@given(st.lists(st.floats(0.5, 12), min_size=MIN_POINTS, max_size=60))
def test_turned_around_in_time_the_slope_is_the_other(losses):
    x = np.arange(len(losses), dtype=np.float64)
    slope, low, high = compute_theil_sen_slope(x, np.array(losses))
    back = compute_theil_sen_slope(x, np.array(losses[::-1]))
    assert back == pytest.approx((-slope, -high, -low), abs=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_no_number_diverges(wrong):
    found = judge_loss_curve(range(6), [3.0, 2.9, 2.8, wrong, wrong, wrong])
    assert found.kind == "diverging"
    assert "at step 3 is" in found.reason


@pytest.mark.parametrize("count", [1, 2, MIN_POINTS - 1])
def test_few_points_are_too_short(count):
    found = judge_loss_curve(range(count), [5.0 - n for n in range(count)])
    assert (found.kind, found.points) == ("too short", count)
    assert f"a verdict needs {MIN_POINTS}" in found.reason


def test_what_fell_before_and_stays_is_flat_and_says_so():
    x, y = line(0.0)
    y[:50] += np.linspace(4, 0, 50)
    found = judge_loss_curve(x.tolist(), y.tolist())
    assert found.kind == "flat"
    assert found.fell == pytest.approx(3.6, abs=0.3)


@pytest.mark.parametrize(
    ("slope", "noise", "kind", "said"),
    [
        (-0.0004, 1e-4, "flat", r"changes by -0\.0\d+, less than 1% of its level"),
        (-0.004, 0.4, "flat", r"changes by -0\.\d+, and noise allows 0 "),
        (-0.02, 0.05, "converging", "or more, and noise does not allow 0 "),
        (0.02, 0.05, "diverging", "or more, and noise does not allow 0 "),
    ],
)
def test_the_reason_is_what_decided(slope, noise, kind, said):
    found = judge_loss_curve(*(values.tolist() for values in line(slope, noise=noise, seed=1)))
    assert found.kind == kind
    assert re.search(said, found.reason), found.reason
    assert (abs(found.change) < found.least) == ("less than" in said)


def test_an_even_guess_is_told_of_what_never_learned_alone():
    x, y = line(0.0)
    assert "an even guess among" in judge_loss_curve(x.tolist(), y.tolist()).reason
    y[:50] += np.linspace(1.3, 0, 50)
    found = judge_loss_curve(x.tolist(), y.tolist())
    assert found.kind == "flat"
    assert "even guess" not in found.reason


def test_points_of_one_step_have_no_slope():
    assert compute_theil_sen_slope(np.ones(5), np.arange(5.0))[0] == 0


@pytest.mark.parametrize("slope", [-0.01, 0.0])
@pytest.mark.parametrize("wild", [5, 10, 40])
def test_a_run_that_blew_up_at_its_end_diverges(slope, wild):
    x, losses = line(slope, count=400)
    kind = judge_loss_curve(x, losses).kind
    one, many = losses.copy(), losses.copy()
    one[-1], many[-wild:] = 1e9, 99.0
    found = judge_loss_curve(x, many)
    assert (found.kind, "its last 5 points are at 99.0000" in found.reason) == ("diverging", True)
    assert judge_loss_curve(x, one).kind == kind != "diverging"
