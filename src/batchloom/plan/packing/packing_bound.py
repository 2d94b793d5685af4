"""Lower bound on the number of sequences of any packing.

Documents of 1,100 to 1,500 tokens cannot fill sequences of 2,048, whatever the strategy. The bound shows whether
padding is due to the lengths or to the strategy.
"""

import numpy as np
from numpy.typing import NDArray


def compute_min_sequences(lengths: NDArray[np.int64], seq_len: int) -> int:
    """Return a lower bound on the sequences of any packing.

    This is the bound L2 of Martello and Toth (Lower Bounds and Reduction Procedures for the Bin Packing Problem,
    Discrete Applied Mathematics 28, 1990). For each size K, a document above seq_len - K shares its sequence with
    no document of at least K. Two documents above half of seq_len never share a sequence. The remaining documents
    of at least K fill the room next to the latter, and the excess needs sequences of its own. A document longer
    than ``seq_len`` counts as full sequences and a remainder, as packing splits it.

    Args:
        lengths: tokens of each document, int64 [N].
        seq_len: tokens of a sequence.
    """
    full_sequences = int((lengths // seq_len).sum())
    remainders = lengths % seq_len
    counts = np.bincount(remainders[remainders > 0], minlength=seq_len + 1).astype(np.int64)
    # documents[w], tokens[w]: number and tokens of the documents of at most w tokens.
    documents, tokens = np.cumsum(counts), np.cumsum(counts * np.arange(seq_len + 1))
    half = seq_len // 2
    smallest = np.arange(1, half + 1)
    above_half = documents[seq_len] - documents[half]
    halves = documents[seq_len - smallest] - documents[half]
    room = halves * seq_len - (tokens[seq_len - smallest] - tokens[half])
    small = tokens[half] - tokens[smallest - 1]
    extra_sequences = -(-(small - room) // seq_len)
    return full_sequences + int(above_half + np.maximum(extra_sequences, 0).max(initial=0))
