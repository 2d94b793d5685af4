"""Script of one rank that trains; after some steps the first rank waits for requests to edit the run.

``gated_worker.py RUN GATES ARGUMENTS...``; ``GATES`` maps a step to the number of requests that it waits for.
"""

import json
import os
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from waiting import wait_until


def wait_at_gates(run, gates):
    """Let no step of a gate end before its requests are there."""

    def wait_for_requests(optimizer, *_):
        step = int(next(iter(optimizer.state.values()))["step"])
        if count := gates.get(str(step)):
            wait_until(lambda: len(list(Path(run, "edits").glob("*.json"))) >= count, f"request {count} of step {step}")

    return register_optimizer_step_post_hook(wait_for_requests)


if __name__ == "__main__":
    from batchloom.cli import run_command_line

    run, gates, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "0":
        wait_at_gates(run, json.loads(gates))
    sys.exit(run_command_line(arguments))
