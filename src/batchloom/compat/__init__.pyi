from .gpt import (
    GPTDataLoader as GPTDataLoader,
    IndexedDataset as IndexedDataset,
    PretrainingDataset as PretrainingDataset,
)
from .hub import (
    create_huggingface_dataset as create_huggingface_dataset,
    list_available_datasets as list_available_datasets,
)
from .multimodal import (
    MultiModalDataset as MultiModalDataset,
    load_lmms_engine_config as load_lmms_engine_config,
)
from .multimodal_stream import MultiModalIterableDataset as MultiModalIterableDataset
from .sft import (
    SFTDataset as SFTDataset,
    iter_jsonl_file as iter_jsonl_file,
    load_jsonl_file as load_jsonl_file,
)
from .worker_client import WorkerClient as WorkerClient, WorkerConfig as WorkerConfig
