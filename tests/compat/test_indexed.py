"""``IndexedDataset`` against Megatron's; ``PretrainingDataset`` and its rows."""

import pickle

import numpy as np
import pytest

import batchloom
from batchloom import InputError
from batchloom.compat import GPTDataLoader, IndexedDataset, PretrainingDataset
from batchloom.store import remove_documents
from batchloom.testing import append_documents, write_store
from oracles import import_megatron, write_megatron_pair
from preparation.stores import write_jsonl

DOCUMENTS = [[[1, 2, 3], [4]], [], [[5, 6]], [[7], [8, 9], [10, 11, 12, 13]], [[14, 15]]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("modes", [None, range(7)])
def test_sequences_are_megatrons(tmp_path, dtype, modes):
    prefix = write_megatron_pair(tmp_path / "p", DOCUMENTS, dtype, modes)
    theirs = import_megatron("indexed_dataset").IndexedDataset(str(prefix))
    ours = IndexedDataset(prefix)
    assert len(ours) == len(theirs) == 7
    for name in ("sequence_lengths", "document_indices"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    assert ours.sizes.tolist() == theirs.sequence_lengths.tolist()
    for number in range(-7, 7):
        assert ours[number].dtype == theirs[number].dtype
        assert ours[number].tolist() == theirs[number].tolist()
    for selection in (slice(0, 4), slice(2, None), slice(0, 0)):
        selected = theirs[selection] if selection != slice(0, 0) else []
        assert [ids.tolist() for ids in ours[selection]] == [ids.tolist() for ids in selected]
    for number, offset, length in ((5, 1, 2), (5, 0, None), (0, 3, 0), (3, 0, 1)):
        if number < 7:
            expected = theirs.get(number, offset, length)
            assert ours.get(number, offset, length).tolist() == expected.tolist()
    assert [ids.tolist() for ids in pickle.loads(pickle.dumps(ours))] == [ids.tolist() for ids in ours]


def test_stores_open_as_well(tmp_path):
    documents = [list(range(n)) for n in range(1, 30)]
    write_store(tmp_path / "s", {"train": documents, "val": [[7, 8]]}, documents_per_shard=4)
    data = IndexedDataset(tmp_path / "s")
    assert [ids.tolist() for ids in data] == documents
    assert data.sizes.tolist() == [len(document) for document in documents]
    assert data.document_indices.tolist() == list(range(30))
    assert data.get(28, 3, 4).tolist() == [3, 4, 5, 6]
    assert IndexedDataset(tmp_path / "s", "val")[0].tolist() == [7, 8]
    theirs = import_megatron("indexed_dataset").IndexedDataset(str(tmp_path / "s/train/shard_00002"))
    assert data[9].tolist() == theirs[1].tolist()


def test_missing_sequences_and_files(tmp_path):
    prefix = write_megatron_pair(tmp_path / "p", DOCUMENTS)
    data = IndexedDataset(prefix)
    for number in (7, -8):
        with pytest.raises(IndexError, match="There is no sequence .*: there are 7"):
            data[number]
    for number in ("x", 1.0):
        with pytest.raises(TypeError, match="A sequence is selected by a whole number"):
            data[number]
    with pytest.raises(IndexError, match="Sequence 0 has 3 tokens; there are none from 1 to 9"):
        data.get(0, 1, 8)
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        IndexedDataset(tmp_path / "q")
    (tmp_path / "p.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match="one of the two is cut short"):
        IndexedDataset(prefix)


def test_one_document_a_row(tmp_path):
    documents = [[1, 2, 3], [9], list(range(20)), [], [4, 5]]
    prefix = write_megatron_pair(tmp_path / "p", [[document] for document in documents])
    data = PretrainingDataset(prefix, "bytes", 8)
    assert len(data) == 3
    rows = [{name: values.tolist() for name, values in row.items()} for row in data]
    assert rows[0] == {
        "input_ids": [1, 2, 3, 256, 256, 256, 256, 256],
        "labels": [-100, 2, 3, -100, -100, -100, -100, -100],
        "attention_mask": [1, 1, 1, 0, 0, 0, 0, 0],
    }
    assert rows[1]["input_ids"] == list(range(8))
    assert rows[1]["labels"] == [-100, *range(1, 8)]
    assert rows[2]["input_ids"][:2] == [4, 5]
    assert data[-1]["input_ids"].tolist() == rows[2]["input_ids"]


def test_masks_of_a_store_and_foreign_ids(tmp_path):
    store = write_store(tmp_path / "s", [[1, 2, 3, 256]], trained=[[0, 0, 1, 1]])
    row = PretrainingDataset(tmp_path / "s", store.tokenizer, 5, output="numpy")[0]
    assert row["labels"].tolist() == [-100, -100, 3, 256, -100]
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 300, 2]]])
    with pytest.raises(ValueError, match="holds token id 300; the tokenizer has ids 0 to 256"):
        PretrainingDataset(prefix, "bytes", 5)[0]
    with pytest.raises(ValueError, match="seq_length: 1 is not a number above 1"):
        PretrainingDataset(prefix, "bytes", 1)


def test_rejected_answers_are_no_rows(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"chosen": "a good one", "rejected": "a bad one"}] * 3)
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    with pytest.raises(InputError, match="holds preference pairs"):
        PretrainingDataset(tmp_path / "s", "bytes", 8)
    with pytest.raises(InputError, match="holds preference pairs"):
        GPTDataLoader({"block_size": 4, "batch_size": 1}, "bytes", tmp_path / "s")


def test_it_goes_into_a_dataloader_and_a_model(tmp_path):
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, num_attention_heads=2, **sizes)).eval()
    write_store(tmp_path / "s", [[5, 6, 7, 8], [9, 10]])
    data = PretrainingDataset(tmp_path / "s", "bytes", 6)
    (batch,) = DataLoader(data, batch_size=2, num_workers=1)
    padded = model(**batch).loss
    alone = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in ([5, 6, 7, 8], [9, 10])]  # fmt: skip
    assert torch.allclose(padded, (3 * alone[0] + alone[1]) / 4, atol=1e-6)


def test_a_pickled_dataset_stays_of_its_generation(tmp_path):
    write_store(tmp_path, [[1, 2], [3]])
    data = pickle.dumps(IndexedDataset(tmp_path))
    append_documents(tmp_path, [[4, 5, 6]])
    assert [ids.tolist() for ids in pickle.loads(data)[:]] == [[1, 2], [3]]
    assert len(IndexedDataset(tmp_path)) == 3


def test_removed_documents_give_no_row(tmp_path):
    write_store(tmp_path / "s", [[1, 2, 256], [3, 4, 256], [5, 6, 256]])
    (tmp_path / "list").write_text("train:1\n")
    remove_documents(tmp_path / "s", documents_file=tmp_path / "list")
    rows = PretrainingDataset(tmp_path / "s", "bytes", 4, output="numpy")
    assert [row["input_ids"][:2].tolist() for row in (rows[0], rows[1])] == [[1, 2], [5, 6]]
    assert len(rows) == 2
