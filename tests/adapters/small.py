"""What the adapters' tests train on."""

import os
import subprocess
import sys

import numpy as np

from batchloom.testing.stores import write_store

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def small_records(count=120, seed=5):
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.choice(
                [5, 17, 99, 180], rng.integers(2, 60), p=[0.6, 0.2, 0.1, 0.1]
            ).tolist()
        }
        for _ in range(count)
    ]


def small_store(folder, **options):
    return write_store(folder, [record["input_ids"] for record in small_records(**options)])


def two_processes(script, *words):
    """What two ranks of a script said; it is killed when it does not end."""
    done = subprocess.run(
        [*TORCHRUN, str(script), *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
