"""Page of a run: its curves, and the documents of a step."""

import math
import time
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchloom.core.errors import InputError
from batchloom.plan import Plan
from batchloom.view.curves import (
    Floats,
    Ints,
    ShareColumn,
    compute_trailing_means,
    find_spikes,
    list_bucket_bounds,
    make_chart,
)
from batchloom.view.packed_rows import COLOURS, draw_rows
from batchloom.view.page_rendering import read_number, respond
from batchloom.view.step_log import LogView, as_number
from batchloom.view.target import COUNTING_NOTE, RELOAD_HEADERS, PlanChoice, ViewTarget, is_near

_DRAWN_ROWS = 8
_LISTED_SPANS = 4
_SMOOTHINGS = (0, 10, 50, 200, 1000)
_NEAR_STEPS = 50
_USUAL_STEPS = 25
_SHARE_COLUMNS = 60
# A log without a new line for so long is not followed. Compiling a model takes minutes before the first step.
_FOLLOWED_SECONDS = 600
# The last evaluation is written after the last step.
_LAST_EVALUATION_SECONDS = 60


@final
class RunPages:
    """The page of a run.

    Args:
        target: the run.
    """

    def __init__(self, target: ViewTarget) -> None:
        self._target = target
        self._log = target.log

    def list_routes(self) -> list[Route]:
        """Return the address of the page."""
        return [Route("/run", self.show_run)]

    def show_run(self, request: Request) -> Response:
        """Show the curves of a range of steps, and the documents of one step."""
        log = self._log.read()
        first = read_number(request, "from", 0)
        to = read_number(request, "to", 0)
        smooth = read_number(request, "smooth", 0)
        logarithmic = request.query_params.get("axis") == "log"
        selected = read_number(request, "step", 0) if request.query_params.get("step") else None
        last = to or math.inf
        # Numbers of 0 are left out of addresses.
        parameters = {
            "from": first or None,
            "to": to or None,
            "smooth": smooth or None,
            "axis": "log" if logarithmic else None,
        }
        if len(log.steps) and first > last:
            raise InputError(f"to: step {to:,} is before step {first:,}")
        inside = (log.steps >= first) & (log.steps <= last)
        steps = log.steps[inside]
        metrics = {name: values[inside] for name, values in log.metrics.items()}
        evaluations = [(step, loss) for step, loss in log.evaluations if len(steps) and steps[0] <= step <= steps[-1]]
        # The means at the left of a range include the steps before it.
        means = compute_trailing_means(log.metrics["loss"], smooth)[inside] if smooth > 1 else None
        chart = make_chart(steps, metrics["loss"], means=means, logarithmic=logarithmic, evaluations=evaluations)
        if chart:
            resumed = [step for step in log.starts if chart.first <= step <= chart.last]
            chart.marks.extend((chart.locate(step), f"resumed at step {step:,}") for step in resumed)
        charts = [
            (unit, make_chart(steps, metrics[name], small=True))
            for name, unit in (("tokens_per_s", "tokens/s"), ("data_wait", "data wait (share of the time)"))
            if name in metrics and np.isfinite(metrics[name]).any()
        ]
        names = list(log.source_tokens)
        tokens = {name: values[inside] for name, values in log.source_tokens.items()}
        values = {
            "target": self._target,
            "selection": {},
            "page": "run",
            "log": log,
            "parameters": parameters,
            "selected": selected,
            "chart": chart,
            "charts": charts,
            "smoothings": _SMOOTHINGS,
            "spikes": find_spikes(log.steps, log.metrics["loss"], inside),
            "not_finite": steps[~np.isfinite(metrics["loss"])][:8].tolist(),
            "shares": draw_shares(steps, tokens),
            "share_ticks": charts[0][1].x_ticks if charts and charts[0][1] else (chart.x_ticks if chart else []),
            "colours": [(number % COLOURS, name) for number, name in enumerate(names)],
            "near": _NEAR_STEPS,
            "newest": int(log.steps[-1]) if len(log.steps) else None,
            "is_growing": is_growing(log),
        }
        details = {} if selected is None else self._describe_step(request, log, selected)
        headers = RELOAD_HEADERS if details.get("fault") == COUNTING_NOTE else None
        return respond("run.html.j2", {**values, **details}, headers)

    def _describe_step(self, request: Request, log: LogView, step: int) -> dict[str, Any]:
        """Return the values of the part of the page on one step."""
        index = int(np.searchsorted(log.steps, step))
        is_logged = index < len(log.steps) and int(log.steps[index]) == step
        following = index + is_logged
        entry = self._log.read_entry(step) or {}
        losses = _read_row_losses(entry)
        start = read_number(request, "row", 0)
        details = {
            "is_logged": is_logged,
            "previous": int(log.steps[index - 1]) if index else None,
            "next": int(log.steps[following]) if following < len(log.steps) else None,
            "facts": list_step_facts(log, entry, index) if is_logged else [],
            "nearest_ranked": find_nearest(log.row_loss_steps, step),
            "row_losses": losses,
            "row_mean": None,
            "ranked": [],
            "fault": "",
            "row": start,
            "drawn_rows": _DRAWN_ROWS,
            "listed_spans": _LISTED_SPANS,
        }
        if fault := self._target.read_run().fault:
            return {**details, "fault": fault}
        plan = self._target.make_plan(PlanChoice())
        if not is_near(plan, step) and not self._target.has_counts(plan):
            return {**details, "fault": COUNTING_NOTE}
        if not plan.has_step(step):
            return {**details, "fault": f"The run ends with step {plan.steps - 1:,}."}
        return {**details, **_rank_rows(plan, step, losses, start)}


def _read_row_losses(entry: Mapping[str, Any]) -> list[float | None]:
    """Return the logged loss of each row of a step; None where it is not finite."""
    losses = entry.get("row_loss")
    numbers = map(as_number, losses if isinstance(losses, list) else [])
    return [None if math.isnan(number) else number for number in numbers]


def _rank_rows(plan: Plan, number: int, losses: list[float | None], start: int) -> dict[str, Any]:
    """Return the rows of a step, those with the largest known loss first."""
    size = plan.spec_at(number).global_batch_size
    if losses and len(losses) != size:
        fault = f"The log has losses of {len(losses):,} rows, and the plan has {size:,}: it is the data of another run."
        return {"fault": fault, "row_losses": []}
    order = list(range(size))
    if losses:
        sort_keys = [-math.inf if loss is None else loss for loss in losses]
        order.sort(key=sort_keys.__getitem__, reverse=True)
    drawn = draw_rows(plan, number, order[start : start + _DRAWN_ROWS])
    known = [loss for loss in losses if loss is not None]
    return {
        "plan": plan,
        "size": size,
        "row_mean": sum(known) / len(known) if known else None,
        # A row and its loss; None if it was not logged, or the row has none.
        "ranked": [(row, losses[row.sequence.row] if losses else None) for row in drawn],
        "source_colours": [(index % COLOURS, name) for index, name in enumerate(plan.names)],
    }


def list_step_facts(log: LogView, entry: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
    """Return pairs of name and value of a step of the log."""
    loss = float(log.metrics["loss"][index])
    before = log.metrics["loss"][max(index - _USUAL_STEPS, 0) : index]
    facts = [("loss", f"{loss:.4f}" if math.isfinite(loss) else "not finite")]
    if np.isfinite(before).any() and math.isfinite(loss):
        mean = float(np.nanmean(before))
        facts.append((f"mean of the {len(before)} steps before", f"{mean:.4f} ({loss - mean:+.4f})"))
    formats = {
        "norm": ("gradient norm", "{:.3f}"),
        "grad_norm": ("gradient norm", "{:.3f}"),
        "lr": ("learning rate", "{:.3g}"),
        "tokens": ("tokens", "{:,.0f}"),
        "trained": ("trained tokens", "{:,.0f}"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "data_wait": ("data wait", "{:.2%}"),
        "padding": ("padding", "{:.2%}"),
    }
    for name, (label, style) in formats.items():
        value = as_number(entry.get(name))
        if math.isfinite(value):
            facts.append((label, style.format(value)))
    return facts


def is_growing(log: LogView) -> bool:
    """Return whether the run may still write to its log."""
    is_finished = log.planned_steps is not None and len(log.steps) > 0 and log.steps[-1] >= log.planned_steps - 1
    return time.time() - log.modified_at < (_LAST_EVALUATION_SECONDS if is_finished else _FOLLOWED_SECONDS)


def find_nearest(steps: Ints, step: int) -> int | None:
    """Return the step nearest to another one; None if there is none."""
    return int(steps[np.argmin(np.abs(steps - step))]) if len(steps) else None


def draw_shares(steps: Ints, tokens: Mapping[str, Floats]) -> list[ShareColumn]:
    """Return the shares of the sources in ranges of steps, from the bottom up."""
    if len(tokens) < 2 or not len(steps):
        return []
    bounds = list_bucket_bounds(steps, _SHARE_COLUMNS)
    sums = np.stack([np.add.reduceat(np.nan_to_num(column), bounds[:-1]) for column in tokens.values()])
    shares = 100 * sums / np.maximum(sums.sum(axis=0), 1)
    tops = np.cumsum(shares, axis=0)
    width = 100 / (len(bounds) - 1)
    return [
        ShareColumn(
            column * width,
            width,
            [
                (source % COLOURS, 100 - float(tops[source, column]), float(shares[source, column]))
                for source in range(len(tokens))
            ],
        )
        for column in range(len(bounds) - 1)
    ]
