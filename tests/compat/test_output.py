"""Tensors or numpy's arrays, in every door alike."""

import pytest

from batchloom.compat import (
    GPTDataLoader,
    PretrainingDataset,
    SFTDataset,
    create_huggingface_dataset,
)
from batchloom.testing import write_store
from preparation.stores import jsonl

DOORS = {
    "sft": lambda output: SFTDataset("in.jsonl", "bytes", output=output),
    "hub": lambda output: create_huggingface_dataset("in.jsonl", output=output),
    "one a row": lambda output: PretrainingDataset("s", "bytes", 8, output=output),
    "gpt": lambda output: GPTDataLoader({"block_size": 2, "batch_size": 1, "output": output}, "bytes", "s"),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_output_nobody_knows_is_refused(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    write_store("s", [[1, 2, 3]] * 9)
    with pytest.raises(ValueError, match="output: 'trch' is not one of torch, numpy; did you mean"):
        DOORS[door]("trch")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    DOORS[door]("numpy")
    with pytest.raises(ImportError, match="needs torch"):
        DOORS[door]("torch")
