"""``compare.png``: losses, batches, speed, waiting and memory of frameworks; losses of finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchloom.analysis.compare.compare_report import AnyComparison, make_title
from batchloom.analysis.compare.comparison import FrameworkComparison, FrameworkResult
from batchloom.analysis.compare.run_comparison import RunComparison, get_curve_positions
from batchloom.core.plots import escape_plot_text, save_figure

_EQUAL_COLOUR, _DIFFERENT_COLOUR = "#2f6fb0", "#c0392b"
_MAX_NAME_CHARACTERS = 40

# Of a line its dashes and its width.
_LineStyle = tuple[Any, float]
# The first is seen beneath any that lies on it.
_FIRST_STYLE: _LineStyle = ("-", 2.4)
_LINE_WIDTH = 1.2
_LINE_DASHES = ("-", "--", ":")
_COLOUR_COUNT = 10
# In the size of its letters: several dashes.
_LEGEND_HANDLE_LENGTH = 4


def draw_comparison(found: AnyComparison, png: Path) -> None:
    """Draw a comparison.

    Raises:
        OutputError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    tall = 9 if isinstance(found, FrameworkComparison) else 5
    figure = Figure(figsize=(11, tall), layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(found, FrameworkComparison):
        _draw_frameworks(figure, found)
    else:
        _draw_losses(
            figure.add_subplot(), _list_curves(found), found.by, _make_run_styles(len(found.runs))
        )
    colour = _DIFFERENT_COLOUR if found.synthetic else "black"
    figure.suptitle(escape_plot_text(make_title(found)), fontsize=10, color=colour, wrap=True)
    save_figure(figure, png)


def _shorten_name(text: str) -> str:
    return escape_plot_text(
        text if len(text) <= _MAX_NAME_CHARACTERS else f"...{text[3 - _MAX_NAME_CHARACTERS :]}"
    )


def _list_curves(found: RunComparison) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    return [
        (
            f"{_shorten_name(one.curve.name)}: {one.verdict.kind}",
            get_curve_positions(one.curve, found.by),
            one.curve.losses,
        )
        for one in found.runs
    ]


def _make_run_styles(count: int) -> list[_LineStyle]:
    """Of runs, which go their own ways: other lines only where the colours begin anew."""
    return [
        _FIRST_STYLE,
        *(
            (_LINE_DASHES[at // _COLOUR_COUNT % len(_LINE_DASHES)], _LINE_WIDTH)
            for at in range(1, count)
        ),
    ]


def _make_framework_styles(count: int) -> list[_LineStyle]:
    """Of frameworks, whose losses lie on each other where they agree: each has other gaps than the one below."""
    return [_FIRST_STYLE, *(((0, (4, 2 + at % 3)), _LINE_WIDTH) for at in range(1, count))]


def _draw_losses(
    axes: Any,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    by: str,
    styles: Sequence[_LineStyle],
) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for (name, xs, losses), (dashes, wide) in zip(curves, styles, strict=False):
        axes.plot(xs, losses, linestyle=dashes, label=name, linewidth=wide)
    axes.set(xlabel=by, ylabel="loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(fontsize=8, handlelength=_LEGEND_HANDLE_LENGTH)


def _draw_frameworks(figure: Any, found: FrameworkComparison) -> None:
    ran = [one for one in found.outcomes if one.state == "ran"]
    grid = figure.add_gridspec(3, 3, height_ratios=[3, 1 + 0.2 * len(ran), 2])
    curves = [(_shorten_name(one.name), range(len(one.losses)), one.losses) for one in ran]
    above = figure.add_subplot(grid[0, :])
    _draw_losses(above, curves, "step", _make_framework_styles(len(ran)))
    _draw_batches(figure.add_subplot(grid[1, :], sharex=above), found, ran)
    names = [_shorten_name(one.name) for one in ran]
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
        axes.barh(names, sizes, color=_EQUAL_COLOUR)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)


def _draw_batches(axes: Any, found: FrameworkComparison, ran: Sequence[FrameworkResult]) -> None:
    """A line a framework and rank: blue where the batch of a step is the plan's, red where not."""
    lines = [(one, rank) for one in ran for rank in range(found.spec.processes)]
    for height, (one, rank) in enumerate(lines):
        other = {step for step, its in one.differing if its == rank}
        steps = range(found.spec.steps)
        colours = [_DIFFERENT_COLOUR if step in other else _EQUAL_COLOUR for step in steps]
        axes.bar(steps, 0.8, width=1.0, bottom=height + 0.1, color=colours, linewidth=0)
    axes.set_yticks(
        [height + 0.5 for height in range(len(lines))],
        [f"{_shorten_name(one.name)} rank {rank}" for one, rank in lines],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_title("batch of each step: blue is the plan's, red is not", fontsize=9)
    axes.set_xlim(-0.5, found.spec.steps - 0.5)
