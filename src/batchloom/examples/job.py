"""Settings, model and command line that the examples share."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchloom import Store, open_store
from batchloom.adapters.rank_group import wait_to_leave


def print_loss(step: int, loss: float) -> None:
    """Print the loss of a step."""
    print(f"step {step:5d}  loss {loss:.4f}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Settings of a small training run on a store.

    Attributes:
        data: folder of the store.
        out: folder of the checkpoints.
        seq_len: tokens per sequence.
        global_batch_size: sequences per step, over all ranks.
        batch_size: sequences per forward pass of one rank.
        steps: step to stop after.
        save_every: steps between two checkpoints.
        lr: learning rate, the same at every step.
        seed: seed of the data order and of the initial weights.
        resume: resume from the newest checkpoint in ``out``.
        workers: number of processes, for a framework that starts them itself.
        tell: called on rank 0 with (step from 0, loss of the complete step in nats per trained token).
        within: context manager that an example which starts its own processes enters with the model around the
            steps. Hooks on the model's inputs must be set there. It is pickled with the job.
    """

    data: str
    out: str
    seq_len: int = 128
    global_batch_size: int = 8
    batch_size: int = 2
    steps: int = 20
    save_every: int = 10
    lr: float = 3e-3
    seed: int = 0
    resume: bool = False
    workers: int = 1
    tell: Callable[[int, float], None] = print_loss
    within: Callable[[Any], AbstractContextManager[Any]] = nullcontext

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a checkpoint after ``step`` steps, if one is due."""
        if step % self.save_every == 0:
            path = Path(self.out) / f"step_{step}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            # Write to another name first, so that a kill leaves no torn file to resume from.
            torch.save(state, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)

    def newest(self) -> dict[str, Any] | None:
        """Return the newest checkpoint to resume from; None at the start."""
        checkpoints = sorted(Path(self.out).glob("step_*.pt"), key=lambda file: int(file.stem[5:]))
        if not (self.resume and checkpoints):
            return None
        state: dict[str, Any] = torch.load(checkpoints[-1], weights_only=True)
        return state


def tiny_model(store: Store, seed: int = 0) -> Any:
    """Make a two-layer Llama with seeded weights, in float32 and without dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if store.vocab_size is None:
        raise ValueError(
            f"{store.location.name} does not say which tokenizer made it; its ids need a model of that size"
        )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=-(-store.vocab_size // 64) * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        # With a cache the documents of a row would attend to each other.
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer of all examples, so that their losses can be compared."""
    return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.0)


def leave_group() -> None:
    """Wait for all ranks, and destroy the process group if there is one."""
    if dist.is_initialized():
        wait_to_leave()
        dist.destroy_process_group()


def main(train: Callable[[Any, Job], None]) -> None:
    """Run an example from the command line: ``python examples/NAME.py STORE OUT``."""
    parser = argparse.ArgumentParser()
    for field in fields(Job):
        if field.name in ("data", "out"):
            parser.add_argument(field.name)
        elif field.name == "resume":
            parser.add_argument("--resume", action="store_true")
        elif field.name not in ("tell", "within"):
            name = "--" + field.name.replace("_", "-")
            parser.add_argument(name, type=type(field.default), default=field.default)
    job = Job(**vars(parser.parse_args()))
    train(tiny_model(open_store(job.data), job.seed), job)
