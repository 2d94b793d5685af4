"""``compare.png``: losses, batches, speed, waiting and memory of frameworks; losses of finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchloom.analysis.compare.compare_report import Found, title_of
from batchloom.analysis.compare.comparison import Comparison, Outcome
from batchloom.analysis.compare.run_comparison import Runs, xs_of
from batchloom.core.plots import drawable, save_picture

_EQUAL, _OTHER = "#2f6fb0", "#c0392b"
_LONGEST_NAME = 40

# Of a line its dashes and its width.
_Style = tuple[Any, float]
# The first is seen beneath any that lies on it.
_FIRST: _Style = ("-", 2.4)
_WIDTH = 1.2
_LINES = ("-", "--", ":")
_COLOURS = 10
# In the size of its letters: several dashes.
_LEGEND_LINE = 4


def draw(found: Found, png: Path) -> None:
    """Draw a comparison.

    Raises:
        OutputError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    tall = 9 if isinstance(found, Comparison) else 5
    figure = Figure(figsize=(11, tall), layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(found, Comparison):
        _draw_frameworks(figure, found)
    else:
        _draw_losses(figure.add_subplot(), _curves(found), found.by, _solid(len(found.runs)))
    colour = _OTHER if found.synthetic else "black"
    figure.suptitle(drawable(title_of(found)), fontsize=10, color=colour, wrap=True)
    save_picture(figure, png)


def _name(text: str) -> str:
    return drawable(text if len(text) <= _LONGEST_NAME else f"...{text[3 - _LONGEST_NAME :]}")


def _curves(found: Runs) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    return [
        (
            f"{_name(one.curve.name)}: {one.verdict.kind}",
            xs_of(one.curve, found.by),
            one.curve.losses,
        )
        for one in found.runs
    ]


def _solid(count: int) -> list[_Style]:
    """Of runs, which go their own ways: other lines only where the colours begin anew."""
    return [_FIRST, *((_LINES[at // _COLOURS % len(_LINES)], _WIDTH) for at in range(1, count))]


def _dashed(count: int) -> list[_Style]:
    """Of frameworks, whose losses lie on each other where they agree: each has other gaps than the one below."""
    return [_FIRST, *(((0, (4, 2 + at % 3)), _WIDTH) for at in range(1, count))]


def _draw_losses(
    axes: Any,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    by: str,
    styles: Sequence[_Style],
) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for (name, xs, losses), (dashes, wide) in zip(curves, styles, strict=False):
        axes.plot(xs, losses, linestyle=dashes, label=name, linewidth=wide)
    axes.set(xlabel=by, ylabel="loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(fontsize=8, handlelength=_LEGEND_LINE)


def _draw_frameworks(figure: Any, found: Comparison) -> None:
    ran = [one for one in found.outcomes if one.state == "ran"]
    grid = figure.add_gridspec(3, 3, height_ratios=[3, 1 + 0.2 * len(ran), 2])
    curves = [(_name(one.name), range(len(one.losses)), one.losses) for one in ran]
    above = figure.add_subplot(grid[0, :])
    _draw_losses(above, curves, "step", _dashed(len(ran)))
    _draw_batches(figure.add_subplot(grid[1, :], sharex=above), found, ran)
    names = [_name(one.name) for one in ran]
    peak = [max(one.memory.values(), default=0) / 1e6 for one in ran]
    bars = (
        (
            "tokens/s, padding not counted",
            [one.speed.tokens_per_s if one.speed else 0 for one in ran],
        ),
        (
            "data wait, % of the time",
            [100 * one.speed.data_wait if one.speed else 0 for one in ran],
        ),
        ("peak memory of a process, MB", peak),
    )
    for place, (title, sizes) in enumerate(bars):
        axes = figure.add_subplot(grid[2, place])
        axes.barh(names, sizes, color=_EQUAL)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)


def _draw_batches(axes: Any, found: Comparison, ran: Sequence[Outcome]) -> None:
    """A line a framework and rank: blue where the batch of a step is the plan's, red where not."""
    lines = [(one, rank) for one in ran for rank in range(found.spec.processes)]
    for height, (one, rank) in enumerate(lines):
        other = {step for step, its in one.differing if its == rank}
        steps = range(found.spec.steps)
        colours = [_OTHER if step in other else _EQUAL for step in steps]
        axes.bar(steps, 0.8, width=1.0, bottom=height + 0.1, color=colours, linewidth=0)
    axes.set_yticks(
        [height + 0.5 for height in range(len(lines))],
        [f"{_name(one.name)} rank {rank}" for one, rank in lines],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_title("batch of each step: blue is the plan's, red is not", fontsize=9)
    axes.set_xlim(-0.5, found.spec.steps - 0.5)
