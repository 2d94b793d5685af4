"""``model(**batch)`` of transformers' models: equal to single documents, or refused.

Labels are shifted once, or the call is refused.
"""

import itertools
from contextlib import suppress

import numpy as np
import pytest
import torch

import batchloom
from adapters.tiny_models import make_tiny_model
from batchloom.batches import add_dense_mask
from batchloom.batches.forms import to_shifted
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
from processes import run_python

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
    """Return the largest difference of a logit to those of the documents alone.

    It is relative to the largest logit, as errors of rounding grow with it.
    """
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
    return float(max(differences)) / max(1.0, float(logits.abs().max()))


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


LATE_MODEL = """
import sys, batchloom, torch
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
loader = batchloom.Loader(write_store("s", [[n % 90 + 3] * 9 for n in range(40)]), seq_len=48, global_batch_size=2)
batch = loader.batch(0)
assert "transformers" not in sys.modules
import transformers
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=320, **sizes))
try:
    model(**batch)
except TrainError as error:
    print(error)
"""


def test_a_model_whose_library_is_imported_after_the_batch_was_taken_is_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_python(LATE_MODEL)
    assert "see each other" in result.stdout, result.stderr


def test_positional_arguments_are_checked(store):
    model, batch = make_tiny_model("llama"), batchloom.Loader(store, **SIZES)[0]
    ids, positions = batch["input_ids"], batch["position_ids"]
    with pytest.raises(TrainError, match="see each other"):
        model(ids, torch.ones_like(ids), position_ids=positions, use_cache=False)
    mask = add_dense_mask(batch)["attention_mask"]
    assert model(ids, mask, position_ids=positions, use_cache=False).logits.isfinite().all()


def test_a_compiled_model_is_checked(store):
    model, batch = make_tiny_model("llama"), batchloom.Loader(store, **SIZES)[0]
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(TrainError, match="LlamaForCausalLM"):
        compiled(**batch)
    assert measure_difference(compiled, batch, use_cache=False) < TOLERANCE


def test_gradient_checkpointing_drops_the_cache(store):
    model, batch = make_tiny_model("llama").train(), batchloom.Loader(store, **SIZES)[0]
    model.activation_checkpointing_enable()
    loss = model(**batch).loss
    assert loss.item() == pytest.approx(model(**batch, use_cache=False).loss.item(), abs=1e-6)
    model.eval()
    with pytest.raises(TrainError, match="see each other"):
        model(**batch)


def test_two_documents_that_fill_a_row_are_checked_without_labels(store):
    model, ids = make_tiny_model("llama"), torch.arange(5, 45)[None]
    positions = torch.cat([torch.arange(20), torch.arange(20)])[None]
    batchloom.Loader(store, **SIZES)
    with pytest.raises(TrainError, match="see each other"):
        model(input_ids=ids, position_ids=positions)
    padded = ids.clone()
    padded[:, 20:] = 2
    assert model(input_ids=padded, position_ids=positions).logits.isfinite().all()


def test_calls_that_hold_no_packed_rows_are_untouched(store, caplog):
    batchloom.Loader(store, **SIZES)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    classifier = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(vocab_size=320, pad_token_id=0, num_labels=2, **config)
    ).eval()
    ids = torch.arange(5, 25)[None]
    assert classifier(input_ids=ids, position_ids=torch.arange(20)[None], labels=torch.tensor([1])).loss.isfinite()
    packed = torch.cat([torch.arange(10), torch.arange(10)])[None]
    # One output of the row says nothing about its documents.
    assert classifier(input_ids=ids, position_ids=packed).logits.shape == (1, 2)
    assert "cannot be tried with two short documents" in caplog.text


def test_the_state_of_a_run_is_unchanged(store):
    batch = batchloom.Loader(store, **SIZES)[0]
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=320, attention_dropout=0.5, **config)
    ).train()
    model.lm_head.eval()
    torch.manual_seed(0)
    first = model(**batch, use_cache=False).loss
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(model(**batch, use_cache=False).loss, first)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()].count(False) == 1


def test_layers_that_begin_as_zeros_are_tried_again_when_they_were_trained(store):
    """Without attention documents do not see each other, whatever the form of the call."""
    model = make_tiny_model("llama").train()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    batch = batchloom.Loader(store, **SIZES)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(**batch).loss.backward()
    optimizer.step()
    with pytest.raises(TrainError, match="see each other"):
        model(**batch)


def test_a_short_convolution_into_the_next_document_is_refused(store):
    """It reaches two tokens, and with weights of a beginning it changes them little."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=4, layer_types=["conv", "full_attention"]
    )
    model = transformers.Lfm2ForCausalLM(config).eval()
    with pytest.raises(TrainError, match="see each other"):
        model(**batchloom.Loader(store, **SIZES)[0], use_cache=False)


def test_an_output_layer_of_zeros_is_tried_again(store):
    model, batch = make_tiny_model("llama"), batchloom.Loader(store, **SIZES)[0]
    weight = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.zero_()
    assert model(**batch).loss.isfinite()
    model.lm_head.weight.data.copy_(weight)
    with pytest.raises(TrainError, match="see each other"):
        model(**batch)


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_labels_that_the_model_would_shift_again_are_refused_with_the_call_that_works(store, form):
    model = make_tiny_model("llama").train()
    shifted = batchloom.Loader(store, **SIZES, form=form, labels="shifted")[0]
    with pytest.raises(TrainError, match=r"shift them again\. Call model\(\*\*batch, shift_labels=batch\['labels'\]"):
        model(**shifted, use_cache=False)
    assert all(module.training for module in model.modules())
    aligned = batchloom.Loader(store, **SIZES, form=form)[0]
    loss = model(**aligned, use_cache=False).loss
    assert torch.equal(model(**shifted, shift_labels=shifted["labels"], use_cache=False).loss, loss)


def test_a_converted_batch_is_checked_without_positions_too(store):
    model, batch = make_tiny_model("gpt2"), to_shifted(batchloom.Loader(store, **SIZES, packing="none")[0])
    with pytest.raises(TrainError, match="shift them again"):
        model(input_ids=batch["input_ids"], labels=batch["labels"])


def test_a_model_that_does_not_shift_takes_shifted_labels(store):
    batch = batchloom.Loader(store, **SIZES, packing="none", labels="shifted")[0]
    model = make_tiny_model("bart")
    inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    assert model(**inputs).loss.isfinite()


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
