"""Start time of a job over very many or very large files, and of a finished job.

    python bench/many_files.py [--files 100000] [--big-gb 3]

Each measurement is a separate process from its start to the first record of the first unit (the first
progress event with ``documents``, or the end of the job), imports included.
Aims: 10 s for 100,000 files, 2 s for large ones, 2 s for a finished job.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START = """
import os, sys, time
def now():
    # From the start of the process: imports count.
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    return float(open("/proc/uptime").read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
import batchloom
from batchloom.preparation.report.progress import Progress
class First(BaseException): pass
def listen(event):
    if isinstance(event, Progress) and event.documents and event.phase == "tokenize":
        raise First
try:
    done = batchloom.prepare(sys.argv[1], out=sys.argv[2], tokenizer="gpt2", val_fraction=0, progress=listen).already_done
except First:
    done = False
used = time.process_time()
print(now(), used, done)
"""
WHOLE = """
import sys, batchloom
batchloom.prepare(sys.argv[1], out=sys.argv[2], tokenizer="gpt2", val_fraction=0, progress=lambda event: None)
"""


def write_files(folder: Path, count: int, kind: str) -> None:
    """Write small files in folders of a thousand, as a crawl leaves them."""
    rng = random.Random(kind)
    words = [f"word{rng.randrange(5000)}" for _ in range(5000)]
    for number in range(count):
        inside = folder / f"{number // 1000:04d}"
        if number % 1000 == 0:
            inside.mkdir(parents=True)
        texts = [" ".join(rng.choices(words, k=50)) for _ in range(2)]
        lines = [json.dumps({"text": text}) for text in texts] if kind == "jsonl" else texts
        (inside / f"{number:07d}.{kind}").write_text("\n".join(lines) + "\n")


def write_large(path: Path, size: int) -> None:
    """Write a JSONL file of ``size`` bytes that repeats one block."""
    rng = random.Random(1)
    lines = "".join(
        json.dumps({"text": " ".join(f"w{rng.randrange(9999)}" for _ in range(300))}) + "\n" for _ in range(4000)
    ).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(lines)


def timed(name: str, given: Path, out: Path) -> None:
    """Print wall and processor seconds of a start."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(given), str(out)],
        check=True,
        capture_output=True,
        text=True,
    )
    wall, used, finished = done.stdout.split()
    what = "found finished" if finished == "True" else "first documents"
    print(f"{name:<34} {what} after {float(wall):6.2f} s (processor {float(used):6.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--big-gb", type=float, default=3.0)
    options = parser.parse_args()
    memory = Path("/dev/shm")
    room = options.big_gb * 1e9 * 2.2 + options.files * 20_000
    place = memory if memory.is_dir() and shutil.disk_usage(memory).free > room else None
    work = Path(tempfile.mkdtemp(prefix="batchloom-many-", dir=place))
    try:
        for kind in ("jsonl", "txt"):
            folder = work / kind
            write_files(folder, options.files, kind)
            timed(f"{options.files:,} files {kind}", folder, work / "out")
            shutil.rmtree(work / "out", ignore_errors=True)
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", WHOLE, str(folder), str(work / "out")], check=True)
            print(f"{'':<34} whole job {time.perf_counter() - began:.1f} s")
            timed(f"{options.files:,} files {kind}, again", folder, work / "out")
            shutil.rmtree(folder)
            shutil.rmtree(work / "out")
        size = int(options.big_gb * 1e9)
        write_large(work / "big.jsonl", size)
        timed(f"1 file of {options.big_gb:g} GB", work / "big.jsonl", work / "out")
        shutil.rmtree(work / "out", ignore_errors=True)
        (work / "ten").mkdir()
        for number in range(10):
            write_large(work / "ten" / f"{number}.jsonl", size // 10)
        timed(f"10 files of {options.big_gb / 10:g} GB", work / "ten", work / "out")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
