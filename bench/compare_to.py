"""Key speeds of this tree against an older commit, in turn, in one run.

    python bench/compare_to.py REV [--rounds 5] [--limit 1.10] [--only load,help]

Each measurement is a complete process of each tree, old and new alternately, after one of each that does not count.
Prints the median ratio (new/old) of processor time and of the clock, and ends with 1 if the processor time of any
line grew by more than ``--limit``.
"""

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from prepare import write_corpus

TREE = Path(__file__).resolve().parent.parent
LOAD = """
import itertools, sys
import batchloom
store = batchloom.open_store(sys.argv[1])
loader = batchloom.Loader(
    store, seq_len=1024, global_batch_size=32, epochs=1000, rank=0, world_size=1, output="numpy", prefetch=0
)
for batch in itertools.islice(loader, int(sys.argv[2])):
    assert batch["input_ids"].shape == (32, 1024)
"""
MODULE = ("-m", "batchloom")


@dataclass(frozen=True)
class Bench:
    """Arguments of one process; ``{out}`` is an empty path."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Spent:
    """Seconds of one process."""

    processor: float
    clock: float


def write_chat(path: Path, count: int, documents: Path) -> None:
    """Write conversations of two turns from the texts of a JSONL file."""
    with documents.open(encoding="utf-8") as lines, path.open("w", encoding="utf-8") as out:
        for line, _ in zip(lines, range(count), strict=False):
            text = json.loads(line)["text"]
            turns = [{"role": "user", "content": text[:300]}, {"role": "assistant", "content": text[300:1200] or "-"}]
            out.write(json.dumps({"messages": turns}) + "\n")


def make_benches(work: Path) -> list[Bench]:
    """Write the inputs, and return what is run over them."""
    text, small, chat, store = work / "text.jsonl", work / "small.jsonl", work / "chat.jsonl", work / "store"
    write_corpus(text, 40)
    with text.open("rb") as lines:
        small.write_bytes(next(lines))
    write_chat(chat, 8_000, text)
    run(TREE, (*MODULE, "prepare", str(text), "--out", str(store), "--tokenizer", "gpt2", "--workers", "1"))
    prepare = (*MODULE, "prepare", "--out", "{out}", "--tokenizer", "gpt2", "--workers", "1")
    return [
        Bench("help", (*MODULE, "--help")),
        Bench("check of a store", (*MODULE, "check", str(store))),
        Bench("prepare, one document", (*prepare, str(small))),
        Bench("prepare, 40 MB of text", (*prepare, str(text))),
        Bench("prepare, 8,000 conversations", (*prepare, str(chat))),
        Bench("first batch", ("-c", LOAD, str(store), "1")),
        Bench("2,000 batches", ("-c", LOAD, str(store), "2000")),
    ]


def run(tree: Path, arguments: tuple[str, ...]) -> Spent:
    """Run one process of a tree; its output is shown only if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "RAYON_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="batchloom-bench-") as folder:
        command = [sys.executable, *(argument.replace("{out}", f"{folder}/store") for argument in arguments)]
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
        clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(arguments[:3])} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, clock)


def extract_tree(revision: str, folder: Path) -> Path:
    """Extract a commit into a folder."""
    archive = subprocess.run(["git", "archive", revision], cwd=TREE, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("revision", metavar="REV")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.10, help="largest allowed ratio of processor time")
    parser.add_argument("--only", default="", help="words of the names of benches to run, separated by commas")
    options = parser.parse_args()
    slower = []
    with tempfile.TemporaryDirectory(prefix="batchloom-bench-") as folder:
        old_tree = extract_tree(options.revision, Path(folder, "old"))
        words = options.only.split(",")
        print(f"{'new / old (medians of pairs)':30} {'processor':>9}  {'clock':>6}   old, new processor seconds")
        for bench in make_benches(Path(folder)):
            if not any(word in bench.name for word in words):
                continue
            pairs = [(run(old_tree, bench.arguments), run(TREE, bench.arguments)) for _ in range(options.rounds + 1)][
                1:
            ]
            ratio = statistics.median(new.processor / old.processor for old, new in pairs)
            clock = statistics.median(new.clock / old.clock for old, new in pairs)
            old_seconds, new_seconds = (statistics.median(pair[side].processor for pair in pairs) for side in (0, 1))
            print(f"{bench.name:30} {ratio:9.3f}  {clock:6.3f}   {old_seconds:.2f}, {new_seconds:.2f}", flush=True)
            if ratio > options.limit:
                slower.append(bench.name)
    if slower:
        print(f"slower than {options.revision} by more than {options.limit - 1:.0%}: {', '.join(slower)}")
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
