"""Packing and permuting a pool of 65,536 log-normal documents: fill and speed.

Speeds are compared with a random argsort of the same size.

    python bench/pack.py [--peers]
"""

import argparse
import time

import numpy as np

from batchloom.plan import Permutation, count_sequences
from batchloom.plan.packing.strategies import pack
from corpus import lengths

POOL = 65_536


def best(action, repeats: int = 15) -> float:
    """Return the median seconds of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; there is none here")
    parser.parse_args()
    pool = lengths(POOL).astype(np.int64)
    for seq_len in (2048, 4096, 8192, 32768):
        count = count_sequences(pool, seq_len, "best_fit")
        counting = best(lambda: count_sequences(pool, seq_len, "best_fit"))  # noqa: B023
        packing = best(lambda: pack(pool, seq_len, "best_fit"))  # noqa: B023
        print(
            f"best_fit {seq_len:6}: filled {pool.sum() / (count * seq_len):.4%}, "
            f"count {POOL / counting / 1e6:5.1f} M documents/s, spans {POOL / packing / 1e6:5.1f} M documents/s"
        )
    for strategy in ("wrap", "first_fit", "window_16", "window_1000", "none"):
        packed = pack(pool, 2048, strategy)
        packing = best(lambda: pack(pool, 2048, strategy), 5)  # noqa: B023
        print(
            f"{strategy:13} 2048: filled {pool.sum() / (packed.count * 2048):.4%}, {POOL / packing / 1e6:5.1f} M documents/s"
        )
    permutation = Permutation(10_000_000, (1, 2))
    positions = np.arange(POOL)
    sorting = best(lambda: np.argsort(np.random.default_rng(0).random(POOL)))
    permuting = best(lambda: permutation.at(positions))
    print(f"permutation of {POOL:,} indices: {permuting * 1e3:.2f} ms ({permuting / sorting:.2f} x a random argsort)")


if __name__ == "__main__":
    main()
