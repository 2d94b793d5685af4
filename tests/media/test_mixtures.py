"""Texts and documents with media in one plan: cuts, balance and resuming."""

import json

import numpy as np
import pytest

import batchloom
from batchloom import Edit, Mixture, PlanError
from batchloom.analysis import assign_step_ranks, sort_by_rank
from batchloom.plan import SourceSpec, compute_imbalance, deal_contiguous
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 256, "global_batch_size": 16, "output": "numpy"}
STEPS = 3


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of texts, of conversations with images, and of both."""
    folder = tmp_path_factory.mktemp("mixed")
    processor = save_processor(PROCESSORS["qwen2_vl"](max_pixels=28 * 28 * 32), folder / "processor")
    (folder / "pictures").mkdir()
    rng, rows = np.random.default_rng(3), []
    for number in range(60):
        sides = rng.integers(28, 300, 2)
        name = f"pictures/{number}.png"
        (folder / name).write_bytes(encode_image(make_image(*sides.tolist(), seed=number), "PNG"))
        rows.append({"messages": make_messages("<image> Who?", f"Cat {number}."), "images": [name]})
        if number % 4 == 0:
            rows.append({"messages": make_messages(f"Who is {number}?", "Nobody. " * (number % 7))})
    (folder / "talks.json").write_text(json.dumps(rows))
    texts = [{"text": f"Line {n}. " * int(rng.integers(1, 220))} for n in range(120)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = {"tokenizer": str(processor), "val_fraction": 0, "dedup": "none"}
    media = {"processor": str(processor)}
    batchloom.prepare(folder / "talks.json", out=folder / "seen", media=media, **settings)
    batchloom.prepare(folder / "texts.jsonl", out=folder / "text", **settings)
    sources = [str(folder / name) for name in ("talks.json", "texts.jsonl")]
    batchloom.prepare(sources, out=folder / "both", media=media, **settings)
    return {name: batchloom.open_store(folder / name) for name in ("seen", "text", "both")}


def make_mixture(stores, **options):
    named_stores = {name: stores[name] for name in ("seen", "text")}
    return Mixture({"seen": 0.6, "text": 0.4}, stores=named_stores, **options)


def test_texts_are_cut_and_media_are_left_out(stores):
    loader = batchloom.Loader(make_mixture(stores), **(SIZES | {"seq_len": 64}), steps=4)
    rows = loader.plan.rows(0, 64)
    cut = (rows.starts > 0) & (rows.sources == list(loader.plan.stores).index("text"))
    assert cut.any()
    with_media = rows.sources == list(loader.plan.stores).index("seen")
    full_lengths = stores["seen"].lengths.take(rows.documents[with_media])
    assert np.array_equal(rows.lengths[with_media], full_lengths)
    assert any("pixel_values" in batch for batch in loader)
    assert loader.plan.left_out().documents


def test_a_store_of_both_cuts_nothing(stores, caplog):
    long = stores["both"].lengths.slice(0, len(stores["both"])).max()
    sizes = SIZES | {"seq_len": int(long) - 1}
    loader = batchloom.Loader(stores["both"], **sizes)
    assert loader.plan.spec.overlong == "drop"
    next(iter(loader))
    (warning,) = [r.getMessage() for r in caplog.records if "leaves" in r.getMessage()]
    assert "a larger seq_len keeps them" in warning
    assert batchloom.inspect(stores["both"].path).overlong == "drop"


@pytest.mark.parametrize("rule", ["split", "truncate"])
def test_a_source_that_would_cut_media_is_refused_by_name(stores, rule):
    mixture = make_mixture(stores, sources={"seen": SourceSpec(overlong=rule)})
    with pytest.raises(PlanError, match=f"overlong='{rule}' .* of source 'seen' is never cut"):
        batchloom.Loader(mixture, **SIZES, steps=2)
    mixture = make_mixture(stores, sources={"text": SourceSpec(overlong=rule)})
    assert batchloom.Loader(mixture, **SIZES, steps=2, overlong="drop")[0]


def count_media_tokens(store, batch):
    return int((batch["input_ids"] == store.tokenizer.control["<|image_pad|>"]).sum())


def open_rank_loaders(data, world, **options):
    return [
        batchloom.Loader(data, **SIZES, steps=STEPS, balance=True, rank=r, world_size=world, **options)
        for r in range(world)
    ]


def sort_rows(batches):
    return sorted(row.tobytes() for batch in batches for row in batch["input_ids"])


@pytest.mark.slow
def test_ranks_have_about_the_same_media(stores):
    mixture, store = make_mixture(stores), stores["seen"]
    unbalanced = batchloom.Loader(mixture, **SIZES, steps=STEPS)
    plain = [batchloom.Loader(mixture, **SIZES, steps=STEPS, rank=rank, world_size=4) for rank in range(4)]
    loaders = open_rank_loaders(mixture, 4)
    dealt_most, plain_most = [], []
    for step in range(STEPS):
        batches = [loader[step] for loader in loaders]
        # Balancing changes neither the rows of a step nor their number per rank.
        assert sort_rows(batches) == sort_rows([unbalanced[step]])
        tokens = [count_media_tokens(store, batch) for batch in batches]
        for batch, count in zip(batches, tokens, strict=True):
            # Features go where their tokens go.
            grids = batch.get("image_grid_thw", np.zeros((0, 3), np.int64))
            assert int(grids.prod(axis=1).sum()) == 4 * count
        dealt_most.append(max(tokens) * 4 / sum(tokens))
        tokens = [count_media_tokens(store, loader[step]) for loader in plain]
        plain_most.append(max(tokens) * 4 / sum(tokens))
        imbalance = loaders[0].imbalance(step)
        assert dealt_most[-1] <= imbalance.actual + 1e-12 <= imbalance.in_order + 1e-12
    assert np.mean(dealt_most) < 1.2 < 1.35 < np.mean(plain_most)


def test_costs_of_media_tokens_even_out_ranks(stores):
    """Costs that count media tokens give ranks more even loads."""
    loader = batchloom.Loader(make_mixture(stores), **SIZES, steps=STEPS, balance=True)
    plan = loader.plan
    uneven, even = [], []
    for step in range(STEPS):
        costs = loader.feed.costs.of(plan, plan.rows(*plan.positions_of(step)))
        assert costs.shape == (2, 16)
        uneven.append(compute_imbalance(costs[1], deal_contiguous(16, 4), 4))
        even.append(compute_imbalance(costs[1], assign_step_ranks(loader, step, 4), 4))
    assert np.mean(even) < np.mean(uneven)


def test_a_store_without_media_has_one_cost_per_row(stores):
    loader = batchloom.Loader(stores["text"], **SIZES, balance=True)
    rows = loader.plan.rows(0, 16)
    assert loader.feed.costs.of(loader.plan, rows).shape == (16,)


def test_analysis_knows_the_ranks(stores):
    mixture = make_mixture(stores)
    loaders = open_rank_loaders(mixture, 4)
    rank_of_row = assign_step_ranks(loaders[0], 2, 4)
    rows = batchloom.Loader(mixture, **SIZES, steps=STEPS)[2]["input_ids"]
    order = sort_by_rank(loaders[0], 2, rank_of_row)
    for rank, loader in enumerate(loaders):
        assert np.array_equal(loader[2]["input_ids"], rows[order[rank_of_row[order] == rank]])
    sequences = batchloom.explain(loaders[0], 2, rank=1, world_size=4)
    assert [sequence.position - 32 for sequence in sequences] == order[rank_of_row[order] == 1].tolist()


@pytest.mark.slow
def test_a_run_resumes_on_other_ranks(stores):
    mixture = make_mixture(stores)
    loaders = open_rank_loaders(mixture, 2)
    for loader in loaders:
        iterator = iter(loader)
        for _ in range(1):
            next(iterator)
    state = loaders[0].state_dict()
    assert state == loaders[1].state_dict()
    reference = batchloom.Loader(mixture, **SIZES, steps=STEPS)
    resumed = open_rank_loaders(mixture, 4)
    for loader in resumed:
        loader.load_state_dict(state)
    for step, batches in zip(range(1, STEPS), zip(*resumed, strict=True), strict=True):
        assert sort_rows(batches) == sort_rows([reference[step]])


def test_banned_documents_cost_no_media(stores):
    loader = batchloom.Loader(make_mixture(stores), **SIZES, steps=STEPS, balance=True)
    plan = loader.plan
    before = loader.feed.costs.media_tokens(plan, plan.rows(0, 16))
    everything = list(range(len(stores["seen"])))
    loader.edit(Edit(step=0, ban={"seen": everything}))
    after = loader.feed.costs.media_tokens(loader.plan, loader.plan.rows(0, 16))
    assert before.sum() > after.sum() == 0
