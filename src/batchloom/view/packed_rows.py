"""Rows of a step as drawings: spans to scale, padding and loss."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis import ExplainedSequence, ExplainedSpan, explain
from batchloom.batches.loading import read_trained
from batchloom.plan import Plan

# Trained runs that are closer than this share of a row are drawn as one.
_RESOLUTION = 1 / 1000
COLOURS = 8
# Rows on a page of a step.
PACKING_ROWS = 16


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """A span of a row.

    Attributes:
        span: the span.
        colour: number of the colour of its source, from 0.
        trained: token ranges in the row that carry a loss.
    """

    span: ExplainedSpan
    colour: int
    trained: list[tuple[int, int]]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.span.stop - self.span.start


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row of a step: its sequence and the drawings of its spans."""

    sequence: ExplainedSequence
    spans: list[DrawnSpan]

    @property
    def filled(self) -> int:
        """Number of tokens that are not padding."""
        return self.sequence.seq_len - self.sequence.padding


def draw_rows(plan: Plan, step: int, rows: Iterable[int], text: int = 120) -> list[DrawnRow]:
    """Return rows of a step, in the given order.

    Raises:
        PlanError: there is no such step.
        StoreError: a shard is missing or damaged.
    """
    sequences = [sequence for row in rows for sequence in explain(plan, step, row=row, text=text)]
    return [DrawnRow(sequence, _draw_spans(plan, sequence)) for sequence in sequences]


def describe_step(plan: Plan, step: int, first: int, most: int) -> dict[str, Any]:
    """Return the template values of a step, with ``most`` rows from ``first`` on."""
    spec = plan.spec_at(step)
    tokens = int(plan.rows(*plan.positions_of(step)).lengths.sum()) if plan.has_step(step) else 0
    rows = draw_rows(plan, step, range(first, min(first + most, spec.global_batch_size)))
    return {
        "plan": plan,
        "step": step,
        "row": first,
        "rows": rows,
        "spec": spec,
        "drawn_rows": most,
        "tokens": tokens,
        "fill": tokens / (spec.global_batch_size * spec.seq_len),
        "colours": [(number % COLOURS, name) for number, name in enumerate(plan.names)],
        "is_last": not plan.has_step(step + 1),
    }


def _draw_spans(plan: Plan, sequence: ExplainedSequence) -> list[DrawnSpan]:
    drawn = []
    colours = {name: number % COLOURS for number, name in enumerate(plan.names)}
    for span in sequence.spans:
        size = span.stop - span.start
        is_served = not (span.banned or span.removed)
        runs = find_runs(read_trained(plan.stores[span.source], span.document, span.start, size)) if is_served else []
        least = max(1, round(sequence.seq_len * _RESOLUTION))
        merged = merge_runs([(span.place + start, span.place + stop) for start, stop in runs], least)
        drawn.append(DrawnSpan(span, colours[span.source], merged))
    return drawn


def find_runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges of an array that are True."""
    changes = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))


def merge_runs(runs: Sequence[tuple[int, int]], least: int) -> list[tuple[int, int]]:
    """Merge ascending ranges whose gap is below ``least``."""
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        if merged and start - merged[-1][1] < least:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
