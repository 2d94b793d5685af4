"""Megatron's reader reads every subset and shard that ``prepare`` writes."""

import pytest

import batchloom
from oracles import import_megatron


# Loading Megatron takes seconds; the fast tier reads files of the same writer in tests/store/test_megatron.py.
@pytest.mark.slow
def test_every_prepared_shard_is_a_megatron_prefix(tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(f"line {n} of a text" * (n % 5 + 1) for n in range(300)))
    batchloom.prepare(
        tmp_path / "in.txt",
        out=tmp_path / "s",
        tokenizer="train:300",
        split_on="line",
        tokens_per_shard=500,
        val_fraction=0.2,
        test_fraction=0.1,
    )
    for split in ("train", "val", "test"):
        store = batchloom.open_store(tmp_path / "s", split)
        assert len(store.shards) > (split == "train")
        theirs = []
        for path in sorted((tmp_path / "s" / split).glob("*.idx")):
            dataset = import_megatron("indexed_dataset").IndexedDataset(str(path.with_suffix("")))
            theirs += [dataset[n].tolist() for n in range(len(dataset))]
        assert theirs == [store[n].ids.tolist() for n in range(len(store))]
