"""Curves over steps as drawings: points that stay within a bound, axes and spikes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Points of a drawing: one per two pixels of a wide page.
MOST_POINTS = 480
_SIZE = 1000.0
_MARGIN = 0.04
_SPIKE_STEPS = 25
# A normal deviation is this multiple of the median of absolute deviations.
_DEVIATION = 1.4826
_SPIKE_DEVIATIONS = 4.0
# In a million steps some ordinary rises exceed any number of deviations, but they are small beside a real spike.
_SPIKE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A point that opens a step.

    Attributes:
        step, value: step, and its value; None if that is not finite.
        x, y: position in percent.
        left, width: range in percent that the point answers to.
    """

    step: int
    value: float | None
    x: float
    y: float
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class ShareColumn:
    """Shares of the sources in a range of steps; positions and sizes in percent.

    Attributes:
        left, width: position and size of the range.
        parts: (colour, top, height) of each source, from the bottom up.
        lines: lines of its description.
    """

    left: float
    width: float
    parts: list[tuple[int, float, float]]
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of values over steps.

    Attributes:
        first, last: range of steps.
        line, smooth: points of polylines in thousandths; parts are separate, as values may be missing.
        points: points that open a step; the value of each is the largest of its steps.
        dots: positions in percent of evaluations, and their meaning.
        x_ticks, y_ticks: (percent, label) of the axes.
        marks: positions in percent of vertical lines, and their meaning.
    """

    first: int
    last: int
    line: list[str]
    smooth: list[str]
    points: list[ChartPoint]
    dots: list[tuple[float, float, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]] = field(default_factory=list)

    def locate(self, step: float) -> float:
        """Return the position of a step in percent."""
        return 100 * _get_share(step, self.first, self.last)


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose loss is far above the mean of the steps before it."""

    step: int
    loss: float
    rise: float


@dataclass(frozen=True, slots=True)
class _Axes:
    """Ranges of a drawing: steps, and values or their exponents."""

    first: int
    last: int
    low: float
    high: float

    def get_x(self, step: float) -> float:
        """Return the position of a step, 0 to 1."""
        return _get_share(step, self.first, self.last)

    def get_y(self, value: float) -> float:
        """Return the position of a value from the top, 0 to 1."""
        return 1 - (value - self.low) / (self.high - self.low)


def make_chart(
    steps: Ints,
    values: Floats,
    *,
    means: Floats | None = None,
    logarithmic: bool = False,
    evaluations: Sequence[tuple[int, float]] = (),
    small: bool = False,
) -> Chart | None:
    """Draw values over steps; None without any step.

    Args:
        steps: steps, int64 [N], ascending.
        values: a value of each step, float64 [N]; NaN where there is none.
        means: a mean for each step, drawn as a second line, float64 [N]; None for no second line.
        logarithmic: whether the axis is logarithmic. Values of 0 and less are then left out.
        evaluations: (step, value) of further points.
        small: whether it is a small drawing, whose axis begins at 0.
    """
    if not len(steps):
        return None
    scaled = _scale(values, logarithmic=logarithmic)
    scaled_evaluations = _scale(np.array([value for _, value in evaluations], np.float64), logarithmic=logarithmic)
    scaled_means = _scale(np.empty(0) if means is None else means, logarithmic=logarithmic)
    low, high = _choose_range(np.concatenate([scaled, scaled_means, scaled_evaluations]), from_zero=small)
    axes = _Axes(int(steps[0]), int(steps[-1]), low, high)
    buckets = [*pairwise(list_bucket_bounds(steps, MOST_POINTS))]
    ends = [stop - 1 for _, stop in buckets] if len(scaled_means) else []
    ticks = list_logarithmic_ticks(low, high) if logarithmic else [(tick, tick) for tick in list_ticks(low, high)]
    step_ticks = list_step_ticks(axes.first, axes.last, 3 if small else 6)
    return Chart(
        first=axes.first,
        last=axes.last,
        line=_draw_lines(steps, scaled, _list_extremes(scaled, buckets), axes),
        smooth=_draw_lines(steps, scaled_means, ends, axes),
        points=[_make_point(steps, values, scaled, bucket, axes) for bucket in buckets],
        dots=_place_evaluations(evaluations, scaled_evaluations, axes),
        x_ticks=[(100 * axes.get_x(tick), label) for tick, label in step_ticks],
        y_ticks=[(100 * axes.get_y(position), format_tick(tick)) for position, tick in ticks],
    )


def _scale(values: Floats, *, logarithmic: bool) -> Floats:
    """Return values as drawn; NaN where a logarithmic axis has no place for them."""
    if not logarithmic:
        return values
    return np.log10(np.where(values > 0, values, np.nan))


def _choose_range(values: Floats, *, from_zero: bool) -> tuple[float, float]:
    """Return the lowest and the highest value of an axis, with a margin."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        low = 0.0
        high = 1.0
    else:
        low = float(finite.min())
        high = float(finite.max())
    low = min(low, 0.0) if from_zero else low
    margin = (high - low) * _MARGIN or abs(high) * _MARGIN or 1.0
    return (low if from_zero else low - margin), high + margin


def _list_extremes(scaled: Floats, buckets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the index of the smallest and the largest value of each range."""
    indices: list[int] = []
    for start, stop in buckets:
        part = scaled[start:stop]
        if np.isfinite(part).any():
            indices += sorted({start + int(np.nanargmin(part)), start + int(np.nanargmax(part))})
        else:
            indices.append(start)
    return indices


def _make_point(steps: Ints, values: Floats, scaled: Floats, bucket: tuple[int, int], axes: _Axes) -> ChartPoint:
    """Return the point of a range: its first missing value, or else its largest."""
    start, stop = bucket
    missing = np.flatnonzero(~np.isfinite(values[start:stop]))
    if missing.size:
        index = start + int(missing[0])
    elif np.isfinite(scaled[start:stop]).any():
        index = start + int(np.nanargmax(scaled[start:stop]))
    else:
        index = start
    is_drawn = bool(np.isfinite(scaled[index]))
    left, right = map(axes.get_x, _get_edges(steps, start, stop)) if len(steps) > 1 else (0.0, 1.0)
    return ChartPoint(
        int(steps[index]),
        float(values[index]) if is_drawn else None,
        100 * axes.get_x(int(steps[index])),
        100 * axes.get_y(float(scaled[index])) if is_drawn else 0.0,
        100 * left,
        100 * (right - left),
    )


def _place_evaluations(
    evaluations: Sequence[tuple[int, float]], scaled: Floats, axes: _Axes
) -> list[tuple[float, float, str]]:
    return [
        (100 * axes.get_x(step), 100 * axes.get_y(height), f"evaluation after step {step:,}: {value:.4f}")
        for (step, value), height in zip(evaluations, scaled.tolist(), strict=True)
        if math.isfinite(height)
    ]


def list_bucket_bounds(steps: Ints, most: int) -> list[int]:
    """Return the bounds of at most ``most`` ranges of steps; each holds a step."""
    if len(steps) <= most:
        return list(range(len(steps) + 1))
    edges = np.linspace(float(steps[0]), float(steps[-1]) + 1, most + 1)
    return sorted({*np.searchsorted(steps, edges).tolist(), 0, len(steps)})


def _get_edges(steps: Ints, start: int, stop: int) -> tuple[float, float]:
    """Return the range that a bucket answers to: halfway to its neighbours."""
    left = (steps[start - 1] + steps[start]) / 2 if start else steps[start]
    right = (steps[stop - 1] + steps[stop]) / 2 if stop < len(steps) else steps[stop - 1]
    return float(left), float(right)


def _get_share(step: float, first: int, last: int) -> float:
    return (step - first) / (last - first) if last > first else 0.5


def _draw_lines(steps: Ints, values: Floats, indices: Sequence[int], axes: _Axes) -> list[str]:
    """Return polylines through some values; a missing value ends one."""
    lines: list[list[str]] = [[]]
    for index in indices:
        value = float(values[index])
        if not math.isfinite(value):
            lines.append([])
            continue
        lines[-1].append(f"{_SIZE * axes.get_x(int(steps[index])):.1f},{_SIZE * axes.get_y(value):.1f}")
    return [" ".join(line if len(line) > 1 else line * 2) for line in lines if line]


def compute_trailing_means(values: Floats, count: int) -> Floats:
    """Return the mean of the last ``count`` values at each one, without missing ones."""
    present = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(present)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - count, 0)
    number = counts[ends] - counts[starts]
    means = (sums[ends] - sums[starts]) / np.maximum(number, 1)
    return np.where(number > 0, means, np.nan)


def find_spikes(steps: Ints, losses: Floats, inside: NDArray[np.bool_], most: int = 5) -> list[Spike]:
    """Return the steps of a range whose loss is farthest above the mean before them.

    The mean includes steps before the range. Of neighbouring steps only the highest counts. A rise counts only above
    four deviations and a quarter of the largest rise.
    """
    if len(losses) < 3:
        return []
    means = np.concatenate([[np.nan], compute_trailing_means(losses, _SPIKE_STEPS)[:-1]])
    steps, losses, rises = steps[inside], losses[inside], (losses - means)[inside]
    known = rises[np.isfinite(rises)]
    if not known.size:
        return []
    # The median is that of all steps, so that neither spikes nor the steep start matter.
    deviation = _DEVIATION * float(np.median(np.abs(known - np.median(known))))
    threshold = max(_SPIKE_DEVIATIONS * deviation, _SPIKE_SHARE * float(known.max()), 0.0)
    spikes: list[Spike] = []
    taken: list[int] = []
    for index in np.argsort(-np.where(np.isfinite(rises), rises, -np.inf))[: 1 << 10].tolist():
        if len(spikes) == most or not rises[index] > threshold:
            break
        if all(abs(index - other) > _SPIKE_STEPS for other in taken):
            spikes.append(Spike(int(steps[index]), float(losses[index]), float(rises[index])))
            taken.append(index)
    return sorted(spikes, key=lambda spike: spike.step)


def list_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers within a range."""
    if not high > low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (size * factor) <= most)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def list_step_ticks(first: int, last: int, most: int) -> list[tuple[float, str]]:
    """Return round steps of an axis, and their labels."""
    ticks = [tick for tick in list_ticks(first, last, most) if tick % 1 == 0]
    if ticks and ticks[-1] >= 10_000 and all(tick % 1000 == 0 for tick in ticks):
        return [(tick, f"{tick / 1000:,.0f}k" if tick else "0") for tick in ticks]
    return [(tick, f"{tick:,.0f}") for tick in ticks]


def list_logarithmic_ticks(low: float, high: float) -> list[tuple[float, float]]:
    """Return (exponent, value) of round numbers between two powers of ten."""
    values = [10.0**power * factor for power in range(math.floor(low), math.ceil(high)) for factor in (1, 2, 5)]
    ticks = [value for value in values if low <= math.log10(value) <= high]
    if len(ticks) < 3:
        ticks = [value for value in list_ticks(10**low, 10**high) if value > 0]
    return [(math.log10(value), value) for value in ticks]


def format_tick(value: float) -> str:
    """Format a number of an axis briefly."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
