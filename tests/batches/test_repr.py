"""What a loader, its plan and its batches say of themselves."""

from batchloom import Loader
from batchloom.testing import write_store


def test_a_line_says_what_it_is(tmp_path):
    store = write_store(tmp_path / "store", [[1] * 30] * 40)
    loader = Loader(
        store, seq_len=64, global_batch_size=8, steps=5, rank=1, world_size=2, output="numpy"
    )
    assert repr(loader[3]) == (
        "Batch(step 3: input_ids: int64[4, 64], labels: int64[4, 64], position_ids: int64[4, 64])"
    )
    assert "5 steps of 8 sequences of 64 tokens, packing best_fit, seed 0" in repr(loader.plan)
    assert repr(loader).endswith(f"{loader.plan!r}, rank 1 of 2)")
    assert loader.origin in repr(loader)
