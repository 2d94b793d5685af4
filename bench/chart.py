"""Speed chart of batchloom and its peers, from one run.

    python bench/chart.py [--out docs/images/speed.svg] [--seconds 3] [--mb 60] [--rounds 3]

Three measurements on this machine, each with one process of one thread of work, peers alternating with batchloom:

- ready batches of 32 x 2,048 tokens (bench/load.py), page cache warm;
- JSONL text to a token store with the GPT-2 BPE (bench/chain.py), without the start of each program;
- conversations to ids and loss masks (bench/chat.py), processor time.

Prints the numbers, and draws them with the versions and the machine.
"""

import argparse
import functools
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import numpy as np

import chain
import chat
import load
from corpus import make_store
from real_corpus import cache_folder, write_corpus

T = TypeVar("T")
Results = dict[str, float]
LOADERS = ("batchloom", "nanoGPT-style sampler", "litdata", "HF datasets", "Megatron GPTDataset", "Mosaic streaming")
PEERS = ("torch", "megatron-core", "litdata", "mosaicml-streaming", "datasets", "datatrove", "trl")


@functools.cache
def define_torchvision_operators() -> object:
    """Define two operators that torchvision, which a peer installs, expects of torch and the CPU build lacks.

    They exist as long as the result, which the cache holds.
    """
    import torch

    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators


def mosaic(rows: np.ndarray, folder: Path) -> Iterator[int]:
    """Yield token counts of Mosaic's StreamingDataset over fixed rows."""
    import torch

    define_torchvision_operators()
    from streaming import MDSWriter, StreamingDataset

    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{load.SEQ_LEN + 1}"}) as writer:
            for row in rows:
                writer.write({"tokens": row})
    while True:
        dataset = StreamingDataset(local=str(folder), batch_size=load.BATCH, shuffle=True)
        for batch in torch.utils.data.DataLoader(dataset, batch_size=load.BATCH, collate_fn=list):
            tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in batch]).astype(np.int64))
            yield tokens[:, :-1].contiguous().numel() + 0 * tokens[:, 1:].contiguous().numel()


def hf_datasets(rows: np.ndarray, folder: Path) -> Iterator[int]:
    """Yield token counts of a saved Hugging Face dataset of packed rows, shuffled."""
    import torch
    from datasets import Dataset, load_from_disk

    if not folder.exists():
        Dataset.from_dict({"input_ids": list(rows.astype(np.int32))}).save_to_disk(str(folder))
    dataset = load_from_disk(str(folder)).with_format("torch")
    while True:
        for batch in torch.utils.data.DataLoader(dataset, batch_size=load.BATCH, shuffle=True, drop_last=True):
            ids = batch["input_ids"]
            yield ids[:, :-1].contiguous().numel() + 0 * ids[:, 1:].contiguous().numel()


def open_source(name: str, work: Path) -> Iterator[int]:
    """Return the batches of a loader, as token counts."""
    store = work / "store"
    if name == "batchloom":
        return load.ours(store, "torch")
    if name == "nanoGPT-style sampler":
        return load.nanogpt(store)
    if name == "litdata":
        return load.litdata(store, work)
    if name == "Megatron GPTDataset":
        return load.megatron(store, work / "cache")
    data = np.fromfile(min((store / "train").glob("*.bin")), np.uint16)
    rows = data[: len(data) // (load.SEQ_LEN + 1) * (load.SEQ_LEN + 1)].reshape(-1, load.SEQ_LEN + 1)[:20_000]
    return mosaic(rows, work / "mds") if name == "Mosaic streaming" else hf_datasets(rows, work / "hf")


def measure_source(name: str, work: Path, seconds: float) -> float:
    """Measure millions of tokens a second of one loader."""
    return load.measure(open_source(name, work), seconds) / 1e6


def run_alone(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a process of its own, without the threads that other libraries leave behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def measure_loading(work: Path, seconds: float, rounds: int) -> Results:
    """Return millions of tokens a second of ready batches."""
    make_store(work / "store", 200_000)
    speeds: dict[str, list[float]] = {name: [] for name in LOADERS}
    for _ in range(rounds):
        for name in LOADERS:
            speeds[name].append(run_alone(measure_source, name, work, seconds))
    return {name: statistics.median(values) for name, values in speeds.items()}


def measure_preparation(work: Path, megabytes: float, rounds: int) -> Results:
    """Return MB a second from JSONL to a store, without start-up."""
    corpus, core = work / "corpus.jsonl", sorted(os.sched_getaffinity(0))[:1]
    _, size = write_corpus(corpus, megabytes, 2000, cache_folder())
    ours = chain.Prepare(work, corpus)
    times = [ours.seconds(core, [str(corpus)]) - ours.start(core) for _ in range(rounds)]
    results = {"batchloom": (size / 1e6 - ours.few_mb) / statistics.median(times)}
    return results | chain.peers(corpus, work, min(20, megabytes), core)


def measure_chat(work: Path, count: int) -> Results:
    """Return conversations a second, to ids and masks."""
    define_torchvision_operators()
    with (work / "corpus.jsonl").open(encoding="utf-8") as lines:
        rows = chat.make_rows(lines, count)
    folder = chat.gpt2_folder(work / "gpt2")
    return {
        "batchloom": chat.batchloom_speed(folder, rows),
        "TRL SFTTrainer": chat.trl_speed(folder, rows, work / "trl"),
    }


def draw(panels: list[tuple[str, str, Results]], caption: str, out: Path) -> None:
    """Draw one row of bars per panel."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    # Fixed ids make the file the same for the same numbers.
    mpl.rcParams |= {"svg.hashsalt": "batchloom", "svg.fonttype": "none", "font.size": 9}
    heights = [len(results) + 1 for _, _, results in panels]
    figure, axes = plt.subplots(len(panels), 1, figsize=(7.2, 0.32 * sum(heights) + 0.9), height_ratios=heights)
    for axis, (title, unit, results) in zip(axes, panels, strict=True):
        names, values = list(results)[::-1], list(results.values())[::-1]
        bars = axis.barh(names, values, color=["#c2410c" if name == "batchloom" else "#94a3b8" for name in names])
        axis.bar_label(bars, [f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in values], padding=3)
        axis.set_title(f"{title} ({unit}, longer is better)", loc="left", fontsize=9.5)
        axis.set_xlim(0, max(values) * 1.12)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(b=False)
    figure.text(0.01, 0.005, textwrap.fill(caption, 120), fontsize=6.5, color="#64748b")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/speed.svg"))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--mb", type=float, default=60)
    parser.add_argument("--conversations", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    try:
        panels = [
            (
                "Ready batches of 32 x 2,048 tokens",
                "million tokens/s",
                measure_loading(work, options.seconds, options.rounds),
            ),
            ("JSONL text to a token store", "MB/s", measure_preparation(work, options.mb, options.rounds)),
            (
                "Conversations to ids and loss masks",
                "conversations/s",
                run_alone(measure_chat, work, options.conversations),
            ),
        ]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    versions = ", ".join(f"{name} {version(name)}" for name in PEERS)
    caption = (
        f"batchloom {version('batchloom')}; {versions}. {os.cpu_count()} cores {platform.machine()}, one process each."
    )
    for title, unit, results in panels:
        print(f"{title}, {unit}")
        for name, value in results.items():
            print(f"  {name:30} {value:10,.1f}   batchloom/this {results['batchloom'] / value:6.2f}")
    print(caption)
    draw(panels, caption, options.out)


if __name__ == "__main__":
    main()
