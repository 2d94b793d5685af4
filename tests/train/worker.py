"""Script of one rank: train, then save the rank's batches for comparison."""

import os
import sys
from pathlib import Path

import numpy as np

from batchloom import Loader, open_store
from batchloom.cli import run_command_line

if __name__ == "__main__":
    # A path with RANK in it is different on each rank.
    args = [word.replace("RANK", os.environ["RANK"]) for word in sys.argv[1:]]
    batch_folder, store, *arguments = args
    code = run_command_line(arguments)
    if code == 0:
        loader = Loader(open_store(store), seq_len=32, global_batch_size=4, steps=12, output="numpy")
        rows = np.stack([batch["input_ids"] for batch in loader])
        np.save(Path(batch_folder) / f"rank{os.environ['RANK']}.npy", rows)
    sys.exit(code)
