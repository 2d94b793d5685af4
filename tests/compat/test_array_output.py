"""The ``output`` setting of all entry points: tensors or numpy arrays."""

import pytest

from batchloom.compat import (
    GPTDataLoader,
    PretrainingDataset,
    SFTDataset,
    create_huggingface_dataset,
)
from batchloom.testing import write_store
from preparation.stores import write_jsonl

CONSTRUCTORS = {
    "sft": lambda output: SFTDataset("in.jsonl", "bytes", output=output),
    "hub": lambda output: create_huggingface_dataset("in.jsonl", output=output),
    "one a row": lambda output: PretrainingDataset("s", "bytes", 8, output=output),
    "gpt": lambda output: GPTDataLoader({"block_size": 2, "batch_size": 1, "output": output}, "bytes", "s"),
}


@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_an_unknown_output_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    write_store("s", [[1, 2, 3]] * 9)
    with pytest.raises(ValueError, match="output: 'trch' is not one of torch, numpy; did you mean"):
        CONSTRUCTORS[kind]("trch")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    CONSTRUCTORS[kind]("numpy")
    with pytest.raises(ImportError, match="needs torch"):
        CONSTRUCTORS[kind]("torch")
