"""What torchrun and Ray start in the tests of workers: notes which rows every optimizer step was made of.

Heard at the model and at the optimizer themselves. A line a step: the step by the optimizer's own count, which the
checkpoint restores, the rank, the number of workers, and the documents of the rows.
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
    """A store of documents that fill a sequence each, and begin with their number."""
    digits = [[number // BASE**place % BASE for place in (2, 1, 0)] for number in range(count)]
    return write_store(folder, [[*one, *range(SEQ_LEN - 4), 256] for one in digits])


def numbers(input_ids):
    return [int(a) * BASE**2 + int(b) * BASE + int(c) for a, b, c, *_ in input_ids.tolist()]


def listen(folder):
    """Note what the model is given in each step."""
    rows = []
    path = Path(folder) / f"{time.time_ns()}-{os.getpid()}.jsonl"

    def hear(module, given):
        if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
            rows.extend(numbers(given[0]))

    def made(optimizer, *_):
        step = int(next(iter(optimizer.state.values()))["step"])
        told = {"step": step, "rank": int(os.environ.get("RANK", "0")), "pid": os.getpid()}
        world = int(os.environ.get("WORLD_SIZE", "1"))
        with path.open("a") as file:
            file.write(json.dumps({**told, "world": world, "rows": list(rows)}) + "\n")
        rows.clear()

    return register_module_forward_pre_hook(hear), register_optimizer_step_post_hook(made)


def heard(folder):
    """The lines of all processes, in the order they were started."""
    return [json.loads(line) for file in sorted(Path(folder).iterdir()) for line in whole_lines(file)]


def whole_lines(file):
    return file.read_text().split("\n")[:-1]


def surviving(folder):
    """Of each step the rows of the weights that went on: those of the last processes that made it."""
    history = {}
    for line in heard(folder):
        if line["rank"] == 0:
            history[line["step"]] = {0: line}
    for line in heard(folder):
        step = history[line["step"]]
        if line["world"] == step[0]["world"]:
            step[line["rank"]] = line
    return history


if __name__ == "__main__":
    from batchloom.cli import run_command_line

    listen(sys.argv[1])
    sys.exit(run_command_line(sys.argv[2:]))
