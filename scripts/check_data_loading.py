"""check_data_loading.py [PATH]: is it sound, and what does its first batch hold? Exit code 1: it is not."""

import sys
from pathlib import Path

import batchloom
from batchloom.cli import run_command_line

if __name__ == "__main__":
    stores = (path.parent for path in sorted(Path().glob("*/dataset_metadata.json")))
    files = (path for kind in ("jsonl", "json", "parquet", "csv", "txt") for path in sorted(Path().glob(f"*.{kind}")))
    defaults = (str(path) for path in (Path("data/train.jsonl"), *stores, *files) if path.exists())
    path = sys.argv[1] if len(sys.argv) > 1 else next(defaults, "")
    print(f"found {path or 'neither data/train.jsonl nor a store nor a data file here: give a path'}")
    if (code := run_command_line(["check", path, *sys.argv[2:]]) if path else 1) or path.startswith("-"):
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
