"""Packing strategies: from the lengths of a pool to the spans of its sequences.

``best_fit`` is best-fit decreasing (Johnson, Demers, Ullman, Garey, Graham: Worst-Case Performance Bounds for
Simple One-Dimensional Packing Algorithms, SIAM J. Comput. 1974), done in bulk on the histogram of lengths. Each
capacity that has open sequences is marked. The smallest capacity that fits a length is the first mark at or above
it. As many documents of that length as fit go into all sequences of that capacity in one move.

``window_N`` looks ahead over the next N documents, as the packer of that name in lmms-engine does, but takes the
longest that fits instead of the first.
"""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

ItemLengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackingResult:
    """Assignment of packed items to sequences, one entry per span [N]."""

    count: int  # number of sequences
    items: NDArray[np.int64]  # number of the item, int64 [N]; an item that is split has several entries
    starts: NDArray[np.int64]  # first token of the span inside its item, int64 [N]
    lengths: NDArray[np.int64]  # tokens of the span, int64 [N]
    sequences: NDArray[np.int64]  # number of the sequence in [0, count), int64 [N]


# (capacity, bins, each, room): ``each`` items go into each of the ``bins`` sequences that have waited longest
# with ``capacity`` tokens of room. Afterwards they have ``room``. It is a plain tuple because each pool creates
# thousands of them.
BestFitMove = tuple[int, int, int, int]


def compute_best_fit_moves(
    histogram: list[tuple[int, int]], seq_len: int, *, count_only: bool = False
) -> tuple[int, list[BestFitMove]]:
    """Run best-fit decreasing on a histogram of (length, count), longest first.

    Return the number of sequences and the moves (empty with ``count_only``) in the order of the histogram.
    Sequences wait in one queue per capacity; new ones join that of ``seq_len``.
    """
    moves: list[BestFitMove] = []
    waiting = [0] * (seq_len + 1)
    # One byte per capacity marks waiting sequences, so that the smallest that fits is found by a memchr.
    has_waiting = bytearray(seq_len + 1)
    find_capacity = has_waiting.find
    append_move = moves.append
    count = 0
    for length, items in histogram:
        remaining_items = items
        while remaining_items:
            capacity = find_capacity(1, length)
            if capacity < 0:
                capacity = seq_len
                bins = -(-remaining_items // (seq_len // length))
                has_waiting[capacity] = 1
                count += bins
            else:
                bins = waiting[capacity]
            items_per_bin = capacity // length
            filled_bins = remaining_items // items_per_bin
            if filled_bins >= bins:
                filled_bins = bins
                has_waiting[capacity] = 0
            elif not filled_bins:
                filled_bins = 1
                items_per_bin = remaining_items
                if bins == 1:
                    has_waiting[capacity] = 0
            waiting[capacity] = bins - filled_bins
            room = capacity - items_per_bin * length
            waiting[room] += filled_bins
            has_waiting[room] = 1
            if not count_only:
                append_move((capacity, filled_bins, items_per_bin, room))
            remaining_items -= filled_bins * items_per_bin
    return count, moves


def _count_lengths(lengths: ItemLengths) -> list[tuple[int, int]]:
    counts = np.bincount(lengths)
    present = np.flatnonzero(counts)[::-1]
    return list(zip(present.tolist(), counts[present].tolist(), strict=True))


def _pack_best_fit(lengths: ItemLengths, seq_len: int) -> tuple[int, NDArray[np.int64]]:
    count, moves = compute_best_fit_moves(_count_lengths(lengths), seq_len)
    table = np.fromiter(chain.from_iterable(moves), np.int64, 4 * len(moves)).reshape(-1, 4)
    entered = np.bincount(table[:, 3], table[:, 1], seq_len + 1).astype(np.int64)
    entered[seq_len] = count
    ends = np.cumsum(entered)
    queues = array("q", [0]) * int(ends[-1])
    queues[int(ends[-1]) - count :] = array("q", np.arange(count).tobytes())
    heads = (ends - entered).tolist()
    tails = heads.copy()
    queue_starts = []
    for capacity, full, _, room in moves:
        head = heads[capacity]
        tail = tails[room]
        # These are Python arrays because most slices have a few numbers, for which numpy is slower.
        queues[tail : tail + full] = queues[head : head + full]
        queue_starts.append(head)
        heads[capacity], tails[room] = head + full, tail + full
    bins = table[:, 1]
    queue_positions = np.repeat(np.array(queue_starts, np.int64) - (np.cumsum(bins) - bins), bins)
    queue_positions += np.arange(len(queue_positions))
    sorted_sequences = np.frombuffer(queues, np.int64)[queue_positions].repeat(table[:, 2].repeat(bins))
    sequences = np.empty(len(lengths), np.int64)
    sequences[argsort_longest_first(lengths)] = sorted_sequences
    return count, sequences


def argsort_longest_first(lengths: ItemLengths) -> NDArray[np.int64]:
    """Return indices from the longest item to the shortest; the sort is stable."""
    longest = int(lengths.max(initial=0))
    if longest < 1 << 16:
        # numpy's stable sort of 16-bit integers is a radix sort.
        return np.argsort((longest - lengths).astype(np.uint16), kind="stable")
    # Sorting (negated length, index) as a single integer is several times faster than a stable argsort.
    bits = np.int64(max(len(lengths) - 1, 1)).item().bit_length()
    keys = ((longest - lengths) << bits) | np.arange(len(lengths))
    keys.sort()
    return keys & ((1 << bits) - 1)


def _pack_first_fit(lengths: ItemLengths, seq_len: int) -> tuple[int, NDArray[np.int64]]:
    """Put each item, in the order given, into the first sequence that has room.

    A tournament tree over the room of the sequences finds it. The tree is doubled when no sequence has room.
    """
    size = 1
    room = [seq_len, seq_len]
    sequences = []
    for length in lengths.tolist():
        if room[1] < length:
            room = _double_tree(room, seq_len)
            size *= 2
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        sequences.append(node - size)
        room[node] -= length
        while node > 1:
            own = room[node]
            other = room[node ^ 1]
            most = own if own > other else other  # noqa: FURB136 - max() would take a third of the time
            node //= 2
            if room[node] == most:
                break
            room[node] = most
    return max(sequences, default=-1) + 1, np.array(sequences, np.int64)


def _double_tree(tree: list[int], value: int) -> list[int]:
    """Return a tree with ``tree`` as its left half and ``value`` in all other nodes.

    The children of node i are 2 i and 2 i + 1; the root is node 1.
    """
    doubled = [value] * (2 * len(tree))
    first = 1
    while first < len(tree):
        doubled[2 * first : 3 * first] = tree[first : 2 * first]
        first *= 2
    return doubled


def _pack_sliding_window(lengths: ItemLengths, seq_len: int, *, size: int) -> tuple[int, NDArray[np.int64]]:
    """Fill one sequence after the other from a window that slides over the items.

    The window holds the first ``size`` items that are not packed yet; an item enters as soon as one is taken. A
    sequence takes the first item of the window, so that none waits for long. It then takes the longest that fits
    (the first of equal ones) until none does. Once fewer than ``size`` items remain, a sequence takes the longest
    of them first.
    """
    by_length = np.argsort(lengths, kind="stable")
    length_ranks = np.empty(len(lengths), np.int64)
    length_ranks[by_length] = np.arange(len(lengths))
    counts = np.bincount(lengths, minlength=seq_len + 1)
    # Equal lengths are taken in order, so the head of a length identifies its next item.
    heads = (np.cumsum(counts) - counts).tolist()
    waiting = np.bincount(lengths[:size], minlength=seq_len + 1)
    has_waiting = bytearray((waiting > 0).tobytes())
    waiting = waiting.tolist()
    find_longest = has_waiting.rfind
    entering = iter(lengths[size:].tolist())
    in_order = zip(length_ranks.tolist(), lengths.tolist(), strict=True)
    packed_ranks: list[int] = []
    ends: list[int] = []
    append_rank = packed_ranks.append
    is_window_full = len(lengths) >= size
    while len(packed_ranks) < len(lengths):
        if is_window_full:
            # Find the first item that is not packed yet.
            for length_rank, length in in_order:
                if length_rank >= heads[length]:
                    break
        else:
            length = find_longest(1)
        room = seq_len
        while length > 0:
            append_rank(heads[length])
            heads[length] += 1
            waiting[length] -= 1
            if not waiting[length]:
                has_waiting[length] = 0
            # When no item is left, a length of 0 enters, which is never searched for.
            entered = next(entering, 0)
            waiting[entered] += 1
            has_waiting[entered] = 1
            room -= length
            length = find_longest(1, 1, room + 1)
        is_window_full = entered > 0
        ends.append(len(packed_ranks))
    sequences = np.empty(len(lengths), np.int64)
    order = by_length[np.array(packed_ranks, np.int64)]
    sequences[order] = np.searchsorted(ends, np.arange(len(packed_ranks)), side="right")
    return len(ends), sequences


def _pack_wrap(lengths: ItemLengths, seq_len: int) -> PackingResult:
    """Concatenate all items and cut them: every sequence but the last is full."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    sequence_bounds = np.arange(seq_len, total, seq_len)
    bounds = np.sort(np.concatenate([np.zeros(1, np.int64), ends, sequence_bounds]))
    begins = bounds[:-1]
    bounds = bounds[1:]
    begins, bounds = begins[begins < bounds], bounds[begins < bounds]
    items = np.searchsorted(ends, begins, side="right")
    return PackingResult(
        count=-(-total // seq_len),
        items=items,
        starts=begins - (ends[items] - lengths[items]),
        lengths=bounds - begins,
        sequences=begins // seq_len,
    )


_WINDOW_PATTERN = re.compile(r"window_([1-9][0-9]{0,6})")
# Strategies whose number of sequences does not depend on the order of the lengths.
ORDER_FREE_STRATEGIES = frozenset({"best_fit", "wrap", "none"})
# Strategies that cut a document where a sequence ends.
CUTTING_STRATEGIES = frozenset({"wrap"})
STRATEGIES = ("best_fit", "wrap", "first_fit", "window_N", "none")


def is_strategy(name: str) -> bool:
    return (name in STRATEGIES and name != "window_N") or bool(_WINDOW_PATTERN.fullmatch(name))


def _choose_assigner(strategy: str) -> Callable[[ItemLengths, int], tuple[int, NDArray[np.int64]]]:
    window = _WINDOW_PATTERN.fullmatch(strategy)
    if window:
        return partial(_pack_sliding_window, size=int(window[1]))
    if strategy == "none":
        return lambda lengths, _seq_len: (len(lengths), np.arange(len(lengths)))
    if strategy not in ("best_fit", "first_fit"):
        raise AssertionError(f"{strategy!r} is no strategy that assigns items to sequences")
    return _pack_best_fit if strategy == "best_fit" else _pack_first_fit


def count_sequences(lengths: ItemLengths, seq_len: int, strategy: str) -> int:
    """Return the number of sequences :func:`pack` makes of these lengths.

    ``lengths`` is int64 [N], each at least 0.
    """
    if strategy == "wrap":
        return -(-int(lengths.sum()) // seq_len)
    full_sequences = int((lengths // seq_len).sum())
    remainders = lengths % seq_len
    remainders = remainders[remainders > 0]
    if strategy == "none":
        return full_sequences + len(remainders)
    if strategy == "best_fit":
        return full_sequences + compute_best_fit_moves(_count_lengths(remainders), seq_len, count_only=True)[0]
    return full_sequences + _choose_assigner(strategy)(remainders, seq_len)[0]


def pack(lengths: ItemLengths, seq_len: int, strategy: str) -> PackingResult:
    """Pack items of the given lengths into sequences of at most ``seq_len`` tokens.

    ``lengths`` is int64 [N]; ``strategy`` is one of ``STRATEGIES``. An item longer than ``seq_len`` is split:
    each full sequence holds nothing else, and the remainder is packed with the other items (``wrap`` cuts where a
    sequence ends). Items of length 0 have no span.
    """
    if strategy == "wrap":
        return _pack_wrap(lengths, seq_len)
    items = np.flatnonzero(lengths % seq_len)
    count, sequences = _choose_assigner(strategy)(lengths[items] % seq_len, seq_len)
    full_sequences = lengths // seq_len
    starts = full_sequences[items] * seq_len
    remainders = lengths[items] - starts
    if not full_sequences.any():
        return PackingResult(count, items, starts, remainders, sequences)
    full_items = np.repeat(np.arange(len(lengths)), full_sequences)
    chunk_index = np.arange(len(full_items)) - np.repeat(np.cumsum(full_sequences) - full_sequences, full_sequences)
    return PackingResult(
        count=count + len(full_items),
        items=np.concatenate([items, full_items]),
        starts=np.concatenate([starts, chunk_index * seq_len]),
        lengths=np.concatenate([remainders, np.full(len(full_items), seq_len, np.int64)]),
        sequences=np.concatenate([sequences, count + np.arange(len(full_items))]),
    )


def compute_min_sequences(lengths: NDArray[np.integer[Any]], seq_len: int) -> int:
    """Return a lower bound on the sequences of any packing.

    This is the bound L2 of Martello and Toth (Lower Bounds and Reduction Procedures for the Bin Packing Problem,
    Discrete Applied Mathematics 28, 1990). For each size K, a document above seq_len - K shares its sequence with
    no document of at least K. Two documents above half of seq_len never share a sequence. The remaining documents
    of at least K fill the room next to the latter, and the excess needs sequences of its own. A document longer
    than ``seq_len`` counts as full sequences and a remainder, as packing splits it.

    Args:
        lengths: tokens of each document, integers [N].
        seq_len: tokens of a sequence.
    """
    full_sequences = int((lengths // seq_len).sum())
    remainders = lengths % seq_len
    counts = np.bincount(remainders[remainders > 0], minlength=seq_len + 1).astype(np.int64)
    # documents[w], tokens[w]: number and tokens of the documents of at most w tokens.
    documents = np.cumsum(counts)
    tokens = np.cumsum(counts * np.arange(seq_len + 1))
    half = seq_len // 2
    smallest = np.arange(1, half + 1)
    above_half = documents[seq_len] - documents[half]
    halves = documents[seq_len - smallest] - documents[half]
    room = halves * seq_len - (tokens[seq_len - smallest] - tokens[half])
    small = tokens[half] - tokens[smallest - 1]
    extra_sequences = -(-(small - room) // seq_len)
    return full_sequences + int(above_half + np.maximum(extra_sequences, 0).max(initial=0))
