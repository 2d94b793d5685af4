"""Cost per batch of a mixture of many sources, against one source.

    python bench/mixture.py [--documents 400000] [--sources 100] [--rounds 7] [--skew]

The same corpus is in one store and split into one store per source. Prints milliseconds of processor time of a
[32, 2048] batch made in this thread with a warm cache, in rounds of 1,000 batches so that other load slows both, and
the ratio: of the medians, and in total (with the rounds in which sources of equal size enter their next pools
together). ``--skew``: the k-th source has weight 1 / k.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

import batchloom
from corpus import make_store
from load import BATCH, SEQ_LEN

TURN = 1000


def loader_of(data) -> batchloom.Loader:
    return batchloom.Loader(
        data,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        steps=1 << 24,
        rank=0,
        world_size=1,
        output="numpy",
        prefetch=0,
    )


def turn(loader: batchloom.Loader, first: int) -> float:
    """Measure milliseconds of processor time per batch over a round."""
    begin = time.thread_time()
    for step in range(first, first + TURN):
        loader.batch(step)
    return (time.thread_time() - begin) / TURN * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=400_000)
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
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
        loaders = {"one source": loader_of(one), f"{options.sources} sources": loader_of(mixture)}
        figures = {name: [] for name in loaders}
        for number in range(options.rounds + 1):
            for name, loader in loaders.items():
                figures[name].append(turn(loader, number * TURN))
        # The first round is the warm-up.
        figures = {name: np.array(values[1:]) for name, values in figures.items()}
        base = figures["one source"]
        for name, values in figures.items():
            print(
                f"{name:14} {np.median(values):6.3f} ms a batch (of {values.min():.2f}-{values.max():.2f})   "
                f"of one source {np.median(base) / np.median(values):5.2f}, in all {base.sum() / values.sum():5.2f}"
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
