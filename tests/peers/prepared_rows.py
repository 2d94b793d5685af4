"""What batchloom makes of records, in the columns of the peers."""

from pathlib import Path
from typing import Any

import numpy as np

import batchloom
from batchloom.store import LabelledAnswers, PreferencePairs, Store
from peers.cases import COLUMNS, Case
from preparation.stores import write_jsonl


def prepare_rows(case: Case, tokenizer_folder: Path, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Prepare the records of a case and return the rows of the store, in the order of the records."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "in.jsonl", case.records)
    options = {"val_fraction": 0, "dedup": "none", "tokenizer": str(tokenizer_folder), **settings, **case.settings}
    result = batchloom.prepare(folder / "in.jsonl", out=folder / "store", **options)
    store = batchloom.open_store(result.path)
    if case.objective == "pairs":
        return list(PreferencePairs(store))
    if case.objective == "labels":
        return list(LabelledAnswers(store))
    if case.objective == "weighted":
        return [_read_weighted_document(store)]
    rows = [_read_document(store, number) for number in range(len(store))]
    if case.objective == "prompts":
        return [{"prompt_ids": row["input_ids"]} for row in rows]
    return rows


def _read_document(store: Store, number: int) -> dict[str, Any]:
    ids = store[number].ids
    trained = np.ones(ids.size, np.bool_)
    if store.masked:
        (trained,) = store.mask(np.array([number]), np.zeros(1, np.int64), np.array([ids.size]))
    return {"input_ids": ids.tolist(), "labels": np.where(trained, ids.astype(np.int64), -100).tolist()}


def _read_weighted_document(store: Store) -> dict[str, Any]:
    """Return the only document of a store with the weights that its batch has."""
    batch = batchloom.Loader(store, seq_len=512, global_batch_size=1, output="numpy")[0]
    size = store[0].ids.size
    return {name: batch[name][0][:size].tolist() for name in COLUMNS["weighted"]}
