"""Packing: the lengths of one pool in, the spans of its sequences out, one function a strategy.

``best_fit`` is best-fit decreasing (Johnson, Demers, Ullman, Garey, Graham: Worst-Case
Performance Bounds for Simple One-Dimensional Packing Algorithms, SIAM J. Comput. 1974), done
in bulk on the histogram of lengths: each capacity that has open sequences is marked, the smallest
that fits a length is the first mark at or above it, and as many documents of that length as fit go
into all sequences of that capacity in one move.

``window_N`` looks ahead over the next N documents, as the packer of that name in lmms-engine does, but takes
the longest that fits where that one takes the first. Its first version, ``window_N@1``, packs each N documents
by themselves.
"""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

ItemLengths = NDArray[np.int64]


# Up to this size windows are packed together: above, each by itself is faster.
_MAX_SMALL_WINDOW = 1024
_BATCH_WINDOWS = 1 << 16


@dataclass(frozen=True, slots=True)
class PackingResult:
    """Where each item of a pool went, in the order of the items given [N].

    Attributes:
        count: number of sequences.
        items: number of the item, int64 [N]; an item cut in pieces stands here once a piece.
        starts: first token of the piece inside its item, int64 [N].
        lengths: tokens of the piece, int64 [N].
        sequences: number of the sequence in [0, count), int64 [N].
    """

    count: int
    items: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]


# (capacity, bins, each, room): ``each`` items go into each of the ``bins`` sequences that have
# waited longest with ``capacity`` tokens of room; they wait on with ``room``. A plain tuple:
# thousands are made for each pool.
BestFitMove = tuple[int, int, int, int]


def compute_best_fit_moves(
    histogram: list[tuple[int, int]], seq_len: int, *, counted: bool = False
) -> tuple[int, list[BestFitMove]]:
    """Best-fit decreasing over (length, how many) from the longest down.

    Returns the number of sequences and the moves (none where they are only counted), which take the items
    in the order of the histogram. Sequences wait in one queue for each capacity; new ones join that of ``seq_len``.
    """
    moves: list[BestFitMove] = []
    waiting = [0] * (seq_len + 1)
    # Which capacities have sequences waiting, a byte each: the smallest that fits is one search of the processor's.
    waits = bytearray(seq_len + 1)
    smallest, moved, count = waits.find, moves.append, 0
    for length, items in histogram:
        left = items
        while left:
            capacity = smallest(1, length)
            if capacity < 0:
                capacity = seq_len
                bins = -(-left // (seq_len // length))
                waits[capacity] = 1
                count += bins
            else:
                bins = waiting[capacity]
            each = capacity // length
            full = left // each
            if full >= bins:
                full = bins
                waits[capacity] = 0
            elif not full:
                full, each = 1, left
                if bins == 1:
                    waits[capacity] = 0
            waiting[capacity] = bins - full
            room = capacity - each * length
            waiting[room] += full
            waits[room] = 1
            if not counted:
                moved((capacity, full, each, room))
            left -= full * each
    return count, moves


def _count_lengths(lengths: ItemLengths) -> list[tuple[int, int]]:
    counts = np.bincount(lengths)
    present = np.flatnonzero(counts)[::-1]
    return list(zip(present.tolist(), counts[present].tolist(), strict=True))


def _count_best_fit(lengths: ItemLengths, seq_len: int) -> int:
    return compute_best_fit_moves(_count_lengths(lengths), seq_len, counted=True)[0]


def _pack_best_fit(lengths: ItemLengths, seq_len: int) -> tuple[int, NDArray[np.int64]]:
    """The sequence of each item; equal lengths are taken in the order given."""
    count, moves = compute_best_fit_moves(_count_lengths(lengths), seq_len)
    table = np.fromiter(chain.from_iterable(moves), np.int64, 4 * len(moves)).reshape(-1, 4)
    entered = np.bincount(table[:, 3], table[:, 1], seq_len + 1).astype(np.int64)
    entered[seq_len] = count
    ends = np.cumsum(entered)
    queues = array("q", [0]) * int(ends[-1])
    queues[int(ends[-1]) - count :] = array("q", np.arange(count).tobytes())
    heads = (ends - entered).tolist()
    tails = heads.copy()
    taken_from = []
    for capacity, full, _, room in moves:
        head, tail = heads[capacity], tails[room]
        # Of Python's own arrays, since most stretches are a few numbers long.
        queues[tail : tail + full] = queues[head : head + full]
        taken_from.append(head)
        heads[capacity], tails[room] = head + full, tail + full
    bins = table[:, 1]
    place = np.repeat(np.array(taken_from, np.int64) - (np.cumsum(bins) - bins), bins)
    place += np.arange(len(place))
    taken = np.frombuffer(queues, np.int64)[place].repeat(table[:, 2].repeat(bins))
    sequences = np.empty(len(lengths), np.int64)
    sequences[argsort_longest_first(lengths)] = taken
    return count, sequences


def argsort_longest_first(lengths: ItemLengths) -> NDArray[np.int64]:
    """Indices from the longest item to the shortest, equal lengths in the order given."""
    longest = int(lengths.max(initial=0))
    if longest < 1 << 16:
        # Of 16 bits numpy's stable sort is a radix sort.
        return np.argsort((longest - lengths).astype(np.uint16), kind="stable")
    # One sort of (negated length, index) in a single integer is several times a stable argsort.
    bits = np.int64(max(len(lengths) - 1, 1)).item().bit_length()
    keys = ((longest - lengths) << bits) | np.arange(len(lengths))
    keys.sort()
    return keys & ((1 << bits) - 1)


def _pack_first_fit(lengths: ItemLengths, seq_len: int) -> tuple[int, NDArray[np.int64]]:
    """Each item, in the order given, into the lowest-numbered sequence that has room.

    A tournament tree over the room of all sequences finds it in log2(items) steps.
    """
    size = 1 << max(len(lengths) - 1, 1).bit_length()
    room = [seq_len] * (2 * size)
    sequences = []
    for length in lengths.tolist():
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        sequences.append(node - size)
        room[node] -= length
        node //= 2
        while node:
            left, right = room[2 * node], room[2 * node + 1]
            most = max(right, left)
            if room[node] == most:
                break
            room[node] = most
            node //= 2
    return max(sequences, default=-1) + 1, np.array(sequences, np.int64)


def _pack_sliding_window(
    lengths: ItemLengths, seq_len: int, *, size: int
) -> tuple[int, NDArray[np.int64]]:
    """Fill one sequence after the other from a window that slides over the items.

    The window holds the first ``size`` items that are in no sequence yet, and the next one enters as soon
    as one is taken. A sequence takes the first of them, so that none waits for long, and then the longest
    that fits (of equal ones the first) until none does. Once fewer than ``size`` are left, it takes the
    longest of them first.
    """
    by_length = np.argsort(lengths, kind="stable")
    places = np.empty(len(lengths), np.int64)
    places[by_length] = np.arange(len(lengths))
    counts = np.bincount(lengths, minlength=seq_len + 1)
    # Equal lengths are taken in order, so the first place not taken yet tells which item a length stands for.
    heads = (np.cumsum(counts) - counts).tolist()
    waiting = np.bincount(lengths[:size], minlength=seq_len + 1)
    waits, waiting = bytearray((waiting > 0).tobytes()), waiting.tolist()
    longest, entering = waits.rfind, iter(lengths[size:].tolist())
    in_order = zip(places.tolist(), lengths.tolist(), strict=True)
    taken: list[int] = []
    ends: list[int] = []
    take, full = taken.append, len(lengths) >= size
    while len(taken) < len(lengths):
        if full:
            # The first that is in no sequence yet.
            for place, length in in_order:
                if place >= heads[length]:
                    break
        else:
            length = longest(1)
        room = seq_len
        while length > 0:
            take(heads[length])
            heads[length] += 1
            waiting[length] -= 1
            if not waiting[length]:
                waits[length] = 0
            # Where no item is left, a length of 0 enters, which is never looked for.
            entered = next(entering, 0)
            waiting[entered] += 1
            waits[entered] = 1
            room -= length
            length = longest(1, 1, room + 1)
        full = entered > 0
        ends.append(len(taken))
    sequences = np.empty(len(lengths), np.int64)
    order = by_length[np.array(taken, np.int64)]
    sequences[order] = np.searchsorted(ends, np.arange(len(taken)), side="right")
    return len(ends), sequences


def _make_window_packer(size: int) -> Callable[[ItemLengths, int], tuple[int, NDArray[np.int64]]]:
    """Best fit inside each window of ``size`` consecutive items."""
    assign, stretch = _pack_best_fit, size
    if size <= _MAX_SMALL_WINDOW:
        assign, stretch = partial(_pack_small_windows, size=size), _BATCH_WINDOWS // size * size

    def pack_windows(lengths: ItemLengths, seq_len: int) -> tuple[int, NDArray[np.int64]]:
        sequences = np.empty(len(lengths), np.int64)
        total = 0
        for start in range(0, len(lengths), stretch):
            count, inside = assign(lengths[start : start + stretch], seq_len)
            sequences[start : start + stretch] = inside + total
            total += count
        return total, sequences

    return pack_windows


def _pack_small_windows(
    lengths: ItemLengths, seq_len: int, *, size: int
) -> tuple[int, NDArray[np.int64]]:
    """What ``_pack_best_fit`` gives in each window, in all windows at once, an item of each a step."""
    windows = -(-len(lengths) // size)
    bits, columns = size.bit_length(), np.arange(windows)
    low, high = np.uint64((1 << bits) - 1), np.uint64(2 * bits)
    grid = np.zeros(windows * size, np.int64)
    grid[: len(lengths)] = lengths
    keys = ((seq_len - grid.reshape(windows, size)) << bits) | np.arange(size)
    keys.sort(axis=1)
    longest_first = keys.T.copy()
    needs = (seq_len - (longest_first >> bits)).astype(np.uint64) << high
    # A sequence is one number: its room, the step that left it so, its own number. One not opened
    # yet has more room than any other, so the smallest number that an item fits is its best fit.
    states = np.repeat(np.arange(size, dtype=np.uint64) | np.uint64(seq_len) << high, windows)
    states = states.reshape(size, windows)
    chosen = np.empty((size, windows), np.int64)
    for step in range(size):
        # What an item does not fit wraps around to a number above all others.
        least = (states[: step + 1] - needs[step]).min(axis=0)
        number = least & low
        chosen[step] = number
        states[chosen[step], columns] = (least >> high << high) | np.uint64(step << bits) | number
    counts = (states >> high < seq_len).sum(axis=0)
    sequences = np.empty((windows, size), np.int64)
    sequences[columns, longest_first & ((1 << bits) - 1)] = chosen + (np.cumsum(counts) - counts)
    return int(counts.sum()), sequences.ravel()[: len(lengths)]


def _pack_alone(lengths: ItemLengths, _seq_len: int) -> tuple[int, NDArray[np.int64]]:
    return len(lengths), np.arange(len(lengths))


def _pack_wrap(lengths: ItemLengths, seq_len: int) -> PackingResult:
    """Concatenate and cut: every sequence but the last is full."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(seq_len, total, seq_len)
    bounds = np.sort(np.concatenate([np.zeros(1, np.int64), ends, cuts]))
    begins, bounds = bounds[:-1], bounds[1:]
    begins, bounds = begins[begins < bounds], bounds[begins < bounds]
    items = np.searchsorted(ends, begins, side="right")
    return PackingResult(
        count=-(-total // seq_len),
        items=items,
        starts=begins - (ends[items] - lengths[items]),
        lengths=bounds - begins,
        sequences=begins // seq_len,
    )


_WINDOW_PATTERN = re.compile(r"window_([1-9][0-9]{0,6})(@1)?")
# Their number of sequences follows from which lengths there are, in whatever order.
ORDER_FREE_STRATEGIES = frozenset({"best_fit", "wrap", "none"})
STRATEGIES = ("best_fit", "wrap", "first_fit", "window_N", "none")


def is_strategy(name: str) -> bool:
    """Whether ``name`` is a packing strategy (``window_N`` for any N from 1 to 9,999,999)."""
    return name in ("best_fit", "wrap", "first_fit", "none") or bool(
        _WINDOW_PATTERN.fullmatch(name)
    )


def strategy_to_identity(strategy: str) -> str:
    """Return the name of a strategy in fingerprints, which tells its versions apart.

    Fingerprints of the time before ``window_N`` had a second version have its bare name for the first.
    """
    window = _WINDOW_PATTERN.fullmatch(strategy)
    if not window:
        return strategy
    return f"window_{window[1]}" if window[2] else f"window_{window[1]}@2"


def strategy_from_identity(name: str) -> str:
    """Return the strategy that has this name in fingerprints; the inverse of :func:`strategy_to_identity`."""
    return f"{name}@1" if _WINDOW_PATTERN.fullmatch(name) else name.removesuffix("@2")


def _choose_assigner(strategy: str) -> Callable[[ItemLengths, int], tuple[int, NDArray[np.int64]]]:
    window = _WINDOW_PATTERN.fullmatch(strategy)
    if window:
        size = int(window[1])
        return _make_window_packer(size) if window[2] else partial(_pack_sliding_window, size=size)
    return {"best_fit": _pack_best_fit, "first_fit": _pack_first_fit, "none": _pack_alone}[strategy]


def count_sequences(lengths: ItemLengths, seq_len: int, strategy: str) -> int:
    """How many sequences :func:`pack` makes of these lengths (int64 [N], each at least 0)."""
    if strategy == "wrap":
        return -(-int(lengths.sum()) // seq_len)
    whole = int((lengths // seq_len).sum())
    rest = lengths % seq_len
    rest = rest[rest > 0]
    if strategy == "none":
        return whole + len(rest)
    if strategy == "best_fit":
        return whole + _count_best_fit(rest, seq_len)
    return whole + _choose_assigner(strategy)(rest, seq_len)[0]


def pack(lengths: ItemLengths, seq_len: int, strategy: str) -> PackingResult:
    """Pack items of the given lengths into sequences of at most ``seq_len`` tokens.

    An item longer than ``seq_len`` is cut: its whole sequences stand alone, its rest is packed
    with the others (``wrap`` cuts where a sequence ends). Items of length 0 have no piece.

    Args:
        lengths: tokens of each item, int64 [N].
        seq_len: tokens of a sequence.
        strategy: one of ``STRATEGIES``.
    """
    if strategy == "wrap":
        return _pack_wrap(lengths, seq_len)
    items = np.flatnonzero(lengths % seq_len)
    count, sequences = _choose_assigner(strategy)(lengths[items] % seq_len, seq_len)
    whole = lengths // seq_len
    starts = whole[items] * seq_len
    rest = lengths[items] - starts
    if not whole.any():
        return PackingResult(count, items, starts, rest, sequences)
    cut = np.repeat(np.arange(len(lengths)), whole)
    piece = np.arange(len(cut)) - np.repeat(np.cumsum(whole) - whole, whole)
    return PackingResult(
        count=count + len(cut),
        items=np.concatenate([items, cut]),
        starts=np.concatenate([starts, piece * seq_len]),
        lengths=np.concatenate([rest, np.full(len(cut), seq_len, np.int64)]),
        sequences=np.concatenate([sequences, count + np.arange(len(cut))]),
    )
