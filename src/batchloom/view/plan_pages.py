"""Page of a plan: shares over the run, steps of a document, and ranks of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchloom.analysis import (
    DocumentQuery,
    PlanForecast,
    ShareWindow,
    assign_step_ranks,
    choose_last_step,
    find_serving_steps,
    forecast_plan,
    forecast_shares,
    is_endless,
    make_journal_entry,
    sort_by_rank,
)
from batchloom.core.errors import BatchloomError, InputError
from batchloom.plan import Plan, compute_imbalance, compute_row_costs
from batchloom.plan.packing import Rows
from batchloom.view.curves import ShareColumn
from batchloom.view.packed_rows import COLOURS, PACKING_ROWS, draw_rows
from batchloom.view.page_rendering import read_choice, read_number, respond
from batchloom.view.target import COUNTING_NOTE, RELOAD_HEADERS, ValueCache, ViewTarget, is_near

Ints = NDArray[np.int64]

# A sample of the pools of a large store, which takes a tenth of a second.
_SAMPLED_POOLS = 4
_MAX_FORECASTS = 8
_WINDOWS = 60
_LISTED_SOURCES = 50
_LISTED_CHANGES = 20
# Further sources are drawn as one.
_DRAWN_SOURCES = COLOURS
# An epoch takes about a millisecond.
_SEARCHED_EPOCHS = 100
_LISTED_STEPS = 100
_LISTED_RANKS = 64
_LISTED_WORKERS = 64
_DRAWN_ROWS = 8


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change of a run: its first step, position in percent and meaning."""

    step: int
    x: float | None
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Rows of a rank in a step, and what it computes.

    Attributes:
        rank: the rank.
        rows: numbers of its rows in the step, in the order of its batch.
        tokens: tokens without padding.
        documents: number of spans.
        cost: attention cost relative to the mean of the ranks.
    """

    rank: int
    rows: list[int]
    tokens: int
    documents: int
    cost: float


@final
class PlanPages:
    """The page of a plan.

    Args:
        target: the data.
    """

    def __init__(self, target: ViewTarget) -> None:
        self._target = target
        # Sampled pools take a second, and a reader asks several questions about one plan.
        self._forecasts = ValueCache[str, PlanForecast](_MAX_FORECASTS)

    def list_routes(self) -> list[Route]:
        """Return the address of the page."""
        return [Route("/plan", self.show_plan)]

    def show_plan(self, request: Request) -> Response:
        """Show shares and epochs, where a document is served, and the ranks of a step."""
        self._target.require_data()
        choice = read_choice(request, self._target.choice)
        plan = self._target.make_plan(choice)
        # Once the pools are counted, estimates become exact.
        forecast = self._forecasts.get(
            plan.fingerprint, plan.orders.is_counted, lambda: forecast_plan(plan, most_pools=_SAMPLED_POOLS)
        )
        parameters = {
            **(choice.parameters if self._target.kind != "run" else {}),
            "from": read_number(request, "from", 0) or None,
            "to": read_number(request, "to", 0) or None,
            "document": request.query_params.get("document", "").strip(),
            "source": request.query_params.get("source", ""),
            "step": read_number(request, "step", 0) or None,
            "ranks": read_number(request, "ranks", 0) or None,
            "rank": read_number(request, "rank", 0) or None,
            "workers": read_number(request, "workers", 0) or None,
            "balance": "yes" if request.query_params.get("balance") else "",
        }
        done = self._target.count_done_steps()
        end = max(done or 0, 1) if is_endless(plan) else forecast.steps
        last = min(parameters["to"] or end, end - 1)
        is_counted = self._target.has_counts(plan)
        if is_counted or not parameters["document"]:
            last_step = _limit_search(plan, forecast, parameters["source"] or None, done)
            search = _find_document(plan, request, last_step)
        else:
            search = {"served": (), "unserved": (), "search_fault": COUNTING_NOTE}
        step = read_number(request, "step", 0)
        if is_counted or is_near(plan, step):
            ranks = _show_ranks(plan, request)
        else:
            ranks = {"step": step, "world_size": parameters["ranks"] or 1, "loads": [], "ranks_fault": COUNTING_NOTE}
        values = {
            "target": self._target,
            "selection": {"split": choice.split},
            "page": "plan",
            "plan": plan,
            "choice": choice.parameters,
            "forecast": forecast,
            "endless": is_endless(plan),
            "assumed": self._target.assumes_steps(plan, choice),
            "parameters": parameters,
            "done": done,
            "listed": _LISTED_SOURCES,
            "packing_rows": PACKING_ROWS,
            "split": choice.split if self._target.kind == "store" else "",
            "sources": sorted(forecast.sources, key=lambda source: -source.tokens_served),
            **_draw_shares(plan, forecast, parameters["from"] or 0, last + 1),
            **search,
            **_assign_worker(request, step, done or 0),
            **ranks,
        }
        waits = COUNTING_NOTE in (search["search_fault"], ranks["ranks_fault"])
        return respond("plan.html.j2", values, headers=RELOAD_HEADERS if waits else None)


def _draw_shares(plan: Plan, forecast: PlanForecast, first: int, stop: int) -> dict[str, Any]:
    """Return columns of the shares, their colours, and the changes of the run."""
    if first >= stop:
        raise InputError(f"from: step {first:,} is after step {stop - 1:,}, where the range ends")
    changes = _list_changes(plan, forecast, first, stop)
    if plan.mixture is None:
        return {"columns": [], "changes": changes, "first": first, "stop": stop, "deviations": {}}
    windows = forecast_shares(plan, first, stop, windows=_WINDOWS)
    totals: dict[str, int] = {}
    deviations: dict[str, float] = {}
    for window in windows:
        for name, count in window.sequences.items():
            totals[name] = totals.get(name, 0) + count
            deviations[name] = max(deviations.get(name, 0.0), abs(window.deviations[name]))
    largest = sorted(totals, key=lambda name: -totals[name])[:_DRAWN_SOURCES]
    names = [name for name in plan.names if name in largest]
    colours = {name: number for number, name in enumerate(names)}
    return {
        "columns": [_draw_window(window, colours, first, stop) for window in windows],
        "colours": [(colour, name) for name, colour in colours.items()],
        "others": len(totals) - len(names),
        "changes": changes,
        "first": first,
        "stop": stop,
        "deviations": deviations,
    }


def _draw_window(window: ShareWindow, colours: Mapping[str, int], first: int, stop: int) -> ShareColumn:
    total = max(sum(window.sequences.values()), 1)
    shares = {name: window.sequences.get(name, 0) / total for name in colours}
    top = 100.0
    parts = []
    for name, share in shares.items():
        top -= 100 * share
        parts.append((colours[name], top, 100 * share))
    lines = [f"steps {window.first:,} to {window.stop - 1:,}"]
    lines += [
        f"{name} {share:.1%} (by its share {window.expected.get(name, 0) / total:.1%})"
        for name, share in shares.items()
        if share or window.expected.get(name)
    ]
    scale = 100 / (stop - first)
    return ShareColumn((window.first - first) * scale, (window.stop - window.first) * scale, parts, lines)


def _list_changes(plan: Plan, forecast: PlanForecast, first: int, stop: int) -> list[PlanChange]:
    """Return stages, edits and the ends of sources, by step."""
    edits = [make_journal_entry(edit) for edit in plan.journal]
    edited = {edit.step for edit in edits if "weights" in edit.changes}
    changes = [(edit.step, "edit", edit.describe_changes()) for edit in edits]
    for previous, segment in pairwise(plan.segments):
        if segment.schedule != previous.schedule and segment.step not in edited:
            weights = plan.orders.shares.compute(segment.weights)
            text = ", ".join(f"{name} {weight:.1%}" for name, weight in weights.items())
            changes.append((segment.step, "stage", text))
    changes += [
        (source.exhausted, "end of a source", f"all epochs of {source.name} are served")
        for source in forecast.sources
        if source.exhausted is not None
    ]
    return [
        PlanChange(step, 100 * (step - first) / (stop - first), kind, text)
        for step, kind, text in sorted(changes)
        if first <= step < stop or step == stop == forecast.steps
    ][:_LISTED_CHANGES]


def _limit_search(plan: Plan, forecast: PlanForecast, name: str | None, done: int | None) -> int | None:
    """Return the last step to search for a document; None for the whole run."""
    epochs = min((source.epochs for source in forecast.sources if name in (source.name, None)), default=0)
    last_step = choose_last_step(plan, done)
    if last_step is None and epochs > _SEARCHED_EPOCHS:
        return int(plan.steps * _SEARCHED_EPOCHS / epochs)
    return last_step


def _find_document(plan: Plan, request: Request, last_step: int | None) -> dict[str, Any]:
    """Return the steps of the document that a request names."""
    text = request.query_params.get("document", "").strip()
    values: dict[str, Any] = {"served": (), "unserved": (), "search_fault": "", "last_step": None}
    if not text:
        return values
    try:
        source = request.query_params.get("source") or None
        served, unserved = find_serving_steps(plan, _parse_document(text, source, last_step))
    except BatchloomError as error:
        # The reader corrects the form on the same page.
        return {**values, "search_fault": str(error)}
    more = len(served) - _LISTED_STEPS
    return {**values, "served": served[:_LISTED_STEPS], "unserved": unserved, "last_step": last_step, "more": more}


def _parse_document(text: str, source: str | None, last_step: int | None) -> DocumentQuery:
    """Return the query of the number of a document, or of the record ``FILE:LINE``."""
    number = text.replace(",", "")
    if number.isdecimal():
        return DocumentQuery(document=int(number), source=source, last_step=last_step)
    file, _, line = text.rpartition(":")
    if not file or not line.isdecimal() or int(line) < 1:
        raise InputError(f"{text!r} is neither the number of a document nor FILE:LINE, such as data.jsonl:17.")
    return DocumentQuery(file=file, record=int(line) - 1, source=source, last_step=last_step)


def _assign_worker(request: Request, step: int, begun: int) -> dict[str, Any]:
    """Return the worker of a step, and the steps of each worker around it.

    Worker w of n makes steps f + w, f + w + n, ... of a DataLoader that begins at step f, on every rank
    (``LoaderIterable`` in ``adapters/pytorch.py``). A run that was resumed after the step began before it.
    """
    workers = read_number(request, "workers", 0)
    first = begun if begun <= step else 0
    if not workers:
        return {"workers": 0, "worker_steps": {}, "first_step": first}
    steps_by_worker = {}
    for worker in range(min(workers, _LISTED_WORKERS)):
        nearest = step + (worker - (step - first)) % workers
        around = range(nearest - 3 * workers, nearest + 3 * workers, workers)
        steps_by_worker[worker] = [number for number in around if number >= first]
    return {
        "workers": workers,
        "worker": (step - first) % workers,
        "worker_steps": steps_by_worker,
        "first_step": first,
    }


def _show_ranks(plan: Plan, request: Request) -> dict[str, Any]:
    """Return the rows of each rank in a step, and the drawn rows of one."""
    step = read_number(request, "step", 0)
    chosen = read_number(request, "rank", 0)
    balance = bool(request.query_params.get("balance"))
    size = plan.spec_at(step).global_batch_size
    world_size = read_number(request, "ranks", 0, 1) or next(count for count in (8, 4, 2, 1) if size % count == 0)
    values: dict[str, Any] = {"step": step, "world_size": world_size, "loads": [], "ranks_fault": ""}
    try:
        row_ranks = assign_step_ranks(plan, step, world_size, balance=balance)
        other_ranks = assign_step_ranks(plan, step, world_size, balance=not balance)
        order = sort_by_rank(plan, step, row_ranks, balance=balance)
        if chosen >= world_size:
            raise InputError(f"There is no rank {chosen:,}: ranks run from 0 to {world_size - 1:,}.")
        rows_by_rank = np.split(order, np.searchsorted(row_ranks[order], np.arange(1, world_size)))
        drawn = draw_rows(plan, step, rows_by_rank[chosen][:_DRAWN_ROWS].tolist())
        rows = plan.rows(*plan.positions_of(step))
    except BatchloomError as error:
        return {**values, "ranks_fault": str(error)}
    costs = compute_row_costs(rows)
    return {
        **values,
        "chosen": chosen,
        "drawn": drawn,
        "loads": _measure_loads(rows, costs, rows_by_rank[:_LISTED_RANKS], max(costs.sum() / world_size, 1.0)),
        "imbalance": compute_imbalance(costs, row_ranks, world_size),
        "other_imbalance": compute_imbalance(costs, other_ranks, world_size),
        "source_colours": [(number % COLOURS, name) for number, name in enumerate(plan.names)],
    }


def _measure_loads(rows: Rows, costs: Ints, rows_by_rank: Sequence[Ints], mean_cost: float) -> list[RankLoad]:
    """Return the load of each rank, from the rows of a step and their costs."""
    spans = np.diff(rows.pointers)
    tokens = np.diff(np.concatenate([[0], np.cumsum(rows.lengths)])[rows.pointers])
    return [
        RankLoad(rank, own.tolist(), int(tokens[own].sum()), int(spans[own].sum()), costs[own].sum() / mean_cost)
        for rank, own in enumerate(rows_by_rank)
    ]
