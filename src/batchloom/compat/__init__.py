"""Compatibility with older scripts: their usual calls as thin wrappers."""

from batchloom.compat.gpt import GPTDataLoader
from batchloom.compat.hub import create_huggingface_dataset
from batchloom.compat.indexed import IndexedDataset, PretrainingDataset
from batchloom.compat.jsonl import iter_jsonl_file, load_jsonl_file
from batchloom.compat.sft import SFTDataset
from batchloom.compat.worker_client import WorkerClient, WorkerConfig

# Defined here because importing typing takes time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from batchloom.compat.multimodal import MultiModalDataset
    from batchloom.compat.multimodal_stream import MultiModalIterableDataset

# These import torch or the preparation code, so they are loaded on first use.
_HOMES = {
    "MultiModalDataset": "batchloom.compat.multimodal",
    "MultiModalIterableDataset": "batchloom.compat.multimodal_stream",
}

__all__ = [
    "GPTDataLoader",
    "IndexedDataset",
    "MultiModalDataset",
    "MultiModalIterableDataset",
    "PretrainingDataset",
    "SFTDataset",
    "WorkerClient",
    "WorkerConfig",
    "create_huggingface_dataset",
    "iter_jsonl_file",
    "load_jsonl_file",
]


def __getattr__(name: str) -> object:
    import importlib  # noqa: PLC0415 - only needed for these names

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batchloom.compat' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
