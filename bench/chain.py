"""Throughput from JSONL to a store with the GPT-2 BPE, against peers.

    python bench/chain.py [--mb 210] [--peer-mb 20] [--copies 16] [--no-peers] [--no-scaling]

One run on one input of real text and code (bench/real_corpus.py, documents of about 2 kB). Each
measurement is a separate process that may use one core:

- fastokens alone: all texts in memory, encoded in batches;
- batchloom: the complete ``batchloom prepare`` command; and the part that grows with the input: without the
  first ``START_MB`` and the time the same command takes for them alone. That time (imports, loading the
  tokenizer, comparing it on a sample, the report) is independent of larger sizes;
- datatrove: JsonlReader and DocumentTokenizer in a LocalPipelineExecutor of one task;
- Megatron: the steps of its ``tools/preprocess_data.py``, which is not in the wheel: json.loads, an HF
  tokenizer call per document, IndexedDatasetBuilder. Both without their imports, on the first ``--peer-mb``.

``BENCH_CLOCK=cpu`` counts processor time, for machines with other load. Without it, ``--copies`` of the
input with different first words follow, by one worker on one core and by two on two. The result includes the
start of the server that workers are forked from (besides the subtracted start) and their first words.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from real_corpus import cache_folder, write_corpus

ALONE = """
import os, time
clock = time.process_time if os.environ["BENCH_CLOCK"] == "cpu" else time.perf_counter
import json, sys, time
import fastokens
from batchloom.tokens import resolve_tokenizer
tokenizer = fastokens.Tokenizer.from_json_str(json.dumps(resolve_tokenizer("gpt2").state()["tokenizer"]))
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
batches = [texts[i : i + 1000] for i in range(0, len(texts), 1000)]
begin = clock()
for batch in batches:
    tokenizer.encode_batch_flat(batch, add_special_tokens=False, split_special_tokens=True)
print(clock() - begin)
"""
DATATROVE = """
import os, time
clock = time.process_time if os.environ["BENCH_CLOCK"] == "cpu" else time.perf_counter
import logging, sys, time
from loguru import logger
logger.remove()
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
folder, tokenizer, out = sys.argv[1:]
if __name__ == "__main__":
    executor = LocalPipelineExecutor(
        pipeline=[JsonlReader(folder), DocumentTokenizer(out + "/tokens", local_working_dir=out + "/work", tokenizer_name_or_path=tokenizer)],
        tasks=1, workers=1, logging_dir=out + "/logs", start_method="fork",
    )
    begin = clock()
    executor.run()
    print(clock() - begin)
"""
MEGATRON = """
import os, time
clock = time.process_time if os.environ["BENCH_CLOCK"] == "cpu" else time.perf_counter
import json, sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from transformers import PreTrainedTokenizerFast
path, tokenizer, out = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<|endoftext|>")
begin = clock()
builder = IndexedDatasetBuilder(out + ".bin", dtype=DType.optimal_dtype(len(tokenizer)))
for line in open(path, encoding="utf-8"):
    ids = tokenizer(json.loads(line)["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
    ids.append(tokenizer.eos_token_id)
    builder.add_document(torch.IntTensor(ids), [len(ids)])
builder.finalize(out + ".idx")
print(clock() - begin)
"""
CLOCK = os.environ.get("BENCH_CLOCK", "wall")
QUIET = {
    "FASTOKENS_BPE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def clock() -> float:
    """Return seconds of the clock, or processor time of all children.

    Other load on the machine hardly changes processor time.
    """
    if CLOCK == "wall":
        return time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pinned(cores: list[int], *words: str) -> tuple[str, float]:
    """Run a command on some cores; return its output and its seconds."""
    begin = clock()
    done = subprocess.run(
        words,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | QUIET | {"BENCH_CLOCK": CLOCK},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise SystemExit(f"{words[:4]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, clock() - begin


def seconds(cores: list[int], code: str, *arguments: str) -> float:
    """Return the last number a script printed."""
    return float(pinned(cores, sys.executable, "-c", code, *arguments)[0].split()[-1])


# Large enough for the sample on which the tokenizer is compared.
START_MB = 4


class Prepare:
    """``batchloom prepare`` with the options this version has."""

    def __init__(self, work: Path, corpus: Path) -> None:
        self._work, self._few = work, work / "few.jsonl"
        self.few_mb = head(corpus, START_MB, self._few) / 1e6
        self.options: list[str] = []
        for option in (["--dedup", "exact"], ["--workers", "1"]):
            words = self._words([str(self._few)], option)
            done = subprocess.run(words, check=False, capture_output=True, text=True)
            if done.returncode == 0:
                self.options += option
            else:
                print(f"this version takes no {' '.join(option)}: measured without")

    def _words(self, inputs: list[str], options: list[str]) -> list[str]:
        out = self._work / "store"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "batchloom", "prepare", *inputs, "--out", str(out)]
        return [*command, "--tokenizer", "gpt2", *options]

    def seconds(self, cores: list[int], inputs: list[str], workers: int = 1) -> float:
        """Return the time of the complete command."""
        options = list(self.options)
        if "--workers" in options:
            options[options.index("--workers") + 1] = str(workers)
        return pinned(cores, *self._words(inputs, options))[1]

    def start(self, cores: list[int], workers: int = 1) -> float:
        """Return the time for the first documents alone."""
        return self.seconds(cores, [str(self._few)], workers)


def head(path: Path, megabytes: float, out: Path) -> int:
    """Write the first documents of a corpus; return bytes of text."""
    size = 0
    with path.open(encoding="utf-8") as lines, out.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            size += len(json.loads(line)["text"].encode())
            if size >= megabytes * 1e6:
                break
    return size


def copies(path: Path, count: int, folder: Path) -> list[str]:
    """Write copies of the corpus in which all documents differ."""
    folder.mkdir()
    found = []
    for number in range(count):
        out = folder / f"{number}.jsonl"
        with path.open("rb") as lines, out.open("wb") as file:
            for line in lines:
                file.write(line.replace(b'{"text": "', b'{"text": "copy %d ' % number, 1))
        found.append(str(out))
    return found


def peers(path: Path, work: Path, megabytes: float, cores: list[int]) -> dict[str, float]:
    """Measure MB/s of the peers' tokenizing steps."""
    from batchloom.tokens import resolve_tokenizer

    folder = work / "peers"
    folder.mkdir()
    tokenizer = work / "tokenizer.json"
    tokenizer.write_text(json.dumps(resolve_tokenizer("gpt2").state()["tokenizer"]))
    size = head(path, megabytes, folder / "part.jsonl") / 1e6
    trove = seconds(cores, DATATROVE, str(folder), str(tokenizer), str(work / "datatrove"))
    theirs = seconds(cores, MEGATRON, str(folder / "part.jsonl"), str(tokenizer), str(work / "megatron"))
    return {
        "datatrove DocumentTokenizer": size / trove,
        "Megatron preprocess_data steps": size / theirs,
    }


def scaling(ours: Prepare, path: Path, size: float, count: int, work: Path) -> None:
    """Compare one worker on one core with two on two."""
    if "--workers" not in ours.options:
        print("two workers: this version has no --workers")
        return
    if CLOCK == "cpu":
        print("two workers: measured by the clock alone (without BENCH_CLOCK=cpu)")
        return
    if len(os.sched_getaffinity(0)) < 2:
        print("two workers: this machine has one core")
        return
    cores = sorted(os.sched_getaffinity(0))[:2]
    files = copies(path, count, work / "copies")
    total = count * size - ours.few_mb
    one = ours.seconds(cores[:1], files) - ours.start(cores[:1])
    two = ours.seconds(cores, files, workers=2) - ours.start(cores, workers=2)
    print(
        f"{count} files of {size:.0f} MB: one worker {total / one:.1f} MB/s, two on two cores "
        f"{total / two:.1f} MB/s = {one / two:.2f} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=210)
    parser.add_argument("--peer-mb", type=float, default=20)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--peers", action="store_true", help="as for `make bench`; the default")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and shutil.disk_usage(memory).free > 8e9 else None
    work = Path(tempfile.mkdtemp(prefix="batchloom-chain-", dir=place))
    core = sorted(os.sched_getaffinity(0))[:1]
    try:
        path = work / "corpus.jsonl"
        documents, total = write_corpus(path, options.mb, 2000, cache_folder())
        size = total / 1e6
        print(f"{documents:,} documents, {size:.0f} MB of real text and code, one core, {CLOCK} time")
        ours = Prepare(work, path)
        alone, whole, start = [], [], []
        for _ in range(options.rounds):
            alone.append(size / seconds(core, ALONE, str(path)))
            whole.append(ours.seconds(core, [str(path)]))
            start.append(ours.start(core))
        base, took = statistics.median(alone), statistics.median(whole)
        mine = (size - ours.few_mb) / (took - statistics.median(start))
        print(f"fastokens alone                 {base:7.1f} MB/s")
        print(
            f"batchloom prepare               {mine:7.1f} MB/s = {mine / base:.0%} of it "
            f"({' '.join(ours.options) or 'no further options'})"
        )
        print(
            f"  the whole command             {size / took:7.1f} MB/s, of its {took:.1f} s {statistics.median(start):.1f} "
            f"for the first {START_MB} MB"
        )
        if not options.no_peers:
            for name, speed in peers(path, work, options.peer_mb, core).items():
                print(f"{name:<31} {speed:7.2f} MB/s: batchloom {mine / speed:.1f} x")
        if not options.no_scaling:
            scaling(ours, path, size, options.copies, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
