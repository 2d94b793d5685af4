"""Load throughput against peers: tokens/s of ready [32, 2048] batches, cache warm.

    python bench/load.py [--documents 200000] [--seconds 4] [--peers]
    python bench/load.py --kernel [--documents 200000] [--rounds 3]
    python bench/load.py --verify [--documents 400000] [--ranks 1] [--rounds 5]

Prints tokens/s for batchloom's complete path (permute, pack, assign, assemble, one process) and,
with --peers, for Megatron's GPTDataset + DataLoader, litdata's TokensLoader and a nanoGPT-style
random sampler over the same tokens, and the ratios to each, in one run.

With --kernel it alternates, 100 batches at a time, between the native kernel, numpy, a nanoGPT-style sampler and copies
of two int64 arrays of a batch, and prints medians of processor time. After another way, the first three batches take
up to five times as long, until code and data are in the caches again.

With --verify it reads two complete epochs with each verify= in turn, in which every 4 KiB is read for the first
time and again, and prints medians by processor time and by the clock; --ranks N reads the share of rank 0 of N.
"""

import argparse
import functools
import itertools
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

import batchloom
from batchloom.batches.assembly import array_filling
from batchloom.batches.assembly.array_filling import find_kernel
from batchloom.batches.producer_thread import reserve_allocator_blocks
from corpus import make_store

SEQ_LEN, BATCH = 2048, 32
# Batches that a way makes before it is another way's turn.
_TURN = 100


def measure(batches, seconds: float) -> float:
    """Measure tokens/s over ``seconds``, after a warm-up of a quarter of that."""
    tokens, started = 0, 0.0
    begin = time.perf_counter()
    for batch in batches:
        now = time.perf_counter()
        if not started:
            if now - begin > seconds / 4:
                started = now
            continue
        tokens += batch
        if now - started > seconds:
            return tokens / (now - started)
    raise SystemExit("the data ended before the measurement did")


def ours(folder: Path, output: str, prefetch: int = 4, augment=None, form="rows", dtype="int64"):
    loader = batchloom.Loader(
        batchloom.open_store(folder),
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        epochs=1000,
        rank=0,
        world_size=1,
        output=output,
        prefetch=prefetch,
        augment=augment,
        form=form,
        dtype=dtype,
    )
    for arrays in loader:
        yield arrays["input_ids"].shape[0] * SEQ_LEN


def copies():
    """Yield token counts of copies of two int64 arrays of a batch."""
    arrays = np.zeros((BATCH, SEQ_LEN), np.int64), np.ones((BATCH, SEQ_LEN), np.int64)
    while True:
        yield sum(array.copy().size for array in arrays) // 2


def compare_kernel(folder: Path, rounds: int) -> None:
    """Print the processor time of a batch of each way, and each way's speed relative to the kernel's."""
    kernel = find_kernel()
    if kernel is None:
        raise SystemExit("the native kernel was not built: python -m batchloom.core.native")
    sources = {
        "kernel": (kernel, ours(folder, "numpy", 0)),
        "kernel, varlen": (kernel, ours(folder, "numpy", 0, form="varlen")),
        "kernel, int32": (kernel, ours(folder, "numpy", 0, dtype="int32")),
        "numpy": (None, ours(folder, "numpy", 0)),
        "nanoGPT-style sampler": (None, nanogpt(folder)),
        "copies of two int64 arrays": (None, copies()),
    }
    reserve_allocator_blocks(1 << 25)
    seconds = {name: [] for name in sources}
    for _, (name, (way, batches)) in itertools.product(range(20 * rounds), sources.items()):
        with mock.patch.object(array_filling, "find_kernel", lambda way=way: way):
            begin = time.process_time()
            for _ in itertools.islice(batches, _TURN):
                pass
            seconds[name].append((time.process_time() - begin) / _TURN)
    # The first batches pack pools and read pages for the first time.
    medians = {name: float(np.median(times[5:])) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:28} {median * 1e6:7.1f} us a batch   speed {medians['kernel'] / median:5.2f} of the kernel's")


def measure_epochs(folder: Path, verify: str, ranks: int) -> list[tuple[float, float]]:
    """Measure tokens/s of processor and clock time of one rank's first two epochs."""
    loader = batchloom.Loader(
        batchloom.open_store(folder, verify=verify),
        seq_len=SEQ_LEN,
        global_batch_size=BATCH * ranks,
        epochs=2,
        rank=0,
        world_size=ranks,
        output="numpy",
        prefetch=0,
    )
    batches, speeds = iter(loader), []
    for _ in range(2):
        processor, clock, tokens = time.process_time(), time.perf_counter(), 0
        for batch in itertools.islice(batches, loader.plan.steps // 2):
            tokens += batch["input_ids"].size
        spent = time.process_time() - processor, time.perf_counter() - clock
        speeds.append((tokens / spent[0], tokens / spent[1]))
    batches.close()
    return speeds


def compare_verify(folder: Path, ranks: int, rounds: int) -> None:
    """Print the speed of each ``verify``, and its cost relative to ``off``."""
    choices = ("off", "first-read", "full")
    speeds = {verify: [] for verify in choices}
    for number in range(rounds):
        # Rotate the order, since the first reader finds different caches.
        for verify in choices[number % 3 :] + choices[: number % 3]:
            speeds[verify].append(measure_epochs(folder, verify, ranks))
    print(f"rank 0 of {ranks}, tokens/s of processor time (by the clock), and cost against off")
    for verify in choices:
        for epoch in (0, 1):
            ours = np.array([one[epoch] for one in speeds[verify]])
            base = np.array([one[epoch] for one in speeds["off"]])
            (processor, clock), cost = np.median(ours, 0) / 1e6, np.median(base / ours, 0) - 1
            print(
                f"{verify:12} epoch {epoch + 1}  {processor:6.0f} M ({clock:.0f} M)   {cost[0]:+.1%} ({cost[1]:+.1%})"
            )


def nanogpt(folder: Path):
    """Yield token counts of nanoGPT's get_batch: random windows of one flat memmap."""
    import torch

    files = sorted((folder / "train").glob("*.bin"))
    data = np.memmap(files[0], np.uint16, "r")
    torch.set_num_threads(1)
    while True:
        ix = torch.randint(len(data) - SEQ_LEN, (BATCH,))
        x = torch.stack([torch.from_numpy(data[i : i + SEQ_LEN].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + SEQ_LEN].astype(np.int64)) for i in ix])
        yield x.numel() + 0 * y.numel()


def megatron(folder: Path, cache: Path):
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad = 50257, 50256, 50256
        unique_identifiers = {"class": "bench"}

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method=f"file://{cache}.rendezvous", rank=0, world_size=1)
    prefixes = [str(p.with_suffix("")) for p in sorted((folder / "train").glob("*.bin"))]
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LEN,
        blend=(prefixes, None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [400_000, 0, 0], lambda: True, config)
    dataset = builder.build()[0]
    while True:
        for batch in torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=0, drop_last=True):
            yield batch["tokens"].numel()


def litdata(folder: Path, work: Path):
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    source = str(sorted((folder / "train").glob("*.bin"))[0])
    if not (work / "lit").exists():
        optimize(
            fn=functools.partial(_windows, source),
            inputs=list(range(64)),
            output_dir=str(work / "lit"),
            num_workers=1,
            chunk_bytes="64MB",
            item_loader=TokensLoader(),
        )
    dataset = StreamingDataset(str(work / "lit"), item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True)
    while True:
        for batch in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, drop_last=True):
            # Include the conversion its users need: int64 inputs and next-token targets.
            x, y = batch[:, :-1].contiguous().long(), batch[:, 1:].contiguous().long()
            yield x.numel() + 0 * y.numel()


def _windows(source, part):
    import torch

    data = np.memmap(source, np.uint16, "r")
    step = len(data) // 64
    yield torch.from_numpy(data[part * step : (part + 1) * step].astype(np.int32))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--kernel", action="store_true", help="compare the native kernel and numpy")
    parser.add_argument("--verify", action="store_true", help="compare verify=off, first-read and full")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1])
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    try:
        store = make_store(work / "store", options.documents)
        for path in (store / "train").glob("*.bin"):
            path.read_bytes()
        if options.kernel:
            compare_kernel(store, options.rounds)
            return
        if options.verify:
            for ranks in options.ranks:
                compare_verify(store, ranks, options.rounds)
            return
        sources = {
            "batchloom numpy": lambda: ours(store, "numpy"),
            "batchloom torch": lambda: ours(store, "torch"),
            "batchloom numpy, no thread": lambda: ours(store, "numpy", 0),
            "batchloom numpy, noise 0.1": lambda: ours(store, "numpy", 4, {"noise_prob": 0.1}),
        }
        if options.peers:
            sources |= {
                "megatron GPTDataset + DataLoader": lambda: megatron(store, work / "cache"),
                "litdata TokensLoader": lambda: litdata(store, work),
                "nanoGPT-style sampler": lambda: nanogpt(store),
            }
        figures = {name: [] for name in sources}
        for _, (name, source) in itertools.product(range(options.rounds), sources.items()):
            figures[name].append(measure(source(), options.seconds) / 1e6)
        base = float(np.median(figures["batchloom numpy"]))
        for name, values in figures.items():
            median = float(np.median(values))
            print(
                f"{name:36} {median:8.1f} Mtok/s (of {min(values):.0f}-{max(values):.0f})   batchloom/this {base / median:5.2f}"
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
