"""Growth of time and memory with the number of files, documents, shards and sources.

    python bench/growth.py [--only files|prefix|shards|sources] [--files 1000000] [--documents 1000000000]

Prints for each process the processor seconds of each phase and the memory after it. Anonymous memory is the process's
own. Private memory includes the pages of mapped files that no other process maps; for the job over many files it is
the largest resident size so far. The large stores are hard links to the files of one shard. A million files, or the
lengths of 10^9 documents, take 4 GB in the folder for temporary files.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from batchloom.store import MANIFEST_NAME, encode_manifest, read_manifest, write_file
from batchloom.store.format import TOKENIZER_NAME, encode_index, format_shard_name, seal_manifest
from batchloom.store.write import LengthsWriter
from corpus import lengths, make_store

SHARDS, SOURCES = 10_000, 1_000

# Prints the phases as JSON: name, processor seconds, anonymous and private MiB.
MEASURE = """
import json, sys, time
marks = []
def mark(name):
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    mib = {name: int(value.split()[0]) // 1024 for name, value in fields.items()}
    marks.append((name, time.process_time(), mib["Anonymous"], mib["Private_Clean"] + mib["Private_Dirty"]))
"""
FILES = """
import batchloom.preparation
from batchloom.preparation.prepare_run import PrepareRun
from batchloom.preparation import input_jobs, request_run
from batchloom.preparation.phases.tokenize_phase import TokenizePhase
def peak(name):
    status = open("/proc/self/status").read()
    marks.append((name, time.process_time(), *[int(status.split(key)[1].split()[0]) // 1024 for key in ("RssAnon:", "VmHWM:")]))
def follow(target, name, label):
    function = getattr(target, name)
    def wrapped(*arguments, **options):
        result = function(*arguments, **options)
        peak(label)
        return result
    setattr(target, name, wrapped)
follow(request_run, "list_inputs", "list")
follow(input_jobs, "_find_unfit", "detect schemas")
follow(PrepareRun, "__init__", "cut units")
follow(PrepareRun, "_begin_or_resume", "write job.json")
follow(TokenizePhase, "run", "tokenize")
peak("import")
try:
    batchloom.preparation.prepare(sys.argv[1], out=sys.argv[2], tokenizer="bytes", val_fraction=0, workers=1, progress=lambda event: None)
    peak("rest of the job")
    assert batchloom.preparation.prepare(sys.argv[1], out=sys.argv[2], tokenizer="bytes", val_fraction=0, progress=lambda event: None).already_done
    peak("once more")
finally:
    print(json.dumps(marks))
"""
TRAIN = """
import batchloom
def open_data():
    stores = [batchloom.open_store(path) for path in sys.argv[2:]]
    mark("open")
    data = stores[0] if len(stores) == 1 else batchloom.Mixture({f"s{n:04}": 1.0 for n in range(len(stores))}, stores={f"s{n:04}": store for n, store in enumerate(stores)})
    loader = batchloom.Loader(data, seq_len=2048, global_batch_size=32, output="numpy", rank=0, world_size=1, steps=1_000_000)
    loader.plan.fingerprint
    mark("plan")
    return loader
mark("import")
"""
FIRST = """
loader = open_data()
batches = iter(loader)
assert next(batches)["input_ids"].shape == (32, 2048)
mark("first batch")
for _ in range(99): next(batches)
mark("99 more")
json.dump(loader.state_dict(), open(sys.argv[1], "w"))
mark("state")
print(json.dumps(marks))
"""
RESUME = """
loader = open_data()
loader.load_state_dict(json.load(open(sys.argv[1])))
mark("load state")
next(iter(loader))
mark("next batch")
print(json.dumps(marks))
"""
EXPLAIN = """
loader = open_data()
assert len(batchloom.explain(loader, 100)) == 32
mark("explain step 100")
print(json.dumps(marks))
"""


def measure(title: str, code: str, *arguments: str) -> None:
    """Run a measurement in a process of its own, and print its phases."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + code, *arguments], check=True, capture_output=True, text=True
    )
    marks = json.loads(done.stdout.splitlines()[-1])
    print(title)
    for (_, before, *_), (phase, after, anonymous, private) in itertools.pairwise([["", 0.0], *marks]):
        print(f"  {phase:<18} {after - before:8.3f} s {anonymous:8,} MiB anonymous {private:8,} MiB private")


def write_files(folder: Path, count: int) -> None:
    """Write files of one line, a thousand in each folder."""
    for number in range(count):
        parent = folder / f"{number // 1000:05d}"
        if number % 1000 == 0:
            parent.mkdir(parents=True)
        (parent / f"{number:08d}.jsonl").write_text(f'{{"text": "document number {number} of the crawl"}}\n')


def write_prefix(stem: Path, documents: int) -> None:
    """Write a Megatron prefix with a sparse ``.bin``."""
    all_lengths = lengths(documents)
    with stem.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * int(all_lengths.sum(dtype=np.int64)))
    stem.with_suffix(".idx").write_bytes(encode_index(all_lengths, np.dtype("<u2")))


def repeat_store(base: Path, folder: Path, count: int) -> None:
    """Make a store of links to the only shard of another, so many times."""
    manifest, train = read_manifest(base), folder / "train"
    train.mkdir(parents=True)
    entry, source = manifest.subsets["train"], manifest.sources[0]
    shard = entry.shards[0]
    names = [format_shard_name(number) for number in range(count)]
    for file in (base / "train").glob(f"{shard.name}.*"):
        for name in names:
            os.link(file, train / f"{name}{file.suffix}")
    shard_lengths, writer = np.fromfile(base / "train" / "lengths.u32", "<u4"), LengthsWriter(train)
    for _ in names:
        writer.append(shard_lengths)
    checksum, sums = writer.finish()
    documents, tokens = entry.documents * count, entry.tokens * count
    subset = msgspec.structs.replace(
        entry,
        documents=documents,
        tokens=tokens,
        shards=tuple(msgspec.structs.replace(shard, name=name) for name in names),
        lengths=checksum,
        sums=sums,
    )
    grown = msgspec.structs.replace(
        manifest,
        subsets={"train": subset},
        counts=msgspec.structs.replace(manifest.counts, records=documents, documents=documents, tokens=tokens),
        sources=(msgspec.structs.replace(source, documents=documents, tokens=tokens),),
    )
    shutil.copy(base / TOKENIZER_NAME, folder)
    write_file(folder / MANIFEST_NAME, encode_manifest(seal_manifest(grown)))


def link_store(store: Path, folder: Path) -> None:
    """Make another store of links to the files of one."""
    shutil.copytree(store, folder, copy_function=os.link)


def measure_training(title: str, work: Path, stores: list[Path]) -> None:
    """Measure the first batch, resuming and explaining."""
    arguments = [str(work / "state.json"), *map(str, stores)]
    for action, code in (("start", FIRST), ("resume", RESUME), ("explain", EXPLAIN)):
        measure(f"{title}: {action}", TRAIN + code, *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["files", "prefix", "shards", "sources"])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=1_000_000_000, help="of all shards together")
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; there is none here")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-growth-"))
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    try:
        if options.only in (None, "files"):
            write_files(work / "files", options.files)
            measure(f"{options.files:,} files", FILES, str(work / "files"), str(work / "out"))
            shutil.rmtree(work / "files")
            shutil.rmtree(work / "out")
        if options.only in (None, "prefix"):
            write_prefix(work / "prefix", 10_000_000)
            measure_training("a bare prefix of 10,000,000 documents", work, [work / "prefix"])
            (work / "prefix.idx").unlink()
        if options.only in (None, "shards", "sources"):
            make_store(work / "one", options.documents // SHARDS)
        if options.only in (None, "shards"):
            repeat_store(work / "one", work / "shards", SHARDS)
            measure_training(f"{SHARDS:,} shards, {options.documents:,} documents", work, [work / "shards"])
            shutil.rmtree(work / "shards")
        if options.only in (None, "sources"):
            repeat_store(work / "one", work / "s0000", SHARDS // SOURCES)
            stores = [work / f"s{number:04}" for number in range(SOURCES)]
            for store in stores[1:]:
                link_store(stores[0], store)
            title = f"{SOURCES:,} sources of {SHARDS // SOURCES} shards, {options.documents:,} documents"
            measure_training(title, work, stores)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
