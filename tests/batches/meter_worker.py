"""Two ranks: rank 0 reads metrics of both, slow rank 1 reads none."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.batches import Meter
from processes import have_ended
from waiting import LIMIT_S

if __name__ == "__main__":
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    loader = Loader(open_store(sys.argv[1]), seq_len=64, global_batch_size=4, steps=10**6)
    meter, heard_file, slow_file = Meter(loader), Path(sys.argv[2], "heard"), Path(sys.argv[2], "slow")
    if not is_first:
        slow_file.write_text(str(os.getpid()))
    end, metrics = time.monotonic() + LIMIT_S, {}
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
    assert have_ended([int(slow_file.read_text())], LIMIT_S)
    readings = 0
    for step in range(50):
        meter.step(step)
        readings += "perf/tokens" in meter.metrics()
    assert readings == 50
    print("went on after rank 1 had ended", flush=True)
    os._exit(0)
