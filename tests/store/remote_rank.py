"""One rank of a node: writes digests of every batch of a remote store.

``python -m store.remote_rank URL FOLDER PER_NODE [LIMIT]``. RANK and WORLD_SIZE identify the rank.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import xxhash

from batchloom import Loader, open_store
from store.remote_stores import shorten_retry_delays

SETTINGS = {
    "seq_len": 256,
    "global_batch_size": 16,
    "output": "numpy",
    "epochs": 2,
    "block": 8,
}


def compute_digests(loader):
    """Compute the XXH3-64 digests of the rows of each step."""
    return [[xxhash.xxh3_64_hexdigest(row.tobytes()) for row in batch["input_ids"]] for batch in loader]


def main():
    url, folder, per_node, *limit = sys.argv[1:]
    rank = int(os.environ["RANK"])
    cache = Path(folder, f"node{rank // int(per_node)}")
    store = open_store(url, cache=cache, cache_limit=int(limit[0]) if limit else None)
    loader = Loader(store, **SETTINGS, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    report = {"steps": compute_digests(loader), "bytes": store.reader.fetched_bytes}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        shorten_retry_delays(patch)
        main()
