"""Representations of loaders, plans, batches and mixtures."""

from batchloom import Loader, Mixture
from batchloom.testing import write_store


def test_a_line_says_what_it_is(tmp_path):
    store = write_store(tmp_path / "store", [[1] * 30] * 40)
    loader = Loader(store, seq_len=64, global_batch_size=8, steps=5, rank=1, world_size=2, output="numpy")
    assert repr(loader[3]) == (
        "Batch(step 3: input_ids: int64[4, 64], labels: int64[4, 64], position_ids: int64[4, 64])"
    )
    assert "5 steps of 8 sequences of 64 tokens, packing best_fit, seed 0" in repr(loader.plan)
    assert repr(loader).endswith(f"{loader.plan!r}, rank 1 of 2)")
    assert loader.origin in repr(loader)


def test_a_mixture_names_weights_and_tokens(tmp_path):
    stores = {name: write_store(tmp_path / name, [[1] * 30] * 40) for name in ("web", "code")}
    mixture = Mixture({"web": 0.7, "code": 0.3}, stores=stores, exhausted="stop")
    assert repr(mixture) == (
        "Mixture({'web': 0.7, 'code': 0.3} in tokens of web (1,200 tokens), code (1,200 tokens), exhausted stop)"
    )
    assert repr(stores["web"][3]) == f"StoredDocument(number=3, ids={stores['web'][3].ids!r})"
    assert repr(Mixture("size", stores=stores)).startswith("Mixture('size' in tokens of web (")
