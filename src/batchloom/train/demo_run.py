"""Demo: from text files that exist on every machine to a trained model.

The text is the language reference inside Python (``pydoc_data.topics``, in English) and the sources of the
standard library: a fixed selection of at most a few megabytes.
"""

import math
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

import batchloom
from batchloom import Loader, Store, open_store
from batchloom.adapters.rank_group import join_ranks
from batchloom.core.errors import InputMissingError, OutputError, TrainError
from batchloom.train.loop import train
from batchloom.train.model.model_build import TrainableModel
from batchloom.train.run import set_up_run
from batchloom.train.run_folder import PrintLine, RunFolder, RunLog
from batchloom.train.train_settings import load_named_config, make_settings

DEMO_TOKENIZER = "train:4096"
VAL_FRACTION = 0.03
# The top-level modules come first, then those of these packages, without subpackages and their tests.
_CORPUS_PACKAGES = (".", "asyncio", "collections", "email", "http", "json", "logging", "unittest")
_MAX_CORPUS_BYTES = 8 << 20
_DEMO_MARKER_FILE = "made-by-batchloom-demo"
_PROGRESS_INTERVAL = 10
# Sampling: temperature below 1 prefers likely tokens, and only the most likely ones are drawn.
_TEMPERATURE = 0.8
_TOP_K = 40


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of a demo: two losses on val, in nats per token.

    Attributes:
        val_loss: loss of the trained model.
        unigram_entropy: loss of guessing from token frequencies.
    """

    val_loss: float
    unigram_entropy: float


def run_demo(out: Path, steps: int | None, print_line: PrintLine) -> DemoResult:
    """Prepare, check, load, train and sample, printing the equivalent commands.

    Args:
        out: folder of the demo: new, empty, or of an earlier demo.
        steps: optimizer steps; None for those of the configuration.
        print_line: function that prints one line.

    Raises:
        OutputError: ``out`` holds files that no demo wrote.
        TrainError: the loss did not fall below the unigram entropy.
    """
    start_time = time.perf_counter()
    settings = make_settings(load_named_config("tiny"), {} if steps is None else {"steps": steps})
    text = out / "text"
    data = out / "store"
    folder = RunFolder(out / "run")
    _claim_folder(out)
    files, size = _collect_corpus(text)
    print_line(f"{files} files, {size / 1e6:.1f} MB of text: Python's language reference and library.")

    print_line(f"\n$ batchloom prepare {text} --out {data} --tokenizer {DEMO_TOKENIZER} --val-fraction {VAL_FRACTION}")
    result = batchloom.prepare(
        [str(text)], out=data, tokenizer=DEMO_TOKENIZER, val_fraction=VAL_FRACTION, progress=lambda _: None
    )
    for note in result.notes:
        print_line(note)
    prefix = "The store is already finished: " if result.already_done else ""
    subsets = ", ".join(
        f"{name} {subset.documents:,} documents, {subset.tokens:,} tokens"
        for name, subset in result.subsets.items()
        if subset.documents
    )
    print_line(f"{prefix}{subsets}; {result.tokenizer} by {result.engine}.")

    print_line(f"\n$ batchloom check {data}")
    verdict = batchloom.check(data)
    if not verdict.sound:
        raise TrainError(f"{data} is not sound ({'; '.join(verdict.faults)}). Delete {out} and run the demo again.")
    print_line("Sound: checksums, counts, ids and tokenizer are as the manifest says.")

    store = open_store(data)
    val = open_store(data, "val")
    seq_len = settings.seq_len
    rows = settings.global_batch_size
    print_line(
        f"\n>>> loader = batchloom.Loader(batchloom.open_store({str(store.path)!r}), "
        f"seq_len={seq_len}, global_batch_size={rows})"
    )
    loader = Loader(store, seq_len=seq_len, global_batch_size=rows)
    print_line(
        f"{len(loader):,} steps per epoch, {store.tokens / (len(loader) * rows * seq_len):.1%} full. Step 0 begins: "
        f"{store.tokenizer.decode(loader[0]['input_ids'][0, :24].tolist())!r}"
    )

    print_line(f"\n$ batchloom train --data {data} --out {folder.path} --max-iters {settings.steps}")
    if folder.has_run:
        print_line("The run of an earlier demo is replaced.")
        shutil.rmtree(folder.path)
    with join_ranks("auto") as ranks:
        log = RunLog(folder.log if ranks.first else None, print_line, _PROGRESS_INTERVAL)
        outcome = train(set_up_run(data, settings, folder, ranks, log))
    val_loss = math.inf if outcome.val_loss is None else outcome.val_loss
    unigram = _compute_unigram_loss(store, val)
    print_line(
        f"\nval loss {val_loss:.3f} nats per token; the unigram entropy, reached by guessing from token frequencies, "
        f"is {unigram:.3f}."
    )
    print_line("\nWhat the model writes after 'def ':")
    print_line(_continue_text(outcome.model, store, "def ", 150, window=settings.seq_len))
    print_line(f"\nTotal time: {time.perf_counter() - start_time:.0f} seconds.")
    if not val_loss < unigram:
        raise TrainError(
            f"The val loss {val_loss:.3f} is not below the unigram entropy {unigram:.3f} "
            f"after {outcome.steps} steps: give more --steps."
        )
    return DemoResult(val_loss, unigram)


def _claim_folder(out: Path) -> None:
    """Create the demo's folder, or reuse an earlier demo's; refuse any other folder."""
    mark = out / _DEMO_MARKER_FILE
    if out.exists() and not mark.is_file() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} holds files that are not from the demo. Give --out a new or empty folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}. Give --out a writable folder.") from error


def _collect_corpus(folder: Path) -> tuple[int, int]:
    """Copy the text into a folder; return the number of files and bytes."""
    files = size = 0
    for name, text in _iter_texts():
        content = text.encode()
        if size + len(content) > _MAX_CORPUS_BYTES:
            break
        path = folder / name
        # Equal files stay untouched, so that prepare recognizes the same inputs again.
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        files += 1
        size += len(content)
    if not files:
        raise InputMissingError("This Python installation has neither its topics nor its sources as text.")
    return files, size


def _iter_texts() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document of the corpus in a fixed order."""
    for name in sorted(topics):
        yield f"topics/{name}.txt", topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for package in _CORPUS_PACKAGES:
        for file in sorted((library / package).glob("*.py")):
            name = file.relative_to(library).as_posix()
            yield f"library/{name}", file.read_text("utf-8", errors="replace")


def _compute_unigram_loss(train_subset: Store, val: Store) -> float:
    """Return the loss on val of a unigram model of train, in nats per token."""
    size = train_subset.tokenizer.vocab_size
    train_counts = _count_tokens(train_subset, size) + 1
    val_counts = _count_tokens(val, size)
    return float(-(val_counts * np.log(train_counts / train_counts.sum())).sum() / val_counts.sum())


def _count_tokens(store: Store, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    counts = np.zeros(vocab_size, np.int64)
    for number in range(len(store)):
        counts += np.bincount(store[number].ids.astype(np.int64), minlength=vocab_size)
    return counts


def _continue_text(model: TrainableModel, store: Store, prompt: str, count: int, *, window: int) -> str:
    """Continue a prompt by at most ``count`` tokens."""
    ids = [int(token) for token in store.tokenizer.encode_batch([prompt])[0]]
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        scores = _compute_next_logits(model, ids[-window:])[: store.tokenizer.vocab_size]
        best, tokens = scores.topk(min(_TOP_K, scores.numel()))
        chances = torch.softmax(best / _TEMPERATURE, 0)
        token = int(tokens[int(torch.multinomial(chances, 1, generator=generator))])
        if token == store.end_id:
            break
        ids.append(token)
    return store.tokenizer.decode(ids)


@torch.no_grad()
def _compute_next_logits(model: TrainableModel, ids: list[int]) -> Tensor:
    """Return the logits of the next token: [vocab_size] float32 on the CPU."""
    device = next(model.parameters()).device
    row = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return model.logits(row, positions)[0, -1].float().cpu()
