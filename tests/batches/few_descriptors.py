"""Read all stores of a folder with few file descriptors; print the sum of their trained token ids.

``python -m batches.few_descriptors FOLDER``
"""

import resource
import sys
from pathlib import Path

import batchloom

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    stores = {path.name: batchloom.open_store(path) for path in Path(sys.argv[1]).iterdir()}
    plan = {"seq_len": 32, "global_batch_size": 64, "steps": 20, "rank": 0, "world_size": 1}
    loader = batchloom.Loader(batchloom.Mixture("size", stores=stores), output="numpy", prefetch=0, **plan)
    print(sum(int(batch["labels"].clip(0).sum()) for batch in loader))
