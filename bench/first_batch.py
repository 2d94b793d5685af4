"""Time from process start to the first numpy batch, and the loader's own memory.

    python bench/first_batch.py [--peers]

Complete processes, timed from outside (interpreter and imports included), median of 5 after one
warm-up: 180M tokens in 200k documents, and 10M documents with about 9B tokens (sparse files).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from corpus import make_store

OURS = """
import batchloom, sys
store = batchloom.open_store(sys.argv[1])
loader = batchloom.Loader(store, seq_len=2048, global_batch_size=32, output="numpy", rank=0, world_size=1)
batch = next(iter(loader))
assert batch["input_ids"].shape == (32, 2048)
status = open("/proc/self/status").read()
print(int(status.split("RssAnon:")[1].split()[0]) // 1024)
"""
NUMPY = "import numpy; print(0)"


def run(code: str, *arguments: str) -> tuple[float, int]:
    """Return the seconds of a complete process, and its anonymous memory in MiB."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; there is none here")
    parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    try:
        floor = statistics.median(run(NUMPY)[0] for _ in range(5))
        print(f"{'python + numpy alone':28} {floor:6.3f} s")
        for name, documents, sparse in (
            ("180M tokens, 200k documents", 200_000, False),
            ("9B tokens, 10M documents", 10_000_000, True),
        ):
            store = make_store(work / "store", documents, sparse=sparse)
            run(OURS, str(store))
            shutil.rmtree(store / "plans", ignore_errors=True)
            figures = []
            for _ in range(5):
                figures.append(run(OURS, str(store)))
                shutil.rmtree(store / "plans", ignore_errors=True)
            seconds = statistics.median(s for s, _ in figures)
            print(
                f"{name:28} {seconds:6.3f} s ({seconds / floor:4.1f} x numpy alone), {max(m for _, m in figures)} MiB of its own"
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
