"""DeepSpeed over gloo; the batches and losses of ZeRO 2, and its resume, are shown in tests/analysis/compare."""

from pathlib import Path

import pytest

from adapters.small import small_store
from processes import run_two_ranks


@pytest.mark.slow
def test_every_stage_of_zero_learns_what_plain_torch_does(tmp_path):
    pytest.importorskip("deepspeed")
    store = small_store(tmp_path / "store")
    run_two_ranks(Path(__file__).with_name("deepspeed_worker.py"), store.path, tmp_path / "out")
