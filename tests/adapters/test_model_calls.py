"""``model(**batch)`` of transformers' models: equal to single documents, or refused."""

import itertools
from contextlib import suppress

import numpy as np
import pytest
import torch

import batchloom
from adapters.tiny_models import make_tiny_model
from batchloom.batches import add_dense_mask
from batchloom.core.errors import TrainError
from batchloom.testing import write_store

transformers = pytest.importorskip("transformers")

SIZES = {"seq_len": 48, "global_batch_size": 2}
# What a call adds to the batch: as users write it, and what separates documents in most families.
CALLS = [{}, {"use_cache": False}]
# Families that this suite names: right with use_cache=False, right with a mask alone, and neither.
READS_POSITIONS = ("llama", "qwen2", "gpt2", "mistral", "gemma3_text")
NEEDS_MASK, NEVER_RIGHT = ("gpt_oss", "falcon"), ("falcon_mamba",)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(3)
    documents = [rng.integers(3, 90, rng.integers(6, 20)).tolist() for _ in range(40)]
    return write_store(tmp_path_factory.mktemp("data") / "store", documents)


@torch.no_grad()
def measure_difference(model, batch, **arguments):
    """Return the largest difference of a logit to those of the documents alone."""
    logits = model(**batch, **arguments).logits
    differences = []
    for row, position_ids in enumerate(batch["position_ids"]):
        starts = [*torch.nonzero(position_ids == 0).flatten().tolist(), len(position_ids)]
        for start, stop in itertools.pairwise(starts):
            if (batch["labels"][row, start + 1 : stop] == -100).all():
                continue  # padding
            alone = model(input_ids=batch["input_ids"][row : row + 1, start:stop]).logits
            differences.append((logits[row, start:stop] - alone[0]).abs().max())
    assert len(differences) > len(logits), "no row holds several documents"
    return float(max(differences))


@pytest.mark.parametrize("family", READS_POSITIONS)
def test_a_call_with_the_cache_is_refused_with_the_call_that_works(store, family):
    model = make_tiny_model(family).train()
    batch = batchloom.Loader(store, **SIZES)[0]
    with pytest.raises(TrainError, match=r"see each other .* call model\(\*\*batch, use_cache=False\)\. To let"):
        model(**batch)
    assert all(module.training for module in model.modules())
    model.eval()
    assert measure_difference(model, batch, use_cache=False) < TOLERANCE
    model.config.use_cache = False
    assert measure_difference(model, batch) < TOLERANCE


def test_a_mask_of_ones_is_refused(store):
    model = make_tiny_model("llama")
    batch = batchloom.Loader(store, **SIZES)[0]
    with pytest.raises(TrainError, match=r"use_cache=False\) without a mask"):
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False)


@pytest.mark.parametrize("family", NEEDS_MASK)
def test_a_family_that_ignores_positions_is_refused_with_the_mask_that_works(store, family):
    model = make_tiny_model(family)
    batch = batchloom.Loader(store, **SIZES)[0]
    with pytest.raises(TrainError, match=r"add_dense_mask\(batch, config=model\.config") as refusal:
        model(**batch, use_cache=False)
    additive = "float32" if "additive='float32'" in str(refusal.value) else None
    masked = add_dense_mask(batch, config=model.config, additive=additive)
    assert measure_difference(model, masked, use_cache=False) < TOLERANCE


@pytest.mark.parametrize("family", NEVER_RIGHT)
def test_a_recurrent_family_is_refused_but_for_single_documents(store, family):
    model = make_tiny_model(family)
    with pytest.raises(TrainError, match=r"Loader\(packing='none'\)"):
        model(**batchloom.Loader(store, **SIZES)[0])
    single = batchloom.Loader(store, **SIZES, packing="none")[0]
    assert model(**single).loss.isfinite()


def test_rows_of_single_documents_pass_with_the_cache(store):
    model = make_tiny_model("llama")
    assert model(**batchloom.Loader(store, **SIZES, packing="none")[0]).loss.isfinite()


def test_documents_may_see_each_other_without_positions(store):
    model = make_tiny_model("llama")
    batch = batchloom.Loader(store, **SIZES)[0]
    assert model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.isfinite()


def test_generation_is_not_checked(store):
    model = make_tiny_model("llama")
    batchloom.Loader(store, **SIZES)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).shape[1] > 3


def test_an_inner_model_is_checked_if_it_is_called_itself(store):
    model = make_tiny_model("llama")
    batch = batchloom.Loader(store, **SIZES)[0]
    with pytest.raises(TrainError, match="LlamaModel"):
        model.model(batch["input_ids"], position_ids=batch["position_ids"])
    single = batchloom.Loader(store, **SIZES, packing="none")[0]
    assert model.model(single["input_ids"], position_ids=single["position_ids"])[0].isfinite().all()


def test_the_flat_form_is_checked(store):
    batch = batchloom.Loader(store, **SIZES, form="varlen")[0]
    model = make_tiny_model("llama")
    with pytest.raises(TrainError, match="see each other"):
        model(**batch)
    assert measure_difference(model, batch, use_cache=False) < TOLERANCE


def judge_call(model, batch, arguments):
    """Return whether a call is right, silently wrong, or refused."""
    try:
        difference = measure_difference(model, batch, **arguments)
    except Exception:  # noqa: BLE001 - of batchloom, or of a model that does not take the batch
        return "refused"
    return "right" if difference < TOLERANCE else f"wrong by {difference}"


@pytest.mark.slow
def test_every_family_is_right_or_refused(store):
    batch = batchloom.Loader(store, **SIZES)[0]
    verdicts = {}
    for family in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # Sizes that are none for a family are errors of many kinds.
        with suppress(Exception):
            model = make_tiny_model(family)
            model(input_ids=batch["input_ids"][:, :8])
            verdicts[family] = [judge_call(model, batch, arguments) for arguments in CALLS]
    assert {family: calls for family, calls in verdicts.items() if not {*calls} <= {"right", "refused"}} == {}
    assert sum("right" in calls for calls in verdicts.values()) > 80
    assert len(verdicts) > 120
