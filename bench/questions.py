"""Position queries on a billion documents on disk: rows, explain, when and resume.

    python bench/questions.py [--documents N] [--seq-len N]

A file of lengths (log-normal, mean of log 6.2, sigma 1.1; 4 bytes per document) is in
BATCHLOOM_BENCH_CACHE, or a temporary folder. The table of sequences per pool is counted once; then
queries run cold (pages of the file evicted, a new plan) and warm (another position of the
same plan), wall time. 10 M documents are counted while a loader serves.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import batchloom
from batchloom import Loader, Mixture, Plan, PlanSpec, open_store
from batchloom.analysis import forecast_plan
from batchloom.plan import parse_assumed_stores
from batchloom.store import StoreLengths, map_file
from corpus import lengths, make_store

CHUNK = 50_000_000


class OnDisk:
    """Minimal store of a plan, with lengths in a file."""

    def __init__(self, path: Path, tokens: int) -> None:
        self.lengths = StoreLengths(np.frombuffer(map_file(path), "<u4"))
        self.tokens, self.fingerprint = tokens, "bench"


def made(path: Path, documents: int) -> int:
    """Write the lengths unless they exist; return their sum."""
    if path.exists() and path.stat().st_size == 4 * documents:
        told: int = json.loads(path.with_suffix(".json").read_text())
        return told
    tokens, drawn = 0, lengths(min(CHUNK, documents))
    with path.open("wb") as file:
        for start in range(0, documents, CHUNK):
            part = np.roll(drawn, start // CHUNK)[: documents - start]
            tokens += int(part.sum(dtype=np.int64))
            file.write(part.tobytes())
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".json").write_text(json.dumps(tokens))
    return tokens


def dropped(path: Path) -> None:
    """Evict the pages of a file from memory."""
    gc.collect()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def told(name: str, cold: list[float], warm: list[float]) -> None:
    print(
        f"{name:28} cold {statistics.median(cold):7.1f} ms (most {max(cold):.1f})   "
        f"warm {statistics.median(warm):7.1f} ms (most {max(warm):.1f})",
        flush=True,
    )


def ask(path: Path, tokens: int, spec: PlanSpec) -> None:
    """Run every query cold and warm."""
    documents = path.stat().st_size // 4
    plan = Plan(OnDisk(path, tokens), spec)
    dropped(path)
    begin, cpu = time.perf_counter(), time.process_time()
    # The process that counts during a run reads the lengths through first, too.
    plan.orders.store.lengths.read_through()
    plan.orders.count_all()
    print(
        f"table of {plan.orders.pools.count:,} pools: {time.perf_counter() - begin:.1f} s, {time.process_time() - cpu:.1f} s of "
        "one core",
        flush=True,
    )
    counts = plan.orders.order(0).counts.count_all()
    state = plan.state(plan.positions_of(plan.steps // 3)[0])
    steps = plan.steps
    del plan
    numbers = [int(n) for n in np.linspace(0.001, 0.999, 12) * (steps - 1)]

    def fresh() -> Plan:
        dropped(path)
        new = Plan(OnDisk(path, tokens), spec)
        new.orders.order(0).counts.adopt(counts)
        return new

    questions: dict[str, Callable[[Plan, int], object]] = {
        "rows of a step": lambda plan, n: plan.rows(*plan.positions_of(n)),
        "explain a step": batchloom.explain,
        "explain a row": lambda plan, n: batchloom.explain(plan, n, row=3),
        "when": lambda plan, n: batchloom.when(plan, document=n * 7919 % documents),
        "resume and first rows": lambda plan, n: plan.rows(plan.resume(state), plan.resume(state) + n % 7 + 1),
    }
    for name, question in questions.items():
        cold, warm = [], []
        for n in numbers:
            plan = fresh()
            cold.append(timed(partial(question, plan, n * 48271 % steps)))
            del plan
        plan = fresh()
        question(plan, 1)
        for n in numbers:
            place = n * 48271 % steps
            # Use the same pages, but nothing that the plan has cached.
            question(plan, place)
            again = Plan(plan.orders.store, spec)
            again.orders.order(0).counts.adopt(counts)
            warm.append(timed(partial(question, again, place)))
        del plan, again
        told(name, cold, warm)


def beside(folder: Path) -> None:
    """Count 10 M documents while a loader serves."""
    store = open_store(make_store(folder / "store", 10_000_000, sparse=True))
    loader = Loader(store, seq_len=2048, global_batch_size=32, output="numpy", rank=0, world_size=1)
    begin, served = time.perf_counter(), 0
    waiting = True
    for _ in loader:
        served += 1
        # Duration of a small model's step.
        time.sleep(0.02)
        if not waiting:
            break
        waiting = not list((folder / "store" / "plans").glob("*.counts"))
    print(f"10 M documents beside a loader: {time.perf_counter() - begin:.2f} s, {served} steps served")
    code = (
        "import batchloom, sys; store = batchloom.open_store(sys.argv[1]); "
        "print(len(batchloom.Loader(store, seq_len=2048, global_batch_size=32, output='numpy', rank=0, world_size=1)))"
    )
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(folder / "store")], check=True, capture_output=True)
    print(f"a process that asks for its length after it: {time.perf_counter() - begin:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=1_000_000_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`")
    asked = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    cache = Path(os.environ.get("BATCHLOOM_BENCH_CACHE") or work)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    try:
        path = cache / f"lengths-{asked.documents}.u32"
        tokens = made(path, asked.documents)
        print(f"{asked.documents:,} documents, {tokens:,} tokens")
        ask(path, tokens, PlanSpec(seq_len=asked.seq_len, global_batch_size=512))
        assumed = timed(_assumed)
        print(f"plan --assume 15T tokens, 12B documents: {assumed / 1000:.1f} s")
        beside(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _assumed() -> None:
    stores = parse_assumed_stores("web=10T tokens/8B documents, code=5T tokens/4B documents")
    mixture = Mixture({"web": 0.6, "code": 0.4}, stores=stores, exhausted="stop")
    forecast_plan(Plan(mixture, PlanSpec(seq_len=2048, global_batch_size=512)))


if __name__ == "__main__":
    main()
