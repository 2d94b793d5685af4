"""Worker script for torchrun and Ray that records the rows of each step.

Hooks of the model and of the optimizer record them. Each line holds a step, as the optimizer counts it (the checkpoint
restores that count), the rank, the number of workers, and the documents of the rows.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchloom.testing import write_store

SEQ_LEN = 32
BASE = 200


def write_numbered(folder, count):
    """Write a store of documents that fill a sequence and begin with their number."""
    prefixes = [[number // BASE**power % BASE for power in (2, 1, 0)] for number in range(count)]
    return write_store(folder, [[*prefix, *range(SEQ_LEN - 4), 256] for prefix in prefixes])


def decode_numbers(input_ids):
    return [int(a) * BASE**2 + int(b) * BASE + int(c) for a, b, c, *_ in input_ids.tolist()]


def listen(folder):
    """Record the rows that the model receives in each step."""
    rows = []
    path = Path(folder) / f"{time.time_ns()}-{os.getpid()}.jsonl"

    def record_rows(module, inputs):
        if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
            rows.extend(decode_numbers(inputs[0]))

    def record_step(optimizer, *_):
        step = int(next(iter(optimizer.state.values()))["step"])
        step_line = {"step": step, "rank": int(os.environ.get("RANK", "0")), "pid": os.getpid()}
        world = int(os.environ.get("WORLD_SIZE", "1"))
        with path.open("a") as file:
            file.write(json.dumps({**step_line, "world": world, "rows": list(rows)}) + "\n")
        rows.clear()

    return register_module_forward_pre_hook(record_rows), register_optimizer_step_post_hook(record_step)


def read_step_lines(folder):
    """Return the lines of all processes, in the order they were started."""
    return [json.loads(line) for file in sorted(Path(folder).iterdir()) for line in read_complete_lines(file)]


def read_complete_lines(file):
    return file.read_text().split("\n")[:-1]


def select_surviving_lines(folder):
    """Return per step the lines of the last processes that made it, by rank."""
    history = {}
    for line in read_step_lines(folder):
        if line["rank"] == 0:
            history[line["step"]] = {0: line}
    for line in read_step_lines(folder):
        step = history[line["step"]]
        if line["world"] == step[0]["world"]:
            step[line["rank"]] = line
    return history


if __name__ == "__main__":
    from batchloom.cli import run_command_line

    listen(sys.argv[1])
    sys.exit(run_command_line(sys.argv[2:]))
