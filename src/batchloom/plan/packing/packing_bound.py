"""What no packing of whole documents can do better: a bound from below on the sequences they take.

Documents of 1,100 to 1,500 tokens cannot fill sequences of 2,048, whatever the strategy; the bound
says so in numbers, before anybody blames the packing.
"""

import numpy as np
from numpy.typing import NDArray


def compute_min_sequences(lengths: NDArray[np.int64], seq_len: int) -> int:
    """A number of sequences that every packing of these documents takes at least.

    The bound L2 of Martello and Toth (Lower Bounds and Reduction Procedures for the Bin Packing
    Problem, Discrete Applied Mathematics 28, 1990): for each size K, documents above seq_len - K
    stand alone among those of at least K, those above half of seq_len share with no other of that
    kind, and what the rest has too many for the room beside them takes sequences of its own. A
    document longer than ``seq_len`` counts as its whole sequences and its rest, as packing cuts it.

    Args:
        lengths: tokens of each document, int64 [N].
        seq_len: tokens of a sequence.
    """
    full_sequences = int((lengths // seq_len).sum())
    remainders = lengths % seq_len
    counts = np.bincount(remainders[remainders > 0], minlength=seq_len + 1).astype(np.int64)
    # number[w], tokens[w]: of the documents of at most w tokens.
    documents, tokens = np.cumsum(counts), np.cumsum(counts * np.arange(seq_len + 1))
    half = seq_len // 2
    smallest = np.arange(1, half + 1)
    above_half = documents[seq_len] - documents[half]
    halves = documents[seq_len - smallest] - documents[half]
    room = halves * seq_len - (tokens[seq_len - smallest] - tokens[half])
    small = tokens[half] - tokens[smallest - 1]
    extra_sequences = -(-(small - room) // seq_len)
    return full_sequences + int(above_half + np.maximum(extra_sequences, 0).max(initial=0))
