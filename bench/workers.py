"""Cost of DataLoader workers: processor time of the consumer and of the workers for each batch.

    python bench/workers.py [--workers 0 1 2 4] [--rounds 3] [--seconds 3] [--against OTHER/src]

Prints medians in ms a batch of [32, 2048] tokens, cache warm, by the number of workers, and the same for a DataLoader
of plain numbers. ``--against`` also measures another source tree. Each runs in a process of its own, in turn.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

SEQ_LEN, BATCH = 2048, 32


def read_processor_seconds(pid: int) -> float:
    """Return the processor time that a running process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_dataset(store: str):
    """Return the batches of a store; plain numbers without one."""
    from torch.utils.data import IterableDataset

    import batchloom
    from batchloom.adapters.pytorch import LoaderIterable

    class Numbers(IterableDataset):
        def __iter__(self):
            return itertools.count()

    if not store:
        return Numbers()
    loader = batchloom.Loader(
        batchloom.open_store(store), seq_len=SEQ_LEN, global_batch_size=BATCH, epochs=1000, rank=0, world_size=1
    )
    return LoaderIterable(loader)


def measure(store: str, workers: int, seconds: float) -> dict[str, float]:
    """Measure ms a batch: by the clock, of the consumer and of all workers."""
    from torch.utils.data import DataLoader

    warnings.simplefilter("ignore")  # torch warns of more workers than cores
    batches = iter(DataLoader(make_dataset(store), batch_size=None, num_workers=workers))
    for _ in range(50 * max(workers, 1)):
        next(batches)
    pids = [process.pid for process in multiprocessing.active_children()]

    def read_clocks() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time(), sum(map(read_processor_seconds, pids))])

    begin, count = read_clocks(), 0
    while time.perf_counter() - begin[0] < seconds:
        next(batches)
        count += 1
    clock, consumer, all_workers = ((read_clocks() - begin) * 1000 / count).tolist()
    return {"clock": clock, "consumer": consumer, "workers": all_workers}


def run_child(tree: str, store: str, workers: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", store, str(workers), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": tree}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--against", help="the src folder of another version")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        store, workers, seconds = options.child
        print(json.dumps(measure(store, int(workers), float(seconds))))
        return
    from corpus import make_store

    own_tree = str(Path(__file__).parents[1] / "src")
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    try:
        store = make_store(work / "store", options.documents)
        for path in (store / "train").glob("*.bin"):
            path.read_bytes()
        sources = {"numbers": (own_tree, ""), "batches": (own_tree, str(store))}
        if options.against:
            sources["batches of the other"] = options.against, str(store)
        print(f"{os.cpu_count()} cores; ms a batch of {BATCH} x {SEQ_LEN}, medians of {options.rounds}")
        for workers in options.workers:
            results = {name: [] for name in sources}
            for _ in range(options.rounds):
                for name, (tree, folder) in sources.items():
                    results[name].append(run_child(tree, folder, workers, options.seconds))
            for name, rounds in results.items():
                clock, consumer, all_workers = (float(np.median([one[key] for one in rounds])) for key in rounds[0])
                print(
                    f"{workers} workers, {name:20}  clock {clock:5.2f}   consumer {consumer:5.2f}   workers {all_workers:5.2f}"
                )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
