"""Deduplication on one core: exact keys (with peak memory), near documents, lines.

    python bench/dedup.py [--keys 100000000] [--mb 40] [--folder DIR] [--peers]

Keys are random with a tenth repeated from the unit before, and take 24 bytes each in DIR (the
temporary folder). The text is that of bench/prepare.py, in documents of about 2 kB. Each part is
a separate process; speeds are by its processor time. --peers adds rensa on precomputed shingles.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from prepare import write_corpus

EXACT = """
import sys, time
import numpy as np
from pathlib import Path
from batchloom.preparation.dedup.duplicate_search import search_duplicates, read_unit_duplicates
from batchloom.preparation.dedup.sorted_keys import count_partitions, write_keys
folder, total, unit = Path(sys.argv[1]), int(sys.argv[2]), 1_000_000
draw, files, last, spent = np.random.default_rng(0), [], None, 0.0
for number in range(-(-total // unit)):
    hashes = draw.integers(0, 2**64, (min(unit, total - number * unit), 2), dtype=np.uint64)
    if last is not None:
        hashes[::10] = last[: len(hashes) : 10]
    last = hashes
    numbers = np.arange(len(hashes), dtype=np.uint32)
    files.append(folder / f"{number}.keys")
    begin = time.process_time()
    write_keys(files[-1], hashes, numbers, numbers)
    spent += time.process_time() - begin
partitions, drops, found = count_partitions(total), [], 0
begin = time.process_time()
for partition in range(partitions):
    drops.append(folder / f"{partition}.drops")
    found += search_duplicates(files, (partition, partitions), 0, drops[-1])
finding = time.process_time() - begin
begin = time.process_time()
assert found == sum(len(read_unit_duplicates(drops, number)) for number in range(len(files)))
gathering = time.process_time() - begin
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024
print(f"exact: {total / 1e6:,.0f} M keys, {found:,} repeated, peak {peak} MiB; M keys/s: written "
      f"{total / spent / 1e6:.1f}, searched {total / finding / 1e6:.1f}, gathered {total / gathering / 1e6:.1f}, "
      f"all {total / (spent + finding + gathering) / 1e6:.1f}")
"""

TEXTS = """
import json, os, sys, time
os.environ["FASTOKENS_BPE_THREADS"] = "1"
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
size = sum(len(text.encode()) for text in texts)
folder = sys.argv[2]
"""

NEAR = (
    TEXTS
    + """
import numpy as np
from pathlib import Path
import fastokens
from batchloom.preparation.dedup.near_duplicates import find_components
from batchloom.preparation.dedup.duplicate_search import search_duplicates, read_unit_duplicates
from batchloom.preparation.dedup.sorted_keys import SIGNATURE_KEY, count_keys, count_partitions
from batchloom.preparation.dedup.near_duplicates import compute_signatures
from batchloom.preparation.dedup.near_duplicates import map_signatures, write_signature_keys
from batchloom.tokens import resolve_tokenizer
tokenizer = fastokens.Tokenizer.from_json_str(json.dumps(resolve_tokenizer("gpt2").state()["tokenizer"]))
tokenizer.encode_batch_flat(texts[:100], add_special_tokens=False, split_special_tokens=True)
folder, spent, pieces, tokens = Path(folder), {}, [], 0
last = time.process_time()
def lap(name):
    global last
    now = time.process_time()
    spent[name], last = spent.get(name, 0) + now - last, now
for start in range(0, len(texts), 1000):
    ids, bounds = tokenizer.encode_batch_flat(texts[start : start + 1000], add_special_tokens=False, split_special_tokens=True)
    ids, lengths = np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(bounds, "<i8")).astype(np.uint32)
    tokens += len(ids)
    lap("tokenize")
    pieces.append(compute_signatures(ids, lengths, bands=14, rows=8, shingle=5))
    lap("minhash")
np.concatenate(pieces).tofile(folder / "0.bands")
write_signature_keys(folder / "0.keys", map_signatures(folder / "0.bands", 14), np.zeros(len(texts), np.uint32))
lap("keys")
partitions, links = count_partitions(count_keys([folder / "0.keys"], SIGNATURE_KEY)), []
for partition in range(partitions):
    links.append(folder / f"{partition}.links")
    search_duplicates([folder / "0.keys"], (partition, partitions), 0, links[-1], SIGNATURE_KEY)
lap("search")
gone = len(read_unit_duplicates(find_components(links, folder / "scratch", folder), 0))
lap("group")
whole = sum(spent.values())
print(f"near: {len(texts):,} documents of {size / len(texts):,.0f} bytes and {tokens / len(texts):.0f} tokens, {gone:,} go; "
      f"{len(texts) / whole:,.0f} documents/s with tokenizing, {len(texts) / (whole - spent['tokenize']):,.0f} without; "
      + ", ".join(f"{name} {len(texts) / seconds:,.0f}" for name, seconds in spent.items()))
"""
)

LINES = (
    TEXTS
    + """
from pathlib import Path
from batchloom.preparation.dedup.duplicate_search import search_duplicates
from batchloom.preparation.dedup.sorted_keys import open_key_writer
from batchloom.preparation.dedup.line_dedup import LineDeduplicator, hash_segments
folder = Path(folder)
batches = [texts[start : start + 1000] for start in range(0, len(texts), 1000)]
for pieces in ("lines", "paragraphs"):
    number, times = 0, [time.process_time()]
    with open_key_writer(folder / "keys") as add:
        for batch in batches:
            records, number = hash_segments(batch, [0] * len(batch), number, pieces)
            add(records)
    times.append(time.process_time())
    found = search_duplicates([folder / "keys"], (0, 1), 0, folder / "drops")
    times.append(time.process_time())
    removal = LineDeduplicator([folder / "drops"], 0, pieces)
    gone = sum(text is None for batch in batches for text in removal(batch))
    times.append(time.process_time())
    speeds = [size / 1e6 / (stop - start) for start, stop in [*zip(times, times[1:]), (times[0], times[-1])]]
    print(f"{pieces}: {number:,}, {found:,} go, and {gone:,} documents; MB/s: keys {speeds[0]:.0f}, "
          f"searched {speeds[1]:.0f}, removed {speeds[2]:.0f}, all {speeds[3]:.0f}")
"""
)

PEERS = """
import time
import numpy as np
from batchloom.preparation.dedup.near_duplicates import compute_signatures
count, size = 4000, 500
ids = np.random.default_rng(0).integers(0, 50_000, count * size).astype(np.uint16)
lengths = np.full(count, size, np.uint32)
shingles = np.random.default_rng(1).integers(0, 2**63, count * size, dtype=np.uint64)
def speed(action):
    action()
    begin = time.process_time()
    action()
    return count / (time.process_time() - begin)
print(f"minhash of {size} tokens, 112 hashes, documents/s: ours from ids "
      f"{speed(lambda: compute_signatures(ids, lengths, bands=14, rows=8, shingle=5)):,.0f}")
import rensa
starts = np.arange(count + 1, dtype=np.uint64) * np.uint64(size)
call = rensa.RMinHash.digest_matrix_from_flat_token_hashes
print(f"  rensa from ready shingles {speed(lambda: call(shingles, starts, 112, 42)):,.0f}")
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        text=True,
        capture_output=True,
        cwd=Path(__file__).parent,
    )
    print(done.stdout + (done.stderr if done.returncode else ""), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=100_000_000)
    parser.add_argument("--mb", type=int, default=40)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run(EXACT, folder, str(args.keys))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, args.mb)
        for code in (NEAR, LINES):
            run(code, str(corpus), folder)
    if args.peers:
        run(PEERS)


if __name__ == "__main__":
    main()
