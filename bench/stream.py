"""Throughput of streaming against preparing, and the first batch over a terabyte.

    python bench/stream.py [--megabytes 200] [--lanes 8] [--workers 2] [--terabyte-files 4000]

The input of the first part is made of this Python's own code. Both parts are one run, so that other load
affects the ratio less. The terabyte is files of 256 MiB with a real beginning
and a hole after it: they take as much disk as their beginnings.
Aims: at least 0.8 of prepare's tokens a second; the first batch over a terabyte under 10 s.
"""

import argparse
import json
import random
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

import batchloom

ORDER = {"seq_len": 2048, "global_batch_size": 64}
BEGINNING, WHOLE = 1 << 20, 256 << 20


def write_code(path: Path, size: int) -> None:
    """Write documents of a few kilobytes, cut from the installed packages."""
    rng, written = random.Random(0), 0
    with path.open("w") as file:
        for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            text, at = source.read_text(errors="replace"), 0
            while at < len(text) and written < size:
                length = min(60_000, int(rng.lognormvariate(7.6, 1))) + 100
                written += file.write(json.dumps({"text": text[at : at + length]}) + "\n")
                at += length


def write_terabyte(folder: Path, files: int, lines: bytes) -> None:
    """Write sparse files with a listed size of 256 MiB each."""
    for number in range(files):
        with (folder / f"{number:05d}.jsonl").open("wb") as file:
            file.write(lines)
            file.truncate(WHOLE)


def held() -> int:
    """Return the unshared resident bytes of this process and its workers."""
    own = psutil.Process()
    infos = [one.memory_info() for one in (own, *own.children(recursive=True))]
    return sum(info.rss - info.shared for info in infos)


def main() -> None:
    """Print both results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--terabyte-files", type=int, default=4000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_code(folder / "code.jsonl", asked.megabytes << 20)
        began = time.perf_counter()
        done = batchloom.prepare(
            folder / "code.jsonl",
            out=folder / "s",
            dedup="none",
            val_fraction=0,
            workers=asked.workers,
        )
        prepared = batchloom.open_store(done.path).tokens / (time.perf_counter() - began)
        stream = batchloom.stream(
            folder / "code.jsonl",
            **ORDER,
            steps=1 << 20,
            lanes=asked.lanes,
            workers=asked.workers,
            val_fraction=0,
        )
        loader = batchloom.Loader(stream, output="numpy")
        total = batchloom.open_store(done.path).tokens
        began, tokens, most = time.perf_counter(), 0, 0
        for batch in loader:
            tokens += loader.tokens(batch.step)
            most = max(most, held() if batch.step % 20 == 0 else 0)
            if tokens > total:
                break
        streamed = tokens / (time.perf_counter() - began)
        print(f"prepare {prepared / 1e6:.1f} Mtok/s, stream {streamed / 1e6:.1f} Mtok/s, first batch included")
        print(f"ratio {streamed / prepared:.2f}, memory at most {most >> 20} MiB with {asked.lanes} lanes")
        lines = (folder / "code.jsonl").read_bytes()[:BEGINNING].rpartition(b"\n")[0] + b"\n"
        (folder / "terabyte").mkdir()
        write_terabyte(folder / "terabyte", asked.terabyte_files, lines)
        began = time.perf_counter()
        stream = batchloom.stream(folder / "terabyte", **ORDER, steps=1, workers=asked.workers)
        listed = time.perf_counter() - began
        next(iter(batchloom.Loader(stream, output="numpy")))
        took = time.perf_counter() - began
        print(f"{stream!r}: listed after {listed:.1f} s, first batch after {took:.1f} s")


if __name__ == "__main__":
    main()
