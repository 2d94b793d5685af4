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
from processes import run_python

CONSTRUCTORS = {
    "sft": lambda output: SFTDataset("in.jsonl", "bytes", output=output),
    "hub": lambda output: create_huggingface_dataset("in.jsonl", output=output),
    "one a row": lambda output: PretrainingDataset("s", "bytes", 8, output=output),
    "gpt": lambda output: GPTDataLoader({"block_size": 2, "batch_size": 1, "output": output}, "bytes", "s"),
}
WITHOUT_TORCH = """
from compat.test_array_output import CONSTRUCTORS
for kind, construct in CONSTRUCTORS.items():
    construct("numpy")
    try:
        construct("torch")
    except ImportError as error:
        print(kind, "needs torch" in str(error), sep=": ")
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    write_store("s", [[1, 2, 3]] * 9)


@pytest.mark.parametrize("kind", CONSTRUCTORS)
@pytest.mark.usefixtures("data")
def test_an_unknown_output_is_refused(kind):
    with pytest.raises(ValueError, match="output: 'trch' is not one of torch, numpy; did you mean"):
        CONSTRUCTORS[kind]("trch")


@pytest.mark.usefixtures("data")
def test_arrays_need_no_torch_and_tensors_do():
    done = run_python(WITHOUT_TORCH, missing=["torch"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{kind}: True" for kind in CONSTRUCTORS]
