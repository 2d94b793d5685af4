"""Sharing a step: assigning rows by attention cost, alignment, context slices.

python bench/share.py [--peers]
"""

import argparse
import tempfile
import time
from types import SimpleNamespace

import numpy as np

from batchloom import Loader, Plan, PlanSpec
from batchloom.batches import RowCosts, select_rank_rows
from batchloom.batches.loading.rank_share import RankShare, measure_imbalance
from batchloom.plan import Mesh
from batchloom.plan.order import RankPlacement
from batchloom.testing import write_store
from corpus import lengths

STEPS = 12


def source(sizes: np.ndarray) -> SimpleNamespace:
    """Return a plan's view of a store with these document sizes."""
    return SimpleNamespace(lengths=SimpleNamespace(size=len(sizes), take=sizes.__getitem__), fingerprint="bench")


def dealing(seq_len: int, ranks: int, rows: int, documents: np.ndarray) -> str:
    """Measure milliseconds of balancing per step, and imbalance with and without it."""
    spec = PlanSpec(seq_len=seq_len, global_batch_size=ranks * rows, steps=STEPS)
    share, taken, costs = RankShare(RankPlacement(0, ranks), rows, 1), {}, RowCosts()
    for balance in (False, True):
        plan = Plan(source(documents), spec)
        plan.rows(0, STEPS * ranks * rows)
        begin = time.perf_counter()
        for step in range(STEPS):
            plan.rows(step * ranks * rows, (step + 1) * ranks * rows)
            select_rank_rows(plan, step, share, costs if balance else None)
        taken[balance] = (time.perf_counter() - begin) / STEPS * 1e3
    found = [measure_imbalance(plan, step, share, costs, balance=True) for step in range(STEPS)]
    plain, dealt = (np.mean([getattr(f, n) for f in found]) for n in ("in_order", "dealt"))
    return (
        f"balance {seq_len:6}: {ranks:5} ranks x {rows:3} rows, {plain:.3f} in order, {dealt:.3f} dealt, "
        f"{taken[True] - taken[False]:.2f} ms a step"
    )


def filled(align: int, documents: np.ndarray) -> str:
    """Measure how full sequences of 8,192 tokens are with aligned documents."""
    plan = Plan(source(documents), PlanSpec(seq_len=8192, global_batch_size=1, align=align))
    rows = plan.rows(0, plan.orders.sequences_per_epoch)
    return f"align {align:3} 8192: filled {rows.lengths.sum() / (len(rows) * 8192):.3%}"


def slices(folder: str, documents: np.ndarray) -> str:
    """Measure the time per row of one of 8 context ranks, relative to complete rows."""
    store = write_store(folder, [np.arange(n) % 256 for n in documents])
    taken = []
    for mesh in (Mesh(), Mesh(context=8, slices="zigzag")):
        options = {"seq_len": 8192, "global_batch_size": 16, "output": "numpy", "labels": "shifted"}
        loader = Loader(store, **options, mesh=mesh, rank=0, world_size=mesh.processes_per_data_rank)
        times = []
        for step in range(30):
            begin = time.perf_counter()
            loader.batch(step)
            times.append(time.perf_counter() - begin)
        taken.append(sorted(times)[15])
    return f"a zigzag slice of 8: {taken[1] * 1e3 / 16:.2f} ms a row, {taken[1] / taken[0]:.2f} x the whole row"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; there is none here")
    parser.parse_args()
    documents = lengths(1 << 20).astype(np.int64)
    for sizes in ((2048, 1024, 16), (8192, 128, 8), (8192, 8, 8), (32768, 32, 8)):
        print(dealing(*sizes, documents))
    for align in (1, 16, 64):
        print(filled(align, documents[: 1 << 16]))
    with tempfile.TemporaryDirectory() as folder:
        print(slices(folder, np.minimum(documents[:6000], 8192)))


if __name__ == "__main__":
    main()
