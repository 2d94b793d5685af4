"""Two ranks: rank 0 reads metrics of both, slow rank 1 reads none."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.batches import Meter

if __name__ == "__main__":
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    loader = Loader(open_store(sys.argv[1]), seq_len=64, global_batch_size=4, steps=10**6)
    meter, heard_file = Meter(loader), Path(sys.argv[2]) / "heard"
    end, metrics = time.monotonic() + 90, {}
    for _ in meter.over():
        if not is_first:
            time.sleep(0.2)
            if heard_file.exists():
                # End abruptly: leave no process group and close nothing.
                os._exit(0)
            continue
        time.sleep(0.01)
        metrics = meter.metrics()
        if metrics.get("perf/ranks_heard") == 2 and metrics["perf/step_s_max"] > 0.15:
            break
        assert time.monotonic() < end, metrics
    print(f"heard {metrics['perf/ranks_heard']:.0f} ranks, the slowest of them rank 1", flush=True)
    heard_file.touch()
    readings = 0
    for step in range(200):
        time.sleep(0.02)
        meter.step(step)
        readings += "perf/tokens" in meter.metrics()
    assert readings == 200
    print("went on after rank 1 had ended", flush=True)
    os._exit(0)
