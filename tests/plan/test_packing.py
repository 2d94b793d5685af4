import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.plan import count_sequences
from batchloom.plan.packing.strategies import is_strategy, pack
from tiers import examples

STRATEGIES = st.sampled_from(["best_fit", "wrap", "first_fit", "none", "window_1", "window_7", "window_100"])
LENGTHS = st.lists(st.integers(0, 70), max_size=120).map(lambda xs: np.array(xs, np.int64))


def compute_rooms(packed, seq_len):
    return seq_len - np.bincount(packed.sequences, packed.lengths, packed.count).astype(np.int64)


@given(lengths=LENGTHS, seq_len=st.integers(1, 40), strategy=STRATEGIES)
@settings(max_examples=examples(300))
def test_every_token_once_and_no_sequence_too_full(lengths, seq_len, strategy):
    packed = pack(lengths, seq_len, strategy)
    covered = [np.zeros(n, int) for n in lengths]
    for item, start, length in zip(packed.items, packed.starts, packed.lengths, strict=True):
        covered[item][start : start + length] += 1
    assert all((c == 1).all() for c in covered)
    assert (packed.lengths > 0).all()
    assert (compute_rooms(packed, seq_len) >= 0).all()
    assert packed.count == count_sequences(lengths, seq_len, strategy)
    assert np.unique(packed.sequences).size == packed.count


def pack_best_fit(lengths, seq_len):
    """Return sequences of documents by the best-fit rule of docs/reference/order.md, section 4."""
    compute_rooms, since, sequences = [], [], [0] * len(lengths)
    for time, item in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        fitting = [s for s, room in enumerate(compute_rooms) if room >= lengths[item]]
        if not fitting:
            compute_rooms.append(seq_len)
            since.append(time)
            fitting = [len(compute_rooms) - 1]
        best = min(fitting, key=lambda s: (compute_rooms[s], since[s]))
        compute_rooms[best] -= lengths[item]
        since[best] = time
        sequences[item] = best
    return sequences


@given(lengths=st.lists(st.integers(1, 29), max_size=200), seq_len=st.integers(30, 64))
@settings(max_examples=examples(200))
def test_best_fit_in_bulk_is_best_fit_decreasing(lengths, seq_len):
    packed = pack(np.array(lengths, np.int64), seq_len, "best_fit")
    assert packed.sequences.tolist() == pack_best_fit(lengths, seq_len)


def test_ties_of_room_go_to_the_sequence_that_has_had_it_longest():
    """9 leaves room for 1 in sequence 1 before 7 does in sequence 0."""
    packed = pack(np.array([12, 10, 9, 7, 1, 1]), 20, "best_fit")
    assert packed.sequences.tolist() == [0, 1, 1, 0, 1, 0]


@given(lengths=st.lists(st.integers(1, 29), max_size=200), seq_len=st.integers(30, 64))
@settings(max_examples=examples(200))
def test_first_fit_is_true_first_fit(lengths, seq_len):
    packed = pack(np.array(lengths, np.int64), seq_len, "first_fit")
    open_rooms, expected = [], []
    for length in lengths:
        fitting = [i for i, room in enumerate(open_rooms) if room >= length]
        if not fitting:
            open_rooms.append(seq_len)
            fitting = [len(open_rooms) - 1]
        open_rooms[fitting[0]] -= length
        expected.append(fitting[0])
    assert packed.sequences.tolist() == expected


def pack_windows(lengths, seq_len, size):
    """Return sequences of documents by the window rule of docs/reference/order.md, section 4."""
    sequences, number = [None] * len(lengths), 0

    def longest(items):
        return max(items, key=lambda i: (lengths[i], -i), default=None)

    def window():
        return [i for i, sequence in enumerate(sequences) if sequence is None][:size]

    while None in sequences:
        room = seq_len
        document = window()[0] if len(window()) == size else longest(window())
        while document is not None:
            sequences[document] = number
            room -= lengths[document]
            document = longest(i for i in window() if lengths[i] <= room)
        number += 1
    return sequences


@given(
    lengths=st.lists(st.integers(1, 29), max_size=100),
    seq_len=st.integers(30, 64),
    size=st.integers(1, 40),
)
@settings(max_examples=examples(100))
def test_a_sequence_takes_the_first_of_its_window_and_then_the_longest(lengths, seq_len, size):
    packed = pack(np.array(lengths, np.int64), seq_len, f"window_{size}")
    assert packed.sequences.tolist() == pack_windows(lengths, seq_len, size)


def count_lmms_engine_packs(lengths, packing_length, window_size):
    """Count the packs that lmms-engine makes with ``packing_strategy: window_N``.

    EvolvingLMMs-Lab/lmms-engine, ``MultiModalDataset._pack_by_window`` of ``datasets/naive/multimodal_dataset.py``:
    a pack takes, in order, whatever still fits of a window of N samples; behind it as many samples enter the
    window as it took.
    """
    window, waiting, packs = lengths[:window_size], lengths[window_size:], 0
    while window:
        room, remaining = packing_length, []
        for length in window:
            if length <= room:
                room -= length
            else:
                remaining.append(length)
        taken = len(window) - len(remaining)
        window, waiting, packs = remaining + waiting[:taken], waiting[taken:], packs + 1
    return packs


DISTRIBUTIONS = {
    "uniform": lambda rng, n, most: rng.integers(1, most + 1, n),
    "log-normal": lambda rng, n, most: np.clip(rng.lognormal(np.log(most / 4), 1, n), 1, most),
    "exponential": lambda rng, n, most: np.clip(rng.exponential(most / 5, n), 1, most),
    "short": lambda rng, n, most: rng.integers(1, most // 8, n),
    "about half": lambda rng, n, most: rng.integers(most // 4, most * 3 // 4, n),
    "short and long": lambda rng, n, most: np.where(
        rng.random(n) < 0.5, rng.integers(1, most // 10, n), rng.integers(most * 6 // 10, most, n)
    ),
}


@pytest.mark.parametrize("size", [2, 8, 16, 64, 1000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_windows_never_make_more_packs_than_lmms_engine(name, size):
    total, lmms_engine_total = 0, 0
    for seed in range(examples(20)):
        rng = np.random.default_rng(seed)
        max_length = int(rng.choice([512, 2048, 8192]))
        lengths = DISTRIBUTIONS[name](rng, int(rng.integers(300, 1500)), max_length).astype(np.int64)
        count = count_sequences(lengths, max_length, f"window_{size}")
        lmms_engine_count = count_lmms_engine_packs(lengths.tolist(), max_length, size)
        assert count <= lmms_engine_count, (seed, count, lmms_engine_count)
        total, lmms_engine_total = total + count, lmms_engine_total + lmms_engine_count
    # Documents of a quarter to three quarters of a sequence fit in well-chosen pairs.
    if name == "about half" and size > 2:
        assert total < 0.98 * lmms_engine_total


@pytest.mark.parametrize("size", [16, 1000])
def test_a_window_of_a_whole_pool_is_filled(size):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.2, 1.1, 65_536), 1, 2048).astype(np.int64)
    assert lengths.sum() / 2048 / count_sequences(lengths, 2048, f"window_{size}") > 0.985


@pytest.mark.parametrize("size", [2, 10_000])
def test_windows_take_memory_for_their_pool_alone(size):
    lengths = np.random.default_rng(0).integers(1, 2048, 16_384)
    tracemalloc.start()
    pack(lengths, 2048, f"window_{size}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * len(lengths)


@given(lengths=st.lists(st.integers(1, 29), max_size=100), size=st.integers(1, 40))
@settings(max_examples=examples(100))
def test_the_wait_of_a_document_is_at_most_twice_its_window(lengths, size):
    packed = pack(np.array(lengths, np.int64), 30, f"window_{size}")
    in_order = np.sort(packed.sequences)
    for item, sequence in enumerate(packed.sequences.tolist()):
        # Sequence that was being filled when the document entered the window.
        entered = in_order[item - size] if item >= size else 0
        assert entered <= sequence < entered + 2 * size


def test_wrap_fills_every_sequence_but_the_last():
    packed = pack(np.array([5, 3, 0, 9, 2]), 4, "wrap")
    assert compute_rooms(packed, 4).tolist() == [0, 0, 0, 0, 1]
    spans = zip(packed.sequences, packed.items, packed.starts, packed.lengths, strict=True)
    assert [tuple(map(int, s)) for s in spans] == [
        (0, 0, 0, 4), (1, 0, 4, 1), (1, 1, 0, 3), (2, 3, 0, 4), (3, 3, 4, 4), (4, 3, 8, 1), (4, 4, 0, 2),
    ]  # fmt: skip


def test_a_long_document_is_cut_and_its_remainder_is_packed():
    packed = pack(np.array([10, 2, 2]), 4, "best_fit")
    spans = sorted(zip(packed.items.tolist(), packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    assert spans == [(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 2), (2, 0, 2)]
    assert packed.count == 4


def test_log_normal_documents_fill_99_9_percent():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.2, 1.1, 65_536), 1, None).astype(np.int64)
    for seq_len in (2048, 4096, 8192):
        count = count_sequences(lengths, seq_len, "best_fit")
        assert lengths.sum() / (count * seq_len) > 0.999


@pytest.mark.parametrize("name", ["best-fit", "window_0", "window_", "window_12345678", "window_8@1", "", "wrap "])
def test_unknown_strategies_are_recognized(name):
    assert not is_strategy(name)
