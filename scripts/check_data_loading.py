"""check_data_loading.py PATH: is it sound, and what does its first batch hold? Exit code 1: it is not."""

import sys

import batchloom
from batchloom.cli import run_command_line

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if (code := run_command_line(["check", path, *sys.argv[2:]])) or path.startswith("-"):
        sys.exit(code)
    try:
        store = batchloom.open_store(path)
        batch = batchloom.Loader(store, seq_len=128, global_batch_size=4, output="numpy")[0]
    except batchloom.StoreError:
        sys.exit(f"no batches yet: batchloom prepare {path} --out STORE makes a store of it")
    except batchloom.BatchloomError as error:
        sys.exit(f"no batches: {error}")
    trained = (batch["labels"] != -100).sum()
    print(f"first batch: {batch['input_ids'].shape}, {trained:,} trained tokens, {batch.origin}")
