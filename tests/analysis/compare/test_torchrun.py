"""Every example under torchrun, as the first line of its file says."""

import subprocess
import sys

import pytest

from adapters.small_stores import make_small_store
from processes import find_free_port

# Those of preferences need data of their own, and Ray starts its own workers.
EXAMPLES = (
    *("pytorch", "fsdp2", "fsdp2_sft", "hf_trainer", "sft_trainer", "with_accelerate", "with_deepspeed"),
    *("with_lightning", "with_megatron"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("store") / "s")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_under_torchrun(store, tmp_path, name, ranks):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", find_free_port()]
    sizes = ["--steps", 2, "--seq-len", 64, "--global-batch-size", 2, "--batch-size", 1]
    words = [*launch, "-m", f"batchloom.examples.{name}", store.path, tmp_path / "out", *sizes]
    result = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=180, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-4000:]
