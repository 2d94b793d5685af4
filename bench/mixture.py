"""Load throughput of a mixture of many sources against one source of the same tokens, in one run, cache warm.

    python bench/mixture.py [--documents 200000] [--sources 100] [--seconds 4] [--rounds 3]

The same corpus lies in one store and split into as many as there are sources. Prints tokens/s of ready
[32, 2048] batches for both and the ratio; sizes and weights of the sources are alike, or skewed (``--skew``: the
k-th has weight 1 / k).
"""

import argparse
import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np

import batchloom
from corpus import make_store
from load import BATCH, SEQ_LEN, measure


def batches(data, prefetch: int):
    """Tokens of one batch after the other."""
    loader = batchloom.Loader(
        data,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        steps=1 << 24,
        rank=0,
        world_size=1,
        output="numpy",
        prefetch=prefetch,
    )
    for batch in loader:
        yield batch["input_ids"].shape[0] * SEQ_LEN


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skew", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    try:
        one = batchloom.open_store(make_store(work / "one", options.documents))
        share = options.documents // options.sources
        stores = {
            f"s{k:03}": batchloom.open_store(make_store(work / f"s{k:03}", share, seed=k))
            for k in range(options.sources)
        }
        weights = {name: 1 / (k + 1) if options.skew else 1.0 for k, name in enumerate(stores)}
        mixture = batchloom.Mixture(weights, stores=stores)
        for path in work.rglob("*.bin"):
            path.read_bytes()
        sources = {
            "one source": lambda: batches(one, 4),
            f"{options.sources} sources": lambda: batches(mixture, 4),
            "one source, no thread": lambda: batches(one, 0),
            f"{options.sources} sources, no thread": lambda: batches(mixture, 0),
        }
        figures = {name: [] for name in sources}
        for _, (name, source) in itertools.product(range(options.rounds), sources.items()):
            figures[name].append(measure(source(), options.seconds) / 1e6)
        base = 0.0
        for name, values in figures.items():
            median = float(np.median(values))
            base = base if "sources" in name else median
            print(
                f"{name:28} {median:8.1f} Mtok/s (of {min(values):.0f}-{max(values):.0f})   of one source "
                f"{median / base:5.2f}",
                flush=True,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
