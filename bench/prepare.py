"""`prepare` of JSONL text with the GPT-2 BPE, against fastokens alone.

    python bench/prepare.py [--mb 150] [--peers]

The text is the Python sources of this machine (standard library and site-packages) in documents of
about 2 kB. Both run alternately in separate processes; the ratio is of medians.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ALONE = """
import json, sys, time
import os
os.environ["FASTOKENS_BPE_THREADS"] = "1"  # one core, as prepare encodes
import fastokens
from batchloom.tokens import resolve_tokenizer
tokenizer = fastokens.Tokenizer.from_json_str(json.dumps(resolve_tokenizer("gpt2").state()["tokenizer"]))
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
size = sum(len(text.encode()) for text in texts)
batches = [texts[i : i + 1000] for i in range(0, len(texts), 1000)]
begin = time.perf_counter()
for batch in batches:
    tokenizer.encode_batch_flat(batch, add_special_tokens=False, split_special_tokens=True)
print(size / 1e6 / (time.perf_counter() - begin))
"""
OURS = """
import json, sys, time
import batchloom
begin = time.perf_counter()
batchloom.prepare(sys.argv[1], out=sys.argv[2], tokenizer="gpt2")
seconds = time.perf_counter() - begin
phases = json.load(open(sys.argv[2] + "/report.json"))["seconds_by_phase"]
work = phases["tokenize"] + phases["write"]
peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
size = float(sys.argv[3]) / 1e6
print(size / work, size / seconds, int(peak) // 1024)
"""


def write_corpus(path: Path, megabytes: int) -> int:
    """Write JSONL documents of about 2 kB; return bytes of text."""
    places = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    files = sorted({p for place in places for p in Path(place).rglob("*.py")})
    size = 0
    with path.open("w", encoding="utf-8") as out:
        for file in files:
            text = file.read_text("utf-8", errors="ignore")
            for start in range(0, len(text), 2000):
                piece = text[start : start + 2000]
                out.write(json.dumps({"text": piece, "path": file.name}) + "\n")
                size += len(piece.encode())
            if size > megabytes * 1e6:
                break
    return size


def run(code: str, *arguments: str) -> list[float]:
    """Return the numbers a process printed."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=150)
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; fastokens is always there")
    options = parser.parse_args()
    # Use a RAM disk if it has room, so that the disk of this machine does not affect the comparison.
    memory_disk = Path("/dev/shm")
    place = memory_disk if memory_disk.is_dir() and shutil.disk_usage(memory_disk).free > 8e9 else None
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-", dir=place))
    try:
        corpus = work / "corpus.jsonl"
        size = write_corpus(corpus, options.mb)
        alone, ours, whole, memory = [], [], [], []
        for _ in range(3):
            alone.append(run(ALONE, str(corpus))[0])
            speed, call, peak = run(OURS, str(corpus), str(work / "store"), str(size))
            ours.append(speed)
            whole.append(call)
            memory.append(peak)
            shutil.rmtree(work / "store")
        base, mine = statistics.median(alone), statistics.median(ours)
        print(f"{size / 1e6:.0f} MB of text in {corpus.stat().st_size / 1e6:.0f} MB of JSONL")
        print(f"fastokens alone    {base:7.1f} MB/s")
        print(f"batchloom prepare  {mine:7.1f} MB/s = {mine / base:.0%} of it, from the first record on")
        print(
            f"  the whole call   {statistics.median(whole):7.1f} MB/s, with about a second to load and "
            f"compare the tokenizer; peak {max(memory):.0f} MiB"
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
