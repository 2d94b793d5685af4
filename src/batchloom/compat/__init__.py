"""Doors for older scripts: the calls people have in their files, each a few lines over the engine."""

from batchloom.compat.gpt import GPTDataLoader
from batchloom.compat.hub import create_huggingface_dataset
from batchloom.compat.indexed import IndexedDataset, PretrainingDataset
from batchloom.compat.jsonl import iter_jsonl_file, load_jsonl_file
from batchloom.compat.sft import SFTDataset
from batchloom.compat.worker import WorkerClient, WorkerConfig

__all__ = [
    "GPTDataLoader",
    "IndexedDataset",
    "PretrainingDataset",
    "SFTDataset",
    "WorkerClient",
    "WorkerConfig",
    "create_huggingface_dataset",
    "iter_jsonl_file",
    "load_jsonl_file",
]
