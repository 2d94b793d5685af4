"""Megatron's own readers read the stores of batchloom."""

import numpy as np
import pytest

from batchloom.testing import write_store
from oracles import build_gpt_dataset, import_megatron

DOCUMENTS = [[(7 * n + k) % 256 for n in range(k % 13)] + [256] for k in range(60)]


@pytest.fixture(params=["uint16", "int32"])
def folder(request, tmp_path):
    write_store(tmp_path / "s", DOCUMENTS, dtype=request.param, documents_per_shard=25)
    return tmp_path / "s"


def test_indexed_dataset_reads_every_shard(folder):
    indexed = import_megatron("indexed_dataset").IndexedDataset
    documents = []
    for path in sorted((folder / "train").glob("*.idx")):
        dataset = indexed(str(path.with_suffix("")))
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        documents += [dataset[n].tolist() for n in range(len(dataset))]
    assert documents == DOCUMENTS


def test_numpy_memmap_reads_the_bin(folder):
    import json

    dtype = json.loads((folder / "dataset_metadata.json").read_text())["dtype"]
    flat = np.concatenate([np.memmap(p, dtype, "r") for p in sorted((folder / "train").glob("*.bin"))])
    assert flat.tolist() == [token for ids in DOCUMENTS for token in ids]


@pytest.fixture
def process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_gpt_dataset_trains_on_the_prefixes(folder, tmp_path):
    prefixes = [str(path.with_suffix("")) for path in sorted((folder / "train").glob("*.bin"))]
    dataset = build_gpt_dataset((prefixes, None), tmp_path / "cache", seq_len=16, samples=20)
    flat = [token for ids in DOCUMENTS for token in ids]
    token_list = f",{','.join(map(str, flat))},"
    for sample in range(len(dataset)):
        tokens = dataset[sample]["tokens"].tolist()
        assert len(tokens) == 16
        documents = ",".join(map(str, tokens)).split(",256,")
        assert all(f",{document}," in token_list for document in documents)
