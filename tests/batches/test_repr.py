"""Representations of loaders, plans, batches and mixtures."""

from batchloom import Loader, Mixture, open_store, stream
from batchloom.testing import write_store
from lane_plans import make_lane_plan


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


def test_a_plan_of_lanes_names_its_lanes(tmp_path):
    (tmp_path / "a.txt").write_text("one line of text\n" * 200)
    sizes = {"seq_len": 16, "global_batch_size": 4, "steps": 3}
    kept_stream = stream(
        tmp_path / "a.txt",
        tokenizer="bytes",
        split_on="line",
        val_fraction=0,
        workers=0,
        lanes=1,
        keep=tmp_path / "kept",
        **sizes,
    )
    list(Loader(kept_stream, output="numpy"))
    kept_stream.finish(workers=1)
    loader = Loader(make_lane_plan(open_store(tmp_path / "kept"), **sizes), output="numpy")
    assert repr(loader.plan) == ("LanePlan(1 lane, 3 steps of 4 sequences of 16 tokens, packing best_fit, seed 0)")
