"""What torchrun starts: rank 0 looks at figures of both ranks, rank 1 makes slow steps and never looks."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.batches import Meter

if __name__ == "__main__":
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    loader = Loader(open_store(sys.argv[1]), seq_len=64, global_batch_size=4, steps=10**6)
    meter, heard = Meter(loader), Path(sys.argv[2]) / "heard"
    end, figures = time.monotonic() + 90, {}
    for _ in meter.over():
        if not first:
            time.sleep(0.2)
            if heard.exists():
                # Without a word to the other: no group is left, nothing is closed.
                os._exit(0)
            continue
        time.sleep(0.01)
        figures = meter.metrics()
        if figures.get("perf/ranks_heard") == 2 and figures["perf/step_s_max"] > 0.15:
            break
        assert time.monotonic() < end, figures
    print(f"heard {figures['perf/ranks_heard']:.0f} ranks, the slowest of them rank 1", flush=True)
    heard.touch()
    after = 0
    for step in range(200):
        time.sleep(0.02)
        meter.step(step)
        after += "perf/tokens" in meter.metrics()
    assert after == 200
    print("went on after rank 1 had ended", flush=True)
    os._exit(0)
