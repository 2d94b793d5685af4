"""Pages in one file and displays in notebooks, from the same templates."""

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from batchloom.batches import IGNORE_INDEX, Batch
from batchloom.plan import Plan
from batchloom.store import Store
from batchloom.view.overview import make_overview
from batchloom.view.packed_rows import describe_step, find_runs
from batchloom.view.page_templates import render_file
from batchloom.view.pages import check_number, describe_document
from batchloom.view.plan_counts import is_small
from batchloom.view.target import PlanChoice, ViewTarget

_FILE_TOKENS, _FILE_ROWS, _NOTEBOOK_ROWS = 1 << 16, 64, 8


def make_page_file(
    target: ViewTarget, choice: PlanChoice, *, step: int | None = None, document: int | None = None
) -> str:
    """Return a page of a target as HTML that needs no other file.

    Args:
        target: the data of the page.
        choice: settings of the plan of a step.
        step: show the rows of this step.
        document: show this document. Without it and ``step``, show the overview.

    Raises:
        InputError, PlanError: there is no such document or step.
        StoreError: a file of the store is damaged.
    """
    if step is not None:
        return _render_step(target.make_plan(choice), step, _FILE_ROWS)
    store = target.open_store(target.source_names[0])
    if document is None:
        return _render_overview(store)
    details = describe_document(store, check_number(store, document), 0, _FILE_TOKENS, embed=True)
    return render_file("document.html.j2", {"store": store, "selection": {}, "as_tokens": False, **details})


def make_notebook_html(value: object) -> str | None:
    """Return the notebook display of a store, plan or batch; None for others."""
    if isinstance(value, Store):
        page = _render_overview(value)
    elif isinstance(value, Plan):
        page = _render_step(value, 0, _NOTEBOOK_ROWS)
    elif isinstance(value, Batch):
        page = _render_batch(value)
    else:
        return None
    # A frame keeps the styles of the page away from those of the notebook, and sandboxes the data.
    return f'<iframe sandbox srcdoc="{escape(page)}" width="100%" height="420" frameborder="0"></iframe>'


def _render_overview(store: Store) -> str:
    values: dict[str, Any] = {
        "heading": store.location.name,
        "target": None,
        "source": "",
        "selection": {},
        "store": store,
    }
    return render_file("overview.html.j2", {**values, "overview": make_overview(store)})


def _render_step(plan: Plan, step: int, most: int) -> str:
    values = {"selection": {}, "plan_split": "", "choice": {}, "is_counted": is_small(plan)}
    return render_file("packing.html.j2", {**values, **describe_step(plan, step, 0, most)})


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of a batch: offset and length of its spans, and its trained token ranges."""

    seq_len: int
    spans: list[tuple[int, int]]
    trained: list[tuple[int, int]]

    @property
    def filled(self) -> int:
        """Number of tokens that are not padding."""
        return sum(length for _, length in self.spans)


def _render_batch(batch: Batch) -> str:
    arrays = [
        (name, ", ".join(map(str, value.shape)), str(value.dtype).removeprefix("torch."))
        for name, value in batch.items()
        if hasattr(value, "shape")
    ]
    rows = _list_batch_rows(batch)
    values: dict[str, Any] = {"batch": batch, "arrays": arrays, "rows": rows[:_NOTEBOOK_ROWS], "all_rows": len(rows)}
    return render_file("batch.html.j2", values)


def _list_batch_rows(batch: Batch) -> list[BatchRow]:
    """Return the rows of a batch; none if it is varlen or was rebuilt."""
    layout, labels = batch.layout, batch.get("labels")
    if layout is None or layout.sliced or labels is None or labels.ndim != 2:
        return []
    trained = np.asarray(labels.cpu() if hasattr(labels, "cpu") else labels) != IGNORE_INDEX
    spans = list(zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True))
    bounds = layout.pointers.tolist()
    return [
        BatchRow(len(flags), spans[bounds[row] : bounds[row + 1]], find_runs(flags))
        for row, flags in enumerate(trained)
    ]
