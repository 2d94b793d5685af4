"""One rank of a node: reads every batch of a store elsewhere and says what it held.

``python -m store.far_rank URL CACHE RANK RANKS OUT [LIMIT]``
"""

import json
import sys

import xxhash

from batchloom import Loader, open_store

SETTINGS = {"seq_len": 256, "global_batch_size": 16, "output": "numpy", "block": 8, "epochs": 2}


def digests(loader):
    """The XXH3-64 of the rows of each step."""
    return [
        [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in batch["input_ids"]] for batch in loader
    ]


def main():
    url, cache, rank, ranks, out, *limit = sys.argv[1:]
    store = open_store(url, cache=cache, cache_limit=int(limit[0]) if limit else None)
    loader = Loader(store, **SETTINGS, rank=int(rank), world_size=int(ranks))
    told = {"steps": digests(loader), "bytes": store.fetched_bytes}
    with open(out, "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
