"""DeepSpeed over gloo.

tests/analysis/compare checks the batches, losses and resume of ZeRO 2.
"""

from pathlib import Path

import pytest

from adapters.small_stores import make_small_store
from processes import run_two_ranks


@pytest.mark.slow
def test_every_stage_of_zero_learns_what_plain_torch_does(tmp_path):
    pytest.importorskip("deepspeed")
    store = make_small_store(tmp_path / "store")
    run_two_ranks(Path(__file__).with_name("deepspeed_worker.py"), store.path, tmp_path / "out")
