"""Data wait of a training step on a GPU, and the feed rate of a loader.

    python bench/gpu.py [--models 124M 350M] [--seq-len 1024 2048] [--tokens 32768] [--steps 60]

The models train as in `batchloom train` (bfloat16, flex_attention, torch.compile, fused AdamW), one
pass per step, on a store of synthetic ids on disk whose pages are warm. Each is measured in turn on

    held    one batch on the GPU: there is no data wait, so the result is the measurement error
    ahead   Loader(device="cuda")
    moved   Loader(), whose tensors are moved at the start of the step

once with a host that runs ahead of the GPU, and once with one that reads the loss of every step, as the trainer does:
then the GPU is idle while the next batch is requested.

A step's wait is the time between two events on the compute stream, one recorded before the batch is requested and
one after it. The GPU passes the second when the host has received the batch and its copy has ended. It thus counts
both kinds of waiting, and neither if the GPU was busy meanwhile. The feed rate is that of a loop that does not use
its batches. The last line holds all results as JSON.
"""

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import batchloom
from batchloom.adapters.optimizer_step import make_parameter_groups
from batchloom.train import GPT, ModelSettings
from batchloom.train.loop import make_autocast
from batchloom.train.model import pad_vocabulary
from corpus import VOCABULARY, make_store

DEVICE = torch.device("cuda")
# Shapes of GPT-2 small and medium, with this trainer's SwiGLU of 8/3 of the width.
MODELS = {
    "124M": ModelSettings(layers=12, heads=12, width=768),
    "350M": ModelSettings(layers=24, heads=16, width=1024),
}
NAMES = ("input_ids", "labels", "position_ids")
WAIT, FEED = 0.005, 50


class Trainee:
    """A model and its optimizer, built as in the trainer."""

    def __init__(self, settings: ModelSettings, compiled: bool) -> None:
        vocabulary = pad_vocabulary(VOCABULARY)
        self.model = GPT(settings, vocabulary).to(DEVICE)
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        self.learner = torch.compile(self.model) if compiled else self.model
        groups = make_parameter_groups(self.model, 0.1)
        self.optimizer = torch.optim.AdamW(groups, 1e-4, (0.9, 0.95), fused=True)

    def step(self, batch, reads: bool) -> None:
        with make_autocast(DEVICE):
            loss = self.learner(**{name: batch[name] for name in NAMES}) / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if reads:
            loss.item()


def loader_of(folder: Path, seq_len: int, tokens: int, device, form: str = "rows"):
    return batchloom.Loader(
        batchloom.open_store(folder),
        seq_len=seq_len,
        global_batch_size=tokens // seq_len,
        epochs=100_000,
        rank=0,
        world_size=1,
        form=form,
        device=device,
    )


def held(folder: Path, seq_len: int, tokens: int) -> Iterator:
    return itertools.repeat(loader_of(folder, seq_len, tokens, DEVICE)[0])


def ahead(folder: Path, seq_len: int, tokens: int) -> Iterator:
    return iter(loader_of(folder, seq_len, tokens, DEVICE))


def moved(folder: Path, seq_len: int, tokens: int) -> Iterator:
    for batch in loader_of(folder, seq_len, tokens, None):
        yield {name: batch[name].to(DEVICE) for name in NAMES}


def measure(batches: Iterator, trainee: Trainee, steps: int, reads: bool) -> tuple[float, float]:
    """Return seconds per step and the share of data wait."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for asked, given in marks:
        asked.record()
        batch = next(batches)
        given.record()
        trainee.step(batch, reads)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    waited = sum(asked.elapsed_time(given) for asked, given in marks) / 1000
    return took / steps, waited / took


def feed(folder: Path, seq_len: int, tokens: int, seconds: float, form: str) -> float:
    """Measure tokens/s that a loader copies to the GPU if the batches are not used."""
    batches = iter(loader_of(folder, seq_len, tokens, DEVICE, form))
    for _ in range(20):
        next(batches)
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        count += next(batches)["input_ids"].numel()
    torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


def trained(folder: Path, name: str, seq_len: int, options) -> dict:
    """Measure a model per way, with and without loss reads: medians of the rounds."""
    torch.compiler.reset()
    trainee = Trainee(MODELS[name], not options.eager)
    ways = {way.__name__: way(folder, seq_len, options.tokens) for way in (held, ahead, moved)}
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for batches in ways.values():
        measure(batches, trainee, 5, False)
    for _ in range(options.rounds):
        for (way, batches), reads in itertools.product(ways.items(), (False, True)):
            figures = measure(batches, trainee, options.steps, reads)
            found.setdefault((way, reads), []).append(figures)
    print(f"{name} ({trainee.parameters / 1e6:.1f} M parameters), seq_len {seq_len}")
    rows = []
    for (way, reads), figures in found.items():
        took, waited = (statistics.median(column) for column in zip(*figures, strict=True))
        base = statistics.median(one[0] for one in found["held", reads])
        host = "reads each loss" if reads else "runs ahead"
        print(
            f"  {way:6} host {host:16} {1e3 * took:8.2f} ms a step, {took / base:6.3f} x held, waits {waited:8.3%}, "
            f"{options.tokens / took / 1e3:8.0f} ktok/s"
        )
        rows.append({"way": way, "reads": reads, "step_s": took, "of_held": took / base, "wait": waited})
    return {"model": name, "seq_len": seq_len, "parameters": trainee.parameters, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seq-len", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tokens", type=int, default=32_768, help="of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of feeding")
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"Nothing was measured: this needs a GPU, and torch {torch.__version__} sees none.")
        return
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    try:
        run(make_store(work / "store", options.documents), options)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(folder: Path, options) -> None:
    for path in (folder / "train").glob("*.bin"):
        path.read_bytes()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, {options.tokens:,} made-up tokens a step (source=synthetic)")
    report: dict = {"gpu": gpu, "torch": torch.__version__, "tokens": options.tokens}
    cases = list(itertools.product(options.models, options.seq_len))
    report["trained"] = [trained(folder, name, seq_len, options) for name, seq_len in cases]
    report["feed"] = []
    for seq_len, form in itertools.product(options.seq_len, ("rows", "varlen")):
        rate = feed(folder, seq_len, options.tokens, options.seconds, form)
        of = {"seq_len": seq_len, "form": form, "tokens_per_s": rate}
        line = f"feed, seq_len {seq_len}, {form}: {rate / 1e6:.0f} Mtok/s"
        for case in report["trained"]:
            if (case["model"], case["seq_len"]) == ("124M", seq_len):
                fastest = min(row["step_s"] for row in case["rows"] if row["way"] == "ahead")
                of["of_124M"] = rate * fastest / options.tokens
                line += f", {of['of_124M']:.0f} x what 124M consumes (aim {FEED})"
        print(line)
        report["feed"].append(of)
    waits = [row["wait"] for c in report["trained"] for row in c["rows"] if row["way"] == "ahead"]
    print(f"most that was waited with Loader(device=...): {max(waits):.3%} of a step (aim {WAIT:.1%})")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
