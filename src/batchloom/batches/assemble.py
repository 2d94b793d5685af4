"""From rows to a batch: one copy a span into arrays of the batch's own."""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.rows import Rows

IGNORE = -100
_APART = 64
# Longer sequences hold fewer spans for their tokens: there the views cost nothing.
_MOST_KEPT_RAMPS = 8192

Ids = NDArray[np.int64]


class Batch(dict[str, Any]):
    """A batch: a plain dict of arrays, as models take it, that also knows what it is.

    Attributes:
        step: the optimizer step it belongs to.
        origin: where its data came from, as log lines say it.
    """

    def __init__(self, arrays: Mapping[str, Any], step: int = -1, origin: str = "") -> None:
        # Frameworks move a batch by rebuilding it from its items alone: type(batch)({...}).
        super().__init__(arrays)
        self.step, self.origin = step, origin


class Reader(Protocol):
    """What assembly needs of a store."""

    @property
    def end_id(self) -> int:
        """The id that fills padding."""
        ...

    @property
    def masked(self) -> bool:
        """Whether some tokens are not trained."""
        ...

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """The ids of spans of documents."""
        ...

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """For the tokens of spans whether each is trained."""
        ...


def assemble_rows(
    store: Reader, rows: Rows, seq_len: int, labels: str
) -> dict[str, NDArray[np.int64]]:
    """A padded batch of R rows.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each int64 [R, seq_len]. Positions
        restart at 0 with each span; padding counts as one more span, holds the end token
        and carries no loss.
    """
    count = len(rows)
    pieces = store.read(rows.documents, rows.starts, rows.lengths)
    ramps = _ramps(rows.lengths, seq_len)
    # Most batches are full, and then there is nothing to look for.
    full = int(rows.lengths.sum()) == count * seq_len
    paddings = [] if full else _paddings(rows, seq_len)
    for at, begin, end in reversed(paddings):
        pieces.insert(at, np.full(end - begin, store.end_id))
        ramps.insert(at, np.arange(end - begin))
    ids, targets, positions = _block(count * seq_len)
    # Concatenating views is one copy a span without an assignment in Python for each.
    np.concatenate(pieces, out=ids)
    np.concatenate(ramps, out=positions)
    begins = np.arange(0, count * seq_len, seq_len)
    begins = begins.repeat(rows.pointers[1:] - rows.pointers[:-1])
    begins += rows.places
    _fill_targets(targets, ids, begins, rows.lengths, labels)
    if store.masked:
        trained = store.mask(rows.documents, rows.starts, rows.lengths)
        for at, begin, end in reversed(paddings):
            trained.insert(at, np.zeros(end - begin, bool))
        _untrain(targets, trained, labels)
    for _, begin, end in paddings:
        targets[begin:end] = IGNORE
    shape = (count, seq_len)
    return {
        "input_ids": ids.reshape(shape),
        "labels": targets.reshape(shape),
        "position_ids": positions.reshape(shape),
    }


def _ramps(lengths: Ids, seq_len: int) -> list[Ids]:
    """0, 1, 2, ... for each length, all views of one array."""
    if seq_len <= _MOST_KEPT_RAMPS:
        return list(map(_all_ramps(seq_len).__getitem__, lengths.tolist()))
    ramp = np.arange(seq_len)
    return [ramp[:length] for length in lengths.tolist()]


@functools.lru_cache(maxsize=4)
def _all_ramps(seq_len: int) -> list[Ids]:
    """The ramps of every length to ``seq_len``: making a view takes longer than looking it up."""
    ramp = np.arange(seq_len)
    return [ramp[:length] for length in range(seq_len + 1)]


def _block(size: int) -> tuple[Ids, Ids, Ids]:
    """Three arrays of ``size`` in one allocation, which the allocator reuses without page faults.

    They are 512 bytes out of step with pages: copies between arrays at equal places in their
    pages wait for each other.
    """
    block = np.empty(3 * size + 2 * _APART, np.int64)
    second, third = size + _APART, 2 * (size + _APART)
    return block[:size], block[second : second + size], block[third:]


def assemble_varlen(store: Reader, rows: Rows, labels: str) -> dict[str, Any]:
    """The spans of R rows back to back without padding, as HF's flattening collator gives them.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` int64 [1, T]; ``seq_idx`` int32 [1, T], the
        number of each token's span; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [N + 1], where
        spans begin and T at the end; ``max_length_q`` and ``max_length_k``, the longest span (int).
    """
    pieces = store.read(rows.documents, rows.starts, rows.lengths)
    # A step without spans (the end of a run) is one token of padding: models take no empty input.
    lengths = rows.lengths if pieces else np.ones(1, np.int64)
    ids = np.concatenate(pieces or [np.array([store.end_id])], dtype=np.int64)
    total = ids.size
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    longest = int(lengths.max())
    cumulative = bounds.astype(np.int32)
    targets = np.empty_like(ids)
    _fill_targets(targets, ids, bounds[:-1], lengths, labels)
    if store.masked and pieces:
        _untrain(targets, store.mask(rows.documents, rows.starts, rows.lengths), labels)
    return {
        "input_ids": ids[None],
        "labels": targets[None],
        "position_ids": (np.arange(total) - np.repeat(bounds[:-1], lengths))[None],
        "seq_idx": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None],
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative.copy(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _paddings(rows: Rows, seq_len: int) -> list[tuple[int, int, int]]:
    """(number of the span it comes before, begin, end) of each stretch no span fills, in order.

    Begin and end are places in the flat batch: the end of each row that has room.
    """
    begins = np.arange(len(rows)) * seq_len
    ends = begins + seq_len
    filled = rows.pointers[1:] > rows.pointers[:-1]
    last = rows.pointers[1:][filled] - 1
    begins[filled] += rows.places[last] + rows.lengths[last]
    short = begins < ends
    stretches = (rows.pointers[1:][short], begins[short], ends[short])
    return list(zip(*(column.tolist() for column in stretches), strict=True))


def _fill_targets(targets: Ids, ids: Ids, begins: Ids, lengths: Ids, labels: str) -> None:
    """The labels of a flat batch of spans: -100 where there is no loss.

    Aligned labels have none at the first token of each span, shifted ones at the last: the
    first token of a span is never predicted from its neighbour, and both train the same set.
    """
    if labels == "shifted":
        targets[:-1] = ids[1:]
        targets[begins + lengths - 1] = IGNORE
    else:
        targets[:] = ids
        targets[begins] = IGNORE


def _untrain(targets: Ids, trained: list[NDArray[np.bool_]], labels: str) -> None:
    """Take the loss from the tokens of a flat batch that are not trained."""
    if not trained:
        return
    masked = ~np.concatenate(trained)
    if labels == "shifted":
        targets[:-1][masked[1:]] = IGNORE
    else:
        targets[masked] = IGNORE
