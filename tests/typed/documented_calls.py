"""Calls of the documentation, as a user's type checker sees them; nothing here runs."""

from typing import assert_type

import torch

import batchloom
from batchloom import Edit, Loader, Mixture, Store, open_store
from batchloom.batches import Batch
from batchloom.plan import Stage
from batchloom.preparation import convert


def prepare_data(texts: list[str], rows: list[dict[str, str]]) -> None:
    result = batchloom.prepare("corpus/", out="store", val_fraction=0.1)
    assert_type(result.counts.documents, int)
    batchloom.prepare(["a.jsonl", "b.jsonl"], out="store", tokenizer="gpt2", dedup="near", clean=["html"])
    batchloom.prepare(rows, out="store", mapping={"text": "body"})
    batchloom.prepare(iter(texts), out="store")
    convert("a.csv", out="a.parquet")


def open_stores() -> Mixture:
    web, code = open_store("stores/web"), open_store("stores/code", generation=2)
    assert_type(web, Store)
    assert_type(web.fingerprint, str)
    Mixture(stores={"web": web}, weights="size", temperature=2, most_epochs=4)
    return Mixture(
        {"web": 0.7, "code": 0.3},
        stores={"web": web, "code": code},
        exhausted="redistribute",
        stages=[Stage(step=6, weights={"web": 0.5, "code": 0.5})],
    )


def train(model: torch.nn.Module, mixture: Mixture) -> None:
    loader = Loader(mixture, seq_len=2048, global_batch_size=8, steps=40, form="varlen", output="torch")
    Loader(
        open_store("store"),
        seq_len=64,
        global_batch_size=4,
        block=64,
        dtype="int32",
    )
    for batch in loader:
        assert_type(batch, Batch)
        assert_type(batch["max_length_q"], int)
        assert_type(batch.step, int)
        ids: torch.Tensor = batch["input_ids"]
        model(ids, labels=batch["labels"])
        for part in batch.to("cpu").split(2):
            assert_type(part, Batch)
    loader.load_state_dict(loader.state_dict())
    loader.edit(Edit(step=loader.first_editable_step, ban={"web": [17]}, note="takedown"))
    assert_type(loader[7], Batch)
    assert_type(len(loader), int)
