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
    rows = [_read_document(store, number) for number in range(len(store))]
    if case.objective == "prompts":
        return [{"prompt_ids": row["input_ids"]} for row in rows]
    return [{name: row[name] for name in COLUMNS[case.objective]} for row in rows]


def _read_document(store: Store, number: int) -> dict[str, Any]:
    ids = store[number].ids
    whole = np.array([number]), np.zeros(1, np.int64), np.array([ids.size])
    (trained,) = store.mask(*whole) if store.masked else [np.ones(ids.size, np.bool_)]
    row = {"input_ids": ids.tolist(), "labels": np.where(trained, ids.astype(np.int64), -100).tolist()}
    if getattr(store, "weighted", False):
        (weights,) = store.weights(*whole)
        row["loss_weights"] = np.where(trained, weights, 0).tolist()
    return row
