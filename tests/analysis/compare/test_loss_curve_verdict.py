"""Verdicts on loss curves: converging, flat or diverging."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.analysis.compare import judge_loss_curve
from batchloom.analysis.compare.loss_curves import (
    MIN_POINTS,
    MIN_RELATIVE_CHANGE,
    compute_theil_sen_slope,
)

# Losses of `batchloom train --model-name tiny --seq-len 64 --global-batch-size 8`: 120 steps at lr 3e-3, and 150 steps
# (137 for c4) at lr 1e-3. They come from two texts (tinyshakespeare, c4), and from uniform random tokens
# (distributed_dummy) of 257 and 900 ids.
RECORDED_LOSSES = json.loads((Path(__file__).parent / "curves.json").read_text())


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
    losses = RECORDED_LOSSES[name]
    verdict = judge_loss_curve(range(1, len(losses) + 1), losses)
    assert verdict.kind == kind, verdict.reason
    if ids is not None:
        assert verdict.level == pytest.approx(math.log(ids), rel=0.02)
        assert "an even guess among" in verdict.reason


def make_noisy_line(slope, count=100, level=3.0, noise=0.05, seed=0):
    x = np.arange(count)
    noise_values = np.random.default_rng(seed).normal(0, noise, count)
    return x, level + slope * (x - 0.75 * count) + noise_values


@given(st.floats(-0.02, 0.02), st.integers(0, 2**20), st.integers(MIN_POINTS, 1200))
def test_a_verdict_agrees_with_its_numbers(slope, seed, count):
    x, y = make_noisy_line(slope, count, seed=seed)
    verdict = judge_loss_curve(x.tolist(), y.tolist())
    assert verdict.low <= verdict.slope <= verdict.high
    agrees_with_interval = {"converging": verdict.high < 0, "diverging": verdict.low > 0, "flat": True}
    assert agrees_with_interval[verdict.kind]
    assert verdict.kind == "flat" or abs(verdict.change) >= MIN_RELATIVE_CHANGE * abs(verdict.level)


@given(st.integers(0, 2**20), st.sampled_from([-0.02, 0.02]))
def test_a_clear_trend_is_detected_in_spite_of_outliers(seed, slope):
    x, y = make_noisy_line(slope, seed=seed)
    # High losses at the very end are a divergence.
    outliers = np.random.default_rng(seed).choice(90, 5, replace=False)
    y[outliers] *= 1 + 3 * (seed % 2)
    kind = "converging" if slope < 0 else "diverging"
    assert judge_loss_curve(x.tolist(), y.tolist()).kind == kind


@given(st.integers(0, 2**20))
def test_noise_alone_is_flat(seed):
    x, y = make_noisy_line(0.0, count=400, noise=0.02, seed=seed)
    assert judge_loss_curve(x.tolist(), y.tolist()).kind == "flat"


@given(
    st.lists(st.floats(0.5, 12), min_size=MIN_POINTS, max_size=80),
    st.sampled_from([0.25, 2.0, 8.0]),
    st.integers(1, 1000),
)
def test_units_of_losses_and_steps_do_not_matter(losses, scale, step_size):
    x = list(range(len(losses)))
    kind = judge_loss_curve(x, losses).kind
    assert judge_loss_curve(x, [scale * loss for loss in losses]).kind == kind
    assert judge_loss_curve([step_size * step for step in x], losses).kind == kind


@given(st.lists(st.floats(0.5, 12), min_size=MIN_POINTS, max_size=60))
def test_reversing_time_negates_the_slope(losses):
    x = np.arange(len(losses), dtype=np.float64)
    slope, low, high = compute_theil_sen_slope(x, np.array(losses))
    reversed_fit = compute_theil_sen_slope(x, np.array(losses[::-1]))
    assert reversed_fit == pytest.approx((-slope, -high, -low), abs=1e-9)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_diverges(loss):
    verdict = judge_loss_curve(range(6), [3.0, 2.9, 2.8, loss, loss, loss])
    assert verdict.kind == "diverging"
    assert "at step 3 is" in verdict.reason


@pytest.mark.parametrize("count", [1, 2, MIN_POINTS - 1])
def test_few_points_are_too_short(count):
    verdict = judge_loss_curve(range(count), [5.0 - n for n in range(count)])
    assert (verdict.kind, verdict.points) == ("too short", count)
    assert f"a verdict needs {MIN_POINTS}" in verdict.reason


def test_a_curve_that_fell_and_levelled_off_is_flat():
    x, y = make_noisy_line(0.0)
    y[:50] += np.linspace(4, 0, 50)
    verdict = judge_loss_curve(x.tolist(), y.tolist())
    assert verdict.kind == "flat"
    assert verdict.fell == pytest.approx(3.6, abs=0.3)


@pytest.mark.parametrize(
    ("slope", "noise", "kind", "message"),
    [
        (-0.0004, 1e-4, "flat", r"changes by -0\.0\d+, less than 1% of its level"),
        (-0.004, 0.4, "flat", r"changes by -0\.\d+, and noise allows 0 "),
        (-0.02, 0.05, "converging", "or more, and noise does not allow 0 "),
        (0.02, 0.05, "diverging", "or more, and noise does not allow 0 "),
    ],
)
def test_the_reason_names_the_deciding_criterion(slope, noise, kind, message):
    verdict = judge_loss_curve(*(values.tolist() for values in make_noisy_line(slope, noise=noise, seed=1)))
    assert verdict.kind == kind
    assert re.search(message, verdict.reason), verdict.reason
    assert (abs(verdict.change) < verdict.least) == ("less than" in message)


def test_an_even_guess_is_named_only_without_learning():
    x, y = make_noisy_line(0.0)
    assert "an even guess among" in judge_loss_curve(x.tolist(), y.tolist()).reason
    y[:50] += np.linspace(1.3, 0, 50)
    verdict = judge_loss_curve(x.tolist(), y.tolist())
    assert verdict.kind == "flat"
    assert "even guess" not in verdict.reason


def test_points_of_one_step_have_no_slope():
    assert compute_theil_sen_slope(np.ones(5), np.arange(5.0))[0] == 0


@pytest.mark.parametrize("slope", [-0.01, 0.0])
@pytest.mark.parametrize("spike_count", [5, 10, 40])
def test_a_run_that_blew_up_at_its_end_diverges(slope, spike_count):
    x, losses = make_noisy_line(slope, count=400)
    kind = judge_loss_curve(x, losses).kind
    one_spike, late_spikes = losses.copy(), losses.copy()
    one_spike[-1], late_spikes[-spike_count:] = 1e9, 99.0
    verdict = judge_loss_curve(x, late_spikes)
    assert (verdict.kind, "its last 5 points are at 99.0000" in verdict.reason) == ("diverging", True)
    assert judge_loss_curve(x, one_spike).kind == kind != "diverging"
