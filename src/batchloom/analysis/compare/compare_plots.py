"""``compare.png``: plots of losses, batches, speed, data wait and memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchloom.analysis.compare.compare_report import AnyComparison, make_title
from batchloom.analysis.compare.comparison import FrameworkComparison, FrameworkResult
from batchloom.analysis.compare.run_comparison import RunComparison, get_curve_positions
from batchloom.core.plots import escape_plot_text, save_figure

_EQUAL_COLOUR, _DIFFERENT_COLOUR = "#2f6fb0", "#c0392b"
_MAX_NAME_CHARACTERS = 40

# Dashes and width of a line.
_LineStyle = tuple[Any, float]
# The first line is wider, so that it stays visible beneath a line with equal values.
_FIRST_STYLE: _LineStyle = ("-", 2.4)
_LINE_WIDTH = 1.2
_LINE_DASHES = ("-", "--", ":")
_COLOUR_COUNT = 10
# In units of the font size; long enough to show several dashes.
_LEGEND_HANDLE_LENGTH = 4


def draw_comparison(comparison: AnyComparison, png: Path) -> None:
    """Draw a comparison and save it as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure_height = 9 if isinstance(comparison, FrameworkComparison) else 5
    figure = Figure(figsize=(11, figure_height), layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(comparison, FrameworkComparison):
        _draw_frameworks(figure, comparison)
    else:
        _draw_losses(
            figure.add_subplot(),
            _list_curves(comparison),
            comparison.by,
            _make_run_styles(len(comparison.runs)),
        )
    colour = _DIFFERENT_COLOUR if comparison.synthetic else "black"
    figure.suptitle(escape_plot_text(make_title(comparison)), fontsize=10, color=colour, wrap=True)
    save_figure(figure, png)


def _shorten_name(text: str) -> str:
    return escape_plot_text(text if len(text) <= _MAX_NAME_CHARACTERS else f"...{text[3 - _MAX_NAME_CHARACTERS :]}")


def _list_curves(comparison: RunComparison) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    return [
        (
            f"{_shorten_name(run.curve.name)}: {run.verdict.kind}",
            get_curve_positions(run.curve, comparison.by),
            run.curve.losses,
        )
        for run in comparison.runs
    ]


def _make_run_styles(count: int) -> list[_LineStyle]:
    """Return line styles of runs; dashes change only when the colors repeat."""
    return [
        _FIRST_STYLE,
        *((_LINE_DASHES[index // _COLOUR_COUNT % len(_LINE_DASHES)], _LINE_WIDTH) for index in range(1, count)),
    ]


def _make_framework_styles(count: int) -> list[_LineStyle]:
    """Return line styles of frameworks, with different gaps for adjacent lines.

    Losses that agree overlap, and equal gaps would hide a line.
    """
    return [_FIRST_STYLE, *(((0, (4, 2 + index % 3)), _LINE_WIDTH) for index in range(1, count))]


def _draw_losses(
    axes: Any,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_label: str,
    styles: Sequence[_LineStyle],
) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for (name, xs, losses), (dashes, line_width) in zip(curves, styles, strict=False):
        axes.plot(xs, losses, linestyle=dashes, label=name, linewidth=line_width)
    axes.set(xlabel=x_label, ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(fontsize=8, handlelength=_LEGEND_HANDLE_LENGTH)


def _draw_frameworks(figure: Any, comparison: FrameworkComparison) -> None:
    outcomes = [outcome for outcome in comparison.outcomes if outcome.state == "ran"]
    grid = figure.add_gridspec(3, 3, height_ratios=[3, 1 + 0.2 * len(outcomes), 2])
    curves = [(_shorten_name(outcome.name), range(len(outcome.losses)), outcome.losses) for outcome in outcomes]
    loss_axes = figure.add_subplot(grid[0, :])
    _draw_losses(loss_axes, curves, "step", _make_framework_styles(len(outcomes)))
    _draw_batches(figure.add_subplot(grid[1, :], sharex=loss_axes), comparison, outcomes)
    names = [_shorten_name(outcome.name) for outcome in outcomes]
    peak = [max(outcome.memory.values(), default=0) / 1e6 for outcome in outcomes]
    bars = (
        (
            "tokens/s, padding not counted",
            [outcome.speed.tokens_per_s if outcome.speed else 0 for outcome in outcomes],
        ),
        (
            "data wait, % of the time",
            [100 * outcome.speed.data_wait if outcome.speed else 0 for outcome in outcomes],
        ),
        ("peak memory of a process, MB", peak),
    )
    for column, (title, sizes) in enumerate(bars):
        axes = figure.add_subplot(grid[2, column])
        axes.barh(names, sizes, color=_EQUAL_COLOUR)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)


def _draw_batches(axes: Any, comparison: FrameworkComparison, outcomes: Sequence[FrameworkResult]) -> None:
    """Draw a line per framework and rank: blue for planned batches, red for others."""
    lines = [(outcome, rank) for outcome in outcomes for rank in range(comparison.spec.processes)]
    for height, (outcome, rank) in enumerate(lines):
        differing_steps = {step for step, differing_rank in outcome.differing if differing_rank == rank}
        steps = range(comparison.spec.steps)
        colours = [_DIFFERENT_COLOUR if step in differing_steps else _EQUAL_COLOUR for step in steps]
        axes.bar(steps, 0.8, width=1.0, bottom=height + 0.1, color=colours, linewidth=0)
    axes.set_yticks(
        [height + 0.5 for height in range(len(lines))],
        [f"{_shorten_name(outcome.name)} rank {rank}" for outcome, rank in lines],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_title("batch of each step: blue is the plan's, red is not", fontsize=9)
    axes.set_xlim(-0.5, comparison.spec.steps - 0.5)
