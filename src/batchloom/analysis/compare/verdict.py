"""Whether a loss curve goes down, stays where it is, or goes up: a pure function of its points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

VerdictKind = Literal["converging", "flat", "diverging", "too short"]
Floats = NDArray[np.float64]

MIN_POINTS = 20
# Change over the second part, as a share of its level, below which a curve is flat however sure it is.
MIN_RELATIVE_CHANGE = 0.01
# A fall from the first tenth to the second half, as a share of the level, below which nothing was ever learned.
_MIN_RELATIVE_FALL = 0.05
# Width of the interval of the slope, in standard deviations of Kendall's statistic.
_SLOPE_INTERVAL_WIDTH = 3.0
# Of the end: so many points, whose median is so many deviations above the half's, are no noise.
_TAIL_POINTS, _TAIL_DEVIATIONS = 5, 6.0
# All pairs of points are looked at; more points than this are put together first.
_MAX_POINTS = 256
# A loss whose exponential is no number of ids.
_MAX_LEVEL = 20.0


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """What a loss curve does in its second half, and the numbers this is from.

    Attributes:
        kind: ``converging``, ``flat``, ``diverging`` or ``too short``.
        reason: the same with its numbers, as a sentence for people.
        points: of the curve.
        since: where the second half begins (a step, or tokens).
        level: the median loss of the second half.
        fell: by how much the median of the first tenth is above it.
        slope: Theil-Sen slope over the second half, a unit of x; None where there are too few points.
        low, high: the bounds of the slope that noise allows.
        change: what the slope comes to over the second half.
        least: the change that would be told of: ``MIN_RELATIVE_CHANGE`` of the level.
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
    """The verdict on a curve.

    The slope of the second half is the median of the slopes of all pairs of points (Theil 1950, Sen 1968), which a
    quarter of wild points does not move. How far noise alone would move it is Sen's interval from the variance of
    Kendall's statistic, of three standard deviations: no shape of the noise is assumed, only that it is independent
    from point to point. Above 256 points in the half, blocks of neighbours are put together as their medians. A curve
    is ``converging`` where the whole interval is below 0 and the change over the half is 1 % of its level or more;
    ``diverging`` where it is above 0 by as much, where a loss is no finite number, or where the last five points are
    far above the rest: a median more than six deviations (1.48 times the median distance from the half's median) and
    1 % of the level above it, which no slope shows; else ``flat``. Fewer than 20 points are ``too short``.

    Args:
        xs: of each point its step, or the tokens seen; ascending.
        losses: of each point, nats a token.
        unit: what ``xs`` counts, for the sentence.
    """
    x, y = np.asarray(xs, np.float64), np.asarray(losses, np.float64)
    wrong = np.flatnonzero(~np.isfinite(y))
    if wrong.size:
        at = float(x[wrong[0]])
        reason = f"the loss at {unit} {at:,.0f} is {y[wrong[0]]}, no finite number"
        return LossVerdict("diverging", reason, len(y), at, float(y[wrong[0]]), math.nan)
    half = len(y) // 2
    level = float(np.median(y[half:])) if len(y) else math.nan
    fell = float(np.median(y[: max(1, len(y) // 10)])) - level if len(y) else math.nan
    since = float(x[half]) if len(x) else 0.0
    if len(y) < MIN_POINTS:
        reason = f"{len(y)} points; a verdict takes {MIN_POINTS} or more"
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
            f"{level:.4f} "
            f"(deviation {spread:.4f})"
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
        f"{slope:+.2e} a {unit}, noise allows {low:+.2e} to {high:+.2e}); it fell by {fell:.4f} before"
    )
    if kind == "flat" and 0 < level < _MAX_LEVEL and abs(fell) < _MIN_RELATIVE_FALL * level:
        reason += f"; an even guess among {math.exp(level):,.0f} ids has this loss"
    return LossVerdict(kind, reason, *numbers)


def _thin_points(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most 256 points: the medians of blocks of neighbours."""
    if len(x) <= _MAX_POINTS:
        return x, y
    blocks = np.array_split(np.arange(len(x)), _MAX_POINTS)
    return tuple(np.array([np.median(of[block]) for block in blocks]) for of in (x, y))  # type: ignore[return-value]


def compute_theil_sen_slope(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Theil-Sen slope of points, and the lower and the upper bound of Sen's interval around it."""
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
