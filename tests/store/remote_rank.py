"""One rank of a node: reads every batch of a remote store and writes what it held.

``python -m store.remote_rank URL FOLDER PER_NODE [LIMIT]``; RANK and WORLD_SIZE say which rank it is.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import xxhash

from batchloom import Loader, open_store
from batchloom.batches import PlanOptions
from store.remote_stores import retry_at_once

SETTINGS = {
    "seq_len": 256,
    "global_batch_size": 16,
    "output": "numpy",
    "epochs": 2,
    "plan": PlanOptions(block=8),
}


def digests(loader):
    """The XXH3-64 of the rows of each step."""
    return [[xxhash.xxh3_64_hexdigest(row.tobytes()) for row in batch["input_ids"]] for batch in loader]


def main():
    url, folder, per_node, *limit = sys.argv[1:]
    rank = int(os.environ["RANK"])
    cache = Path(folder, f"node{rank // int(per_node)}")
    store = open_store(url, cache=cache, cache_limit=int(limit[0]) if limit else None)
    loader = Loader(store, **SETTINGS, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    told = {"steps": digests(loader), "bytes": store.reader.fetched_bytes}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        retry_at_once(patch)
        main()
