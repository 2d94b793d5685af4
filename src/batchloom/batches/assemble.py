"""From rows to a batch: one copy a span into arrays of the batch's own."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.rows import Rows

IGNORE = -100

Ids = NDArray[np.int64]


class Batch(dict[str, Any]):
    """A batch: a plain dict of arrays, as models take it, that also knows what it is.

    Attributes:
        step: the optimizer step it belongs to.
        origin: where its data came from, as log lines say it.
    """

    def __init__(self, arrays: dict[str, Any], step: int, origin: str) -> None:
        super().__init__(arrays)
        self.step, self.origin = step, origin


class Reader(Protocol):
    """What assembly needs of a store."""

    @property
    def end_id(self) -> int:
        """The id that fills padding."""
        ...

    def read(self, documents: Ids, starts: Ids, lengths: Ids, out: Ids, places: Ids) -> None:
        """Copy spans of documents into ``out`` at ``places``."""
        ...


def assemble_rows(store: Reader, rows: Rows, seq_len: int, labels: str) -> dict[str, NDArray[Any]]:
    """A padded batch of R rows.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each int64 [R, seq_len]. Positions
        restart at 0 with each span; padding counts as one more span, holds the end token
        and carries no loss.
    """
    count = len(rows)
    begins = np.repeat(np.arange(count) * seq_len, np.diff(rows.pointers)) + rows.places
    ids = np.empty(count * seq_len, np.int64)
    positions = np.empty(count * seq_len, np.int64)
    ramp = np.arange(seq_len)
    store.read(rows.documents, rows.starts, rows.lengths, ids, begins)
    for begin, length in zip(begins.tolist(), rows.lengths.tolist(), strict=True):
        positions[begin : begin + length] = ramp[:length]
    padding = _paddings(rows, begins, seq_len)
    for begin, end in padding:
        ids[begin:end] = store.end_id
        positions[begin:end] = ramp[: end - begin]
    targets = _targets(ids, begins, rows.lengths, padding, labels)
    shape = (count, seq_len)
    return {
        "input_ids": ids.reshape(shape),
        "labels": targets.reshape(shape),
        "position_ids": positions.reshape(shape),
    }


def assemble_varlen(store: Reader, rows: Rows, labels: str) -> dict[str, Any]:
    """The spans of R rows back to back without padding, as HF's flattening collator gives them.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` int64 [1, T]; ``seq_idx`` int32 [1, T], the
        number of each token's span; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [N + 1], where
        spans begin and T at the end; ``max_length_q`` and ``max_length_k``, the longest span (int).
    """
    total = int(rows.lengths.sum())
    bounds = np.zeros(len(rows.lengths) + 1, np.int64)
    np.cumsum(rows.lengths, out=bounds[1:])
    ids = np.empty(total, np.int64)
    store.read(rows.documents, rows.starts, rows.lengths, ids, bounds[:-1])
    longest = int(rows.lengths.max(initial=0))
    cumulative = bounds.astype(np.int32)
    return {
        "input_ids": ids[None],
        "labels": _targets(ids, bounds[:-1], rows.lengths, [], labels)[None],
        "position_ids": (np.arange(total) - np.repeat(bounds[:-1], rows.lengths))[None],
        "seq_idx": np.repeat(np.arange(len(rows.lengths), dtype=np.int32), rows.lengths)[None],
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative.copy(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _paddings(rows: Rows, begins: Ids, seq_len: int) -> list[tuple[int, int]]:
    """Stretches of the flat batch that no span fills: the end of each row that has room."""
    ends = np.arange(len(rows)) * seq_len
    filled = rows.pointers[1:] > rows.pointers[:-1]
    last = rows.pointers[1:][filled] - 1
    ends[filled] = begins[last] + rows.lengths[last]
    stops = np.arange(1, len(rows) + 1) * seq_len
    short = ends < stops
    return list(zip(ends[short].tolist(), stops[short].tolist(), strict=True))


def _targets(
    ids: Ids, begins: Ids, lengths: Ids, padding: list[tuple[int, int]], labels: str
) -> Ids:
    """The labels of a flat batch: -100 where there is no loss.

    Aligned labels have none at the first token of each span, shifted ones at the last: the
    first token of a span is never predicted from its neighbour, and both train the same set.
    """
    if labels == "shifted":
        targets = np.empty_like(ids)
        targets[:-1] = ids[1:]
        targets[begins + lengths - 1] = IGNORE
    else:
        targets = ids.copy()
        targets[begins] = IGNORE
    for begin, end in padding:
        targets[begin:end] = IGNORE
    return targets


def spans_of(rows: Rows) -> Iterator[tuple[int, int, int, int]]:
    """(row, document, start, stop) of every span, row by row."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    yield from zip(
        row.tolist(),
        rows.documents.tolist(),
        rows.starts.tolist(),
        (rows.starts + rows.lengths).tolist(),
        strict=True,
    )
