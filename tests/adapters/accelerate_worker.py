"""Two Accelerate processes: streams and prepared DataLoaders are refused."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from batchloom import Loader, open_store
from batchloom.adapters.accelerate import attach
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.core.errors import TrainError
from raw_streams.streams import make_small_stream, write_texts

if __name__ == "__main__":
    data, out = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    texts = write_texts(Path(out) / f"{rank}.jsonl", 60)
    with pytest.raises(TrainError, match=r"reads a stream in 2 processes.*merge_states"):
        attach(accelerator, Loader(make_small_stream(texts), rank=rank, world_size=2))
    placement = {"rank": rank, "world_size": 2}
    loader = Loader(open_store(data), seq_len=64, global_batch_size=4, steps=6, **placement)
    for dataset_class in (LoaderDataset, LoaderIterable):
        prepared = accelerator.prepare(DataLoader(dataset_class(loader), batch_size=None))
        if dataset_class is LoaderIterable:
            with pytest.raises(TrainError, match=r"DataLoaderDispatcher gives each of 2 processes a part"):
                next(iter(prepared))
        with pytest.raises(TrainError, match=r"given a DataLoader .*Leave it out of prepare"):
            attach(accelerator, loader)
        accelerator._dataloaders.clear()
    attach(accelerator, loader)
    # Nothing destroys the groups: torch joins their threads while it holds the GIL, and a thread may wait for it.
    dist.barrier()
