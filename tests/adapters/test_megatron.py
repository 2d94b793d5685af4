"""Megatron's processes, readers and counters over stores and plans."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import batchloom
from batchloom import Edit, InputError, StateError
from batchloom.testing import write_store
from oracles import build_gpt_dataset, import_megatron as theirs
from processes import make_rank_environments, start_processes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import num_microbatches_calculator as calc
    from megatron.core.utils import get_batch_on_this_cp_rank

    from batchloom.adapters import megatron

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"seq_len": 64, "global_batch_size": 8, "steps": 3, "labels": "shifted"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 256, rng.integers(1, 90)).tolist() for _ in range(300)]
    return write_store(tmp_path_factory.mktemp("store") / "s", documents, documents_per_shard=120)


@pytest.fixture(scope="module")
def ranks(store, tmp_path_factory):
    """Results of two ranks for all layouts."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("megatron_worker.py")
    with start_processes(worker, store.path, folder, environments=make_rank_environments()[:1]) as (process,):
        result = process.wait()
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1)]


def list_expected(store, rank=0, world_size=1):
    loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=world_size)
    return [part for batch in loader for part in batch.split(2)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for micro_batch, part in zip(actual, expected, strict=True):
        trained = part["labels"] != -100
        assert torch.equal(micro_batch["tokens"], part["input_ids"])
        assert torch.equal(micro_batch["position_ids"], part["position_ids"])
        assert torch.equal(micro_batch["loss_mask"], trained.float())
        assert torch.equal(micro_batch["labels"][trained], part["labels"][trained])
        assert (micro_batch["labels"][~trained] == 0).all()


def test_of_tensor_parallel_ranks_one_reads_and_both_have_the_same(store, ranks):
    for result in ranks:
        assert_same(result["tensor"]["batches"], list_expected(store))
    assert ranks[0]["tensor"]["reads"] > 0
    assert ranks[1]["tensor"]["reads"] == 0


def test_a_gpt_cut_over_two_ranks_sees_packed_documents_one_by_one(ranks):
    for result in ranks:
        packed, alone = result["tensor"]["losses"]
        assert packed == pytest.approx(alone, rel=1e-5)


def test_data_parallel_ranks_have_the_plain_loaders_shares(store, ranks):
    for rank, result in enumerate(ranks):
        assert_same(result["data"]["batches"], list_expected(store, rank, 2))


def test_the_first_and_the_last_pipeline_stage_read(store, ranks):
    for result in ranks:
        assert_same(result["pipeline"]["batches"], list_expected(store))


def test_stages_between_read_nothing_and_count_along(store, ranks):
    for rank, result in enumerate(ranks):
        ends, between = result["interleaved"]["chunks"][:: -1 if rank else 1]
        assert_same(ends, list_expected(store))
        assert [set(micro.values()) for micro in between] == [{None}] * len(ends)


def test_context_parallel_ranks_have_megatrons_slices(store, ranks, monkeypatch):
    from megatron.core import parallel_state

    for rank, result in enumerate(ranks):
        monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        slices = [get_batch_on_this_cp_rank(dict(part)) for part in list_expected(store)]
        assert_same(result["context"]["batches"], slices)


def test_a_bad_set_up_is_refused(ranks):
    for result in ranks:
        early, labels, larger_world, ranks_differ, counter, packed = result["refusals"]
        assert "call initialize_model_parallel" in early
        assert "labels is 'aligned' and must be 'shifted'" in labels
        assert "place is (RankPlacement(rank=0, world_size=4" in larger_world
        assert "seed is 0 on rank 0 and 1 on rank 1" in ranks_differ
        assert "Step 0 of the plan is 2 micro-batches of 2 rows per rank, 8 sequences" in counter
        assert "gives 4 of 2, 16 in total" in counter
        assert "Rows are packed ('best_fit'), and Megatron's models let" in packed
        assert "attention_mask=True" in packed


@pytest.mark.parametrize("layout", ["tensor", "data", "pipeline", "interleaved"])
def test_iterators_begin_at_the_step_of_their_loader_on_every_rank(store, ranks, layout):
    for rank, result in enumerate(ranks):
        share = (rank, 2) if layout == "data" else (0, 1)
        remaining = list_expected(store, *share)
        remaining = remaining[len(remaining) // 3 :]
        for batches in result[layout]["apart"]:
            assert len(batches) == len(remaining)
            if batches[0]["tokens"] is not None:
                assert_same(batches, remaining)
    assert ranks[0][layout]["place"] == ranks[1][layout]["place"]


def test_consumed_samples_are_the_position_also_where_the_batch_size_changed(store):
    loader = batchloom.Loader(store, **{**SIZES, "steps": 9})
    loader.edit(Edit(step=3, global_batch_size=16))
    assert [megatron.count_consumed_samples(loader, step) for step in (0, 3, 4)] == [0, 24, 40]
    for step in (2, 5):
        resumed = batchloom.Loader(store, **{**SIZES, "steps": 9})
        resumed.edit(Edit(step=3, global_batch_size=16))
        assert megatron.resume_from_samples(resumed, megatron.count_consumed_samples(loader, step)) == step
        assert next(iter(resumed)).step == step
    for inside in (25, "8", -8):
        with pytest.raises(StateError, match=r"inside step 3, .*from 24 or 40|is not a number"):
            megatron.resume_from_samples(loader, inside)
    end = megatron.count_consumed_samples(loader, 9)
    assert megatron.resume_from_samples(loader, end) == 9
    with pytest.raises(StateError, match=f"{end + 16} is past the end of the plan, which has no step 9"):
        megatron.resume_from_samples(loader, end + 16)


@pytest.mark.parametrize("ramp", [(8, 8, 100), (8, 4, 7), (2, 2, 1000)])
def test_a_rampup_becomes_the_edits_that_megatrons_calculator_makes(store, ramp):
    loader = batchloom.Loader(store, **{**SIZES, "global_batch_size": ramp[0], "steps": 200})
    for edit in megatron.make_rampup_edits(ramp, 32):
        loader.edit(edit)
    calculator = calc.RampupBatchsizeNumMicroBatchesCalculator(32, 1, 1, False, 1, *ramp)
    for step in range(150):
        calculator.update(megatron.count_consumed_samples(loader, step), consistency_check=False)
        assert loader.plan.spec_at(step).global_batch_size == calculator.current_global_batch_size
    for wrong in ((8, 5, 100), (32, 8, 100), (8, 8, 0)):
        with pytest.raises(InputError, match="does not lead to global_batch_size 32"):
            megatron.make_rampup_edits(wrong, 32)
    # Megatron passes its arguments as strings; a ramp over infinite samples never ends.
    for wrong in (("8", "8", "100"), (8, 8, float("inf")), (8, 8)):
        with pytest.raises(InputError, match="not three whole numbers: START INCREMENT SAMPLES"):
            megatron.make_rampup_edits(wrong, 32)


def test_gpt_dataset_takes_the_shards_as_a_blend_by_tokens(store, tmp_path):
    import torch.distributed as dist

    utils = theirs("utils")
    blend = utils.get_blend_from_list(megatron.list_megatron_prefixes(store))
    assert len(blend[0]) == 3
    assert sum(blend[1]) == store.tokens

    dist.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        samples = store.tokens // 65
        dataset = build_gpt_dataset(blend, tmp_path, seq_len=64, samples=samples)
        blended = np.concatenate([dataset[n]["tokens"].numpy() for n in range(samples)])
    finally:
        dist.destroy_process_group()
    stored = np.concatenate([document.ids for document in store])
    # Each token appears about as often as in the store; shards leave a few tokens over at their ends.
    blended_counts, store_counts = np.bincount(blended, minlength=256), np.bincount(stored, minlength=256)
    assert np.abs(blended_counts - store_counts).sum() < 0.1 * len(stored)


def test_stores_that_megatrons_readers_would_train_wrongly_on_are_refused(tmp_path):
    weighted = write_store(tmp_path / "weighted", [[1, 2, 3], [4, 5]], trained=[[1, 0.5, 1], [1, 1]])
    with pytest.raises(InputError, match="has loss weights, which Megatron's readers ignore"):
        megatron.list_megatron_prefixes(weighted)
    masked = write_store(tmp_path / "masked", [[1, 2, 3], [4, 5]], trained=[[1, 0, 1], [1, 1]])
    with pytest.raises(InputError, match="1 of 5 tokens that are not to be trained"):
        megatron.list_megatron_prefixes(masked)
