"""Cost of the metrics of a run, as a share of the loader's time for a batch.

Both are measured in alternation.

    python bench/figures.py
"""

import tempfile
import time

import numpy as np

from batchloom import Loader
from batchloom.batches import Meter
from batchloom.testing import write_store
from corpus import lengths

TURNS = 300


def timed(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def small(store) -> str:
    """Measure the metrics of every step with one rank and 32 rows."""
    loader = Loader(
        store, seq_len=2048, global_batch_size=32, steps=10**6, output="numpy", rank=0,
        world_size=1, prefetch=0,
    )  # fmt: skip
    batches, meter = iter(loader), Meter(loader)
    taken: dict[str, list[float]] = {"batch": [], "step": [], "figures": []}
    for step in range(TURNS):
        taken["batch"].append(timed(lambda: next(batches)))
        taken["step"].append(timed(lambda step=step: meter.step(step)))
        taken["figures"].append(timed(meter.metrics))
    batch, step, figures = (float(np.median(taken[name])) for name in taken)
    return (
        f"2048 x 32: a batch {batch * 1e3:.2f} ms, step() {step / batch:.4f} of it, figures() {figures / batch:.3f} of it "
        f"({figures * 1e6:.0f} us)"
    )


def large(store, *, balance: bool) -> str:
    """Measure the metrics of steps with 16,384 rows on 1,024 ranks, on one rank."""
    loader = Loader(
        store, seq_len=2048, global_batch_size=16384, steps=10**6, output="numpy", rank=0,
        world_size=1024, prefetch=0, balance=balance,
    )  # fmt: skip
    meter = Meter(loader)
    one, many = [], []
    # Alternate the steps, since the same step twice in a row counts once.
    for number in range(9):
        meter.step(number % 2)
        one.append(timed(meter.metrics))
    for _ in range(3):
        for number in range(1000):
            meter.step(number % 2)
        many.append(timed(meter.metrics))
    return (
        f"1,024 ranks x 16 rows, balance={balance}: figures() of a step {np.median(one) * 1e3:.1f} ms, after 1,000 "
        f"steps {np.median(many) * 1e3:.1f} ms"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        documents = lengths(40_000)
        store = write_store(folder, [np.arange(n) % 256 for n in documents], documents_per_shard=10_000)
        print(small(store))
        for balance in (False, True):
            print(large(store, balance=balance))


if __name__ == "__main__":
    main()
