"""Report of a comparison: sentences, table, picture and page."""

import base64
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchloom.analysis.compare.comparison import PARTIAL, FrameworkComparison, FrameworkResult
from batchloom.analysis.compare.loss_curves import ComparedRun, RunComparison, get_curve_positions
from batchloom.analysis.compare.witness import BatchDifference
from batchloom.analysis.explanation import ExplainedSequence
from batchloom.core.addresses import redact_url
from batchloom.core.files import replace_file, wrap_os_errors
from batchloom.core.report_output import escape_plot_text, render_page, save_figure
from batchloom.core.wording import format_count, format_size

FORMAT = "batchloom-compare"
VERSION = 1
FRAMEWORK_COLUMNS = ("framework", "batches", "hash", "losses", "last loss", "tokens/s", "data wait", "memory")
RUN_COLUMNS = ("run", "log", "points", "at the common end", "verdict", "why")
# Columns of both tables that hold numbers.
NUMBER_COLUMNS = {"last loss", "tokens/s", "data wait", "points", "at the common end"}
_MAX_LISTED = 4

TableCells = tuple[str, ...]
AnyComparison = FrameworkComparison | RunComparison

_TEMPLATE = Path(__file__).with_name("compare.html.j2")

_EQUAL_COLOUR = "#2f6fb0"
_DIFFERENT_COLOUR = "#c0392b"
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


def comparison_to_plain(comparison: AnyComparison) -> dict[str, Any]:
    """Return the content of ``compare.json``, see docs/how-to/check/compare.md.

    Numbers that are not finite become null.
    """
    kind = "frameworks" if isinstance(comparison, FrameworkComparison) else "runs"
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "source": "synthetic" if comparison.synthetic else "real",
        "agree": comparison.agree,
    }
    if isinstance(comparison, RunComparison):
        # A run may not record whether its data was real.
        has_unknown_source = any(run.curve.synthetic is None for run in comparison.runs)
        header["source"] = "unknown" if has_unknown_source and not comparison.synthetic else header["source"]
    plain: dict[str, Any] = _replace_non_finite({**header, **asdict(comparison)})
    if isinstance(comparison, FrameworkComparison) and comparison.spec.store is not None:
        plain["spec"]["store"] = redact_url(comparison.spec.store)
    return plain


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_non_finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_title(comparison: AnyComparison) -> str:
    """Return the title of the table, the picture and the page."""
    if isinstance(comparison, FrameworkComparison):
        run_size = (
            f"{format_count(comparison.spec.steps, 'step')}, {format_count(comparison.spec.processes, 'process')}"
        )
        title = f"Frameworks compared: {run_size}, {comparison.origin}"
    else:
        title = f"{format_count(len(comparison.runs), 'run')} compared by {comparison.by}"
    return f"{make_banner(comparison)}. {title}" if comparison.synthetic else title


def make_banner(comparison: AnyComparison) -> str:
    """Return the warning shown first for synthetic data; empty for real data."""
    if not comparison.synthetic:
        return ""
    if isinstance(comparison, FrameworkComparison):
        return "SYNTHETIC DATA: a throughput run on generated tokens, which says nothing about training"
    made_up = sum(bool(run.curve.synthetic) for run in comparison.runs)
    runs = format_count(len(comparison.runs), "run")
    return f"SYNTHETIC DATA in {made_up:,} of {runs}: such losses say nothing about training"


def list_columns(comparison: AnyComparison) -> TableCells:
    return FRAMEWORK_COLUMNS if isinstance(comparison, FrameworkComparison) else RUN_COLUMNS


def make_table_rows(comparison: AnyComparison) -> list[TableCells]:
    if isinstance(comparison, FrameworkComparison):
        return [_make_framework_row(comparison, outcome) for outcome in comparison.outcomes if outcome.state == "ran"]
    return [_make_run_row(run) for run in comparison.runs]


def _make_framework_row(comparison: FrameworkComparison, outcome: FrameworkResult) -> TableCells:
    batches = comparison.spec.steps * comparison.spec.processes
    equal = f"{batches:,} equal" if not outcome.differing else f"{len(outcome.differing):,} differ"
    loss = "the reference" if outcome.name == comparison.reference else "agree"
    if outcome.loss_difference is not None:
        loss = f"differ from step {outcome.loss_difference.step:,}"
    return (
        outcome.name,
        equal,
        outcome.digest,
        loss,
        f"{outcome.losses[-1]:.4f}" if outcome.losses else "-",
        f"{outcome.speed.tokens_per_s:,.0f}" if outcome.speed else "-",
        f"{outcome.speed.data_wait:.2%}" if outcome.speed else "-",
        ", ".join(f"{format_size(size)} {name}" for name, size in sorted(outcome.memory.items(), reverse=True)),
    )


def _make_run_row(run: ComparedRun) -> TableCells:
    verdict = run.verdict
    made_up = " (synthetic data)" if run.curve.synthetic else ""
    return (
        run.curve.name,
        run.curve.kind + made_up,
        f"{verdict.points:,}",
        "begins later" if run.at_common is None else f"{run.at_common:.4f}",
        verdict.kind,
        verdict.reason,
    )


def describe_comparison(comparison: AnyComparison) -> list[str]:
    """Return sentences on frameworks or runs that differ, failed or are missing."""
    if isinstance(comparison, RunComparison):
        first = comparison.runs[0].curve.name
        compared = comparison.tolerance is not None
        unmatched_names = [run.curve.name for run in comparison.runs if compared and not run.common]
        return [
            f"{name}: it has no step in common with {first}, so nothing was compared." for name in unmatched_names
        ] + [
            f"{run.curve.name}: its loss at step {run.first_apart:,} is more than {comparison.tolerance:g} "
            f"(relative) from that of {first} ({format_count(run.common, 'step')} in common)."
            for run in comparison.runs
            if run.first_apart is not None
        ]
    return [sentence for outcome in comparison.outcomes for sentence in _describe_framework(comparison, outcome)]


def _describe_framework(comparison: FrameworkComparison, outcome: FrameworkResult) -> list[str]:
    if outcome.state != "ran":
        return [f"{outcome.name} {'is missing' if outcome.state == 'missing' else 'FAILED'}: {outcome.problem}"]
    sentences = []
    if outcome.difference is not None:
        batches = comparison.spec.steps * comparison.spec.processes
        counts = f"{len(outcome.differing):,} of {batches:,} batches are not the plan's"
        sentences.append(f"{outcome.name}: {counts}. {_describe_difference(outcome.difference)}")
    loss_difference = outcome.loss_difference
    if loss_difference is not None:
        loss = "no loss was recorded" if loss_difference.loss is None else f"{loss_difference.loss:.6f}"
        sentences.append(
            f"{outcome.name}: losses differ from step {loss_difference.step:,}: {loss}, and {comparison.reference} has "
            f"{loss_difference.reference:.6f}; {comparison.spec.tolerance:g} (relative) is allowed."
        )
    return sentences


def _describe_difference(difference: BatchDifference) -> str:
    text = f"The first is step {difference.step:,} on rank {difference.rank}: {difference.sentence}."
    if difference.planned:
        text += f" The plan has: {format_sequences(difference.planned)}."
    if difference.came:
        text += f" The received rows are, in the plan: {format_sequences(difference.came)}."
    return text


def format_sequences(sequences: Sequence[ExplainedSequence]) -> str:
    """Summarize the documents of sequences."""
    return "; ".join(
        f"row {sequence.rank_row} of step {sequence.step:,}: {_format_spans(sequence) or 'nothing but padding'}"
        for sequence in sequences
    )


def _format_spans(sequence: ExplainedSequence) -> str:
    span_texts = []
    for span in sequence.spans[:_MAX_LISTED]:
        line = ""
        if span.origin is not None:
            line = f" ({span.origin.source}, {span.origin.position})"
        beginning = f" {span.text!r}" if span.text else ""
        span_texts.append(f"document {span.document:,} tokens {span.start:,}-{span.stop:,}{line}{beginning}")
    more = len(sequence.spans) - _MAX_LISTED
    return ", ".join(span_texts) + (f", and {format_count(more, 'document')} more" if more > 0 else "")


def describe_verdict(comparison: AnyComparison) -> str:
    """Return the overall verdict, for the last line."""
    if isinstance(comparison, RunComparison):
        kinds = [run.verdict.kind for run in comparison.runs]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    outcomes = [outcome for outcome in comparison.outcomes if outcome.state != "missing"]
    differing_names = [outcome.name for outcome in outcomes if not outcome.agrees]
    if differing_names:
        frameworks = format_count(len(outcomes), "framework")
        return (
            f"{len(differing_names)} of {frameworks} not equal to the plan and the others: {', '.join(differing_names)}"
        )
    every = "every batch of every rank is the plan's"
    if len(outcomes) == 1:
        return f"{every}; with only one framework, losses were not compared"
    return f"all {len(outcomes)} agree: {every}, and losses agree within {comparison.spec.tolerance:g}"


def render_comparison_page(comparison: AnyComparison, picture: bytes) -> str:
    """Render the page as HTML text; ``picture`` holds the PNG."""
    columns = list_columns(comparison)
    values = {
        "title": make_title(comparison),
        "banner": make_banner(comparison),
        "facts": _list_facts(comparison),
        "picture": base64.b64encode(picture).decode(),
        "columns": columns,
        "rows": [list(zip(columns, row, strict=True)) for row in make_table_rows(comparison)],
        "numbers": NUMBER_COLUMNS,
        "sentences": describe_comparison(comparison),
        "verdict": describe_verdict(comparison),
        "plain_hash": comparison.digest if isinstance(comparison, FrameworkComparison) else "",
    }
    return render_page(_TEMPLATE, values, {})


def _list_facts(comparison: AnyComparison) -> list[tuple[str, str]]:
    if not isinstance(comparison, FrameworkComparison):
        tolerance_text = "not compared step by step" if comparison.tolerance is None else f"{comparison.tolerance:g}"
        return [
            ("compared by", comparison.by),
            ("shortest ends at", f"{comparison.until:,.0f}"),
            ("tolerance", tolerance_text),
        ]
    spec = comparison.spec
    versions = {
        name: package_version for outcome in comparison.outcomes for name, package_version in outcome.versions.items()
    }
    return [
        ("data", comparison.origin),
        ("plan", comparison.plan),
        ("steps", f"{spec.steps:,}"),
        ("processes", f"{spec.processes:,}"),
        ("sizes", f"seq_len {spec.seq_len:,}, global batch {spec.global_batch_size:,}"),
        ("sequences of a forward pass", f"{spec.batch_size:,}"),
        ("seed", str(spec.seed)),
        ("tolerance of losses", f"{spec.tolerance:g} (relative)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def draw_comparison(comparison: AnyComparison, png: Path) -> None:
    """Draw a comparison and save it as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    from matplotlib.ticker import MaxNLocator

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


def write_comparison(comparison: AnyComparison, out: Path) -> tuple[Path, Path, Path]:
    """Write the three files atomically and return their paths.

    Files of an earlier comparison are replaced. The records of finished frameworks, from which a
    stopped comparison resumes, are removed.
    """
    json_file, png, html = (out / f"compare.{ending}" for ending in ("json", "png", "html"))
    with wrap_os_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
    draw_comparison(comparison, png)
    plain = json.dumps(comparison_to_plain(comparison), ensure_ascii=False, indent=1)
    for file, text in ((json_file, plain + "\n"), (html, render_comparison_page(comparison, png.read_bytes()))):
        with replace_file(file) as partial_file:
            partial_file.write_text(text, "utf-8", errors="replace")
    with wrap_os_errors("write", out):
        if isinstance(comparison, FrameworkComparison) and (out / PARTIAL).exists():
            shutil.rmtree(out / PARTIAL)
    return json_file, png, html
