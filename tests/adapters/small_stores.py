"""Small stores and records for the tests of adapters, and workers that start at once."""

import numpy as np

from batchloom.testing import write_store
from processes import start_processes


def make_small_records(count=120, seed=5):
    rng = np.random.default_rng(seed)
    return [
        {"input_ids": rng.choice([5, 17, 99, 180], rng.integers(2, 60), p=[0.6, 0.2, 0.1, 0.1]).tolist()}
        for _ in range(count)
    ]


def make_small_store(folder, **options):
    return write_store(folder, [record["input_ids"] for record in make_small_records(**options)])


def start_fork_server():
    """Start the server of warm processes unless it runs; DataLoader takes its workers from it, too."""
    with start_processes(environments=[]):
        pass
