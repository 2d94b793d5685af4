"""Comparison of finished runs by step or by tokens, with a verdict on each curve."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.compare.loss_curves import LossCurve
from batchloom.core.settings import raise_problems

VerdictKind = Literal["converging", "flat", "diverging", "too short"]
Floats = NDArray[np.float64]

MIN_POINTS = 20
# Change over the second half, relative to its level, below which a curve is flat even if the change is certain.
MIN_RELATIVE_CHANGE = 0.01
# Fall from the first tenth to the second half, relative to the level, below which nothing was learned.
_MIN_RELATIVE_FALL = 0.05
# Width of the interval of the slope, in standard deviations of Kendall's statistic.
_SLOPE_INTERVAL_WIDTH = 3.0
# Points at the end of the curve, and the deviations above the half's median that exclude noise.
_TAIL_POINTS, _TAIL_DEVIATIONS = 5, 6.0
# The slope takes all pairs of points, so more points than this are merged first.
_MAX_POINTS = 256
# Losses above this exceed the logarithm of any vocabulary size.
_MAX_LEVEL = 20.0

CurveAxis = Literal["step", "tokens"]
# Points at the end of a curve whose median is used, so that the noise of one step has no effect.
_COMMON_TAIL_POINTS = 10


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """Verdict on the second half of a loss curve, with its numbers.

    Attributes:
        kind: ``converging``, ``flat``, ``diverging`` or ``too short``.
        reason: the verdict with its numbers, as a sentence.
        points: number of points of the curve.
        since: start of the second half (a step, or tokens).
        level: median loss of the second half.
        fell: median of the first tenth minus ``level``.
        slope: Theil-Sen slope over the second half, per unit of x; None if there are too few points.
        low, high: bounds of the slope given the noise.
        change: slope times the length of the second half.
        least: smallest change that counts: ``MIN_RELATIVE_CHANGE`` of the level.
    """

    kind: VerdictKind
    reason: str
    points: int
    since: float
    level: float
    fell: float
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    change: float | None = None
    least: float | None = None


def judge_loss_curve(xs: Sequence[float], losses: Sequence[float], unit: str = "step") -> LossVerdict:
    """Return the verdict on a loss curve.

    The slope of the second half is the median of the slopes of all pairs of points (Theil 1950, Sen 1968), which a
    quarter of outliers does not move. Its interval is Sen's, three standard deviations from the variance of Kendall's
    statistic. It assumes no noise distribution, only that the noise is independent from point to point. Above 256
    points in the half, blocks of neighbors are replaced by their medians. A curve is ``converging`` if the complete
    interval is below 0 and the change over the half is at least 1 % of its level.
    It is ``diverging`` if the interval is above 0 by as much, if a loss is not finite, or if the last five points are
    far above the rest: a median more than six deviations (1.48 times the median distance from the half's median) and
    1 % of the level above it, which no slope shows. Otherwise it is ``flat``. Fewer than 20 points are ``too short``.

    Args:
        xs: step of each point, or tokens seen; ascending.
        losses: loss of each point, nats per token.
        unit: unit of ``xs``, for the sentence.
    """
    x, y = np.asarray(xs, np.float64), np.asarray(losses, np.float64)
    wrong = np.flatnonzero(~np.isfinite(y))
    if wrong.size:
        at = float(x[wrong[0]])
        reason = f"the loss at {unit} {at:,.0f} is {y[wrong[0]]}, which is not finite"
        return LossVerdict("diverging", reason, len(y), at, float(y[wrong[0]]), math.nan)
    half = len(y) // 2
    level = float(np.median(y[half:])) if len(y) else math.nan
    fell = float(np.median(y[: max(1, len(y) // 10)])) - level if len(y) else math.nan
    since = float(x[half]) if len(x) else 0.0
    if len(y) < MIN_POINTS:
        reason = f"{len(y)} points; a verdict needs {MIN_POINTS} or more"
        return LossVerdict("too short", reason, len(y), since, level, fell)
    slope, low, high = compute_theil_sen_slope(*_thin_points(x[half:], y[half:]))
    change, least = slope * float(x[-1] - x[half]), MIN_RELATIVE_CHANGE * abs(level)
    numbers = (len(y), since, level, fell, slope, low, high, change, least)
    end, spread = (
        float(np.median(y[-_TAIL_POINTS:])),
        1.4826 * float(np.median(abs(y[half:] - level))),
    )
    if end - level > max(_TAIL_DEVIATIONS * spread, least):
        reason = (
            f"its last {_TAIL_POINTS} points are at {end:.4f}, and the second half (from {unit} {since:,.0f}) at "
            f"{level:.4f} (deviation {spread:.4f})"
        )
        return LossVerdict("diverging", reason, *numbers)
    kind: VerdictKind = "flat"
    if high < 0 and -change >= least:
        kind = "converging"
    elif low > 0 and change >= least:
        kind = "diverging"
    part = f"{MIN_RELATIVE_CHANGE:.0%} of its level ({least:.4f})"
    why = f"{part} or more, and noise does not allow 0"
    if abs(change) < least:
        why = f"less than {part}"
    elif low <= 0 <= high:
        why = "and noise allows 0"
    reason = (
        f"{level:.4f} in the second half (from {unit} {since:,.0f}), where it changes by {change:+.4f}, {why} (slope "
        f"{slope:+.2e} per {unit}, noise allows {low:+.2e} to {high:+.2e}); it fell by {fell:.4f} before"
    )
    if kind == "flat" and 0 < level < _MAX_LEVEL and abs(fell) < _MIN_RELATIVE_FALL * level:
        reason += f"; an even guess among {math.exp(level):,.0f} ids has this loss"
    return LossVerdict(kind, reason, *numbers)


def _thin_points(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Reduce points to at most 256: the medians of blocks of neighbors."""
    if len(x) <= _MAX_POINTS:
        return x, y
    blocks = np.array_split(np.arange(len(x)), _MAX_POINTS)
    return tuple(np.array([np.median(of[block]) for block in blocks]) for of in (x, y))  # type: ignore[return-value]


def compute_theil_sen_slope(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Return the Theil-Sen slope, and lower and upper bound of Sen's interval."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    slopes: NDArray[Any] = np.sort(((y[second] - y[first])[apart > 0]) / apart[apart > 0])
    if not slopes.size:
        return 0.0, -math.inf, math.inf
    count = len(x)
    wide = _SLOPE_INTERVAL_WIDTH * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((slopes.size - wide) / 2) - 1)
    high = min(slopes.size - 1, math.ceil((slopes.size + wide) / 2))
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run compared with the first.

    Attributes:
        curve: loss curve of the run.
        verdict: verdict on the curve.
        at_common: loss at the end of the shortest run: the median of the last ten points up to there; None if the run
            begins later.
        first_apart: first step that differs from the first run by more than the tolerance; None if there is none, or
            no tolerance was given.
        common: number of steps that both runs have.
    """

    curve: LossCurve
    verdict: LossVerdict
    at_common: float | None
    first_apart: int | None
    common: int


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Result of a comparison of runs.

    Attributes:
        by: x axis of the comparison.
        until: end of the shortest run on this axis.
        tolerance: relative tolerance; None if losses were not compared with each other.
        runs: runs in the given order.
    """

    by: CurveAxis
    until: float
    tolerance: float | None
    runs: tuple[ComparedRun, ...]

    @property
    def synthetic(self) -> bool:
        """True if any run records that its data was synthetic."""
        return any(run.curve.synthetic for run in self.runs)

    @property
    def agree(self) -> bool:
        """True if no run differs by more than the tolerance or lacks common steps.

        Without a tolerance it is always True.
        """
        compared = self.tolerance is not None
        return not any(run.first_apart is not None or (compared and not run.common) for run in self.runs)


def compare_runs(curves: Sequence[LossCurve], by: CurveAxis = "step", tolerance: float | None = None) -> RunComparison:
    """Compare loss curves with the first one, and judge each.

    Args:
        curves: curves of the runs, at least one.
        by: x axis of the comparison.
        tolerance: relative tolerance of losses at common steps; None to compare none.

    Raises:
        SettingsError: ``by`` is ``tokens``, and a run has no token counts or invalid ones.
    """
    if by == "tokens":
        raise_problems([problem for curve in curves if (problem := _find_token_problem(curve))])
    until = min(get_curve_positions(curve, by)[-1] for curve in curves)
    first, runs = curves[0], []
    for curve in curves:
        xs, losses = np.array(get_curve_positions(curve, by)), np.array(curve.losses)
        tail_losses = losses[xs <= until][-_COMMON_TAIL_POINTS:]
        at_common = float(np.median(tail_losses)) if tail_losses.size else None
        common_steps = sorted({*curve.steps} & {*first.steps})
        curve_losses, first_losses = (dict(zip(c.steps, c.losses, strict=True)) for c in (curve, first))
        first_apart = None
        if tolerance is not None:
            first_apart = next(
                (s for s in common_steps if not is_close_loss(curve_losses[s], first_losses[s], tolerance)),
                None,
            )
        verdict = judge_loss_curve(get_curve_positions(curve, by), curve.losses, "token" if by == "tokens" else "step")
        runs.append(ComparedRun(curve, verdict, at_common, first_apart, len(common_steps)))
    return RunComparison(by, until, tolerance, tuple(runs))


def _find_token_problem(curve: LossCurve) -> str:
    """Explain why a run cannot be compared by tokens; empty if it can."""
    if curve.tokens is None:
        return f"by: {curve.name} does not say how many tokens it has seen; compare by step"
    previous_tokens = 0.0
    for step, tokens in zip(curve.steps, curve.tokens, strict=True):
        # This form also rejects NaN, which compares false.
        if not previous_tokens <= tokens < np.inf:
            return (
                f"by: {curve.name} says {tokens:,.0f} tokens at step {step:,}, after {previous_tokens:,.0f}; "
                "compare by step"
            )
        previous_tokens = tokens
    return ""


def get_curve_positions(curve: LossCurve, by: CurveAxis) -> tuple[float, ...]:
    """Return the x values of a curve."""
    return curve.tokens if by == "tokens" and curve.tokens is not None else curve.steps


def is_close_loss(loss: float, reference: float, tolerance: float) -> bool:
    """Return whether a loss is within a relative tolerance of the reference.

    A loss that is not finite is close to nothing.
    """
    return bool(np.isfinite(reference) and abs(loss - reference) <= tolerance * abs(reference))
