"""Trainer's model: packed documents do not see each other."""

import sys

import pytest
import torch
from torch.nn import functional

from batchloom import Loader
from batchloom.adapters.optimizer_step import make_parameter_groups
from batchloom.train import (
    GPT,
    ModelSettings,
    load_named_config,
    make_attention_mask,
    make_settings,
)
from batchloom.train.model import pad_vocabulary
from batchloom.train.model.gpt_model import make_flex_mask
from train.runs import small_store

SEQ_LEN = 48


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Store of documents that fit into a sequence, so that none is cut."""
    return small_store(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture
def model():
    gpt = GPT(ModelSettings(layers=2, heads=2, width=32), 320, seed=1)
    with torch.no_grad():
        for weight in gpt.parameters():
            # Freshly initialized layers add nothing to their input.
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return gpt


def compute_single_loss(store, scores):
    """Return the summed loss of all documents in single rows, and the trained tokens."""
    total, trained = 0.0, 0
    for number in range(len(store)):
        ids = torch.tensor(store[number].ids.astype("int64"))[None]
        positions = torch.arange(ids.shape[1])[None]
        logits = scores(ids, positions)[0, :-1].double()
        total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        trained += ids.shape[1] - 1
    return total, trained


def compute_packed_loss(store, scores):
    """Return the same from packed batches; the loss shifts labels as HF does."""
    total, trained = 0.0, 0
    for batch in Loader(store, seq_len=SEQ_LEN, global_batch_size=8, rank=0, world_size=1):
        logits = scores(batch["input_ids"], batch["position_ids"])[:, :-1].flatten(0, 1).double()
        labels = batch["labels"][:, 1:].flatten()
        total += float(functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        trained += int((labels != -100).sum())
    return total, trained


@torch.no_grad()
def test_packed_loss_is_the_loss_of_the_documents(store, model):
    single, trained = compute_single_loss(store, model.logits)
    packed, packed_trained = compute_packed_loss(store, model.logits)
    assert trained == packed_trained
    assert packed / trained == pytest.approx(single / trained, abs=1e-5)


@torch.no_grad()
def test_packed_loss_on_a_hugging_face_llama(store, monkeypatch):
    # A torchvision that does not match torch breaks the import; a text model needs none.
    monkeypatch.setitem(sys.modules, "torchvision", None)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.2,
        )
    ).eval()

    def scores(ids, positions):
        return llama(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits

    single, trained = compute_single_loss(store, scores)
    packed, packed_trained = compute_packed_loss(store, scores)
    assert trained == packed_trained
    assert packed / trained == pytest.approx(single / trained, abs=1e-5)


@torch.no_grad()
def test_the_models_own_loss_is_the_sum_over_trained_tokens(store, model):
    batch = Loader(store, seq_len=SEQ_LEN, global_batch_size=8, rank=0, world_size=1)[0]
    logits = model.logits(batch["input_ids"], batch["position_ids"])[:, :-1].flatten(0, 1)
    expected = functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
    assert float(model(**batch)) == pytest.approx(float(expected), rel=1e-6)


def test_no_gradient_crosses_a_span(model):
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 1]])
    labels = torch.full_like(ids, -100)
    labels[0, 5:9] = ids[0, 5:9]
    outputs = {}
    model.embedding.register_forward_hook(lambda _m, _i, out: outputs.update(out=out))
    model.embedding.weight.requires_grad_(False)
    model.embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_())
    model(ids, labels, positions).backward()
    touched = outputs["out"].grad[0].abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_has_the_same_mask():
    from torch.nn.attention.flex_attention import flex_attention

    generator = torch.Generator().manual_seed(4)
    restarts = torch.rand(2, 256, generator=generator) < 0.03
    restarts[:, 0] = True
    begins = torch.where(restarts, torch.arange(256), 0).cummax(1).values
    positions = torch.arange(256) - begins
    q, k, v = torch.randn(3, 2, 2, 256, 16, generator=generator).unbind(0)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=make_attention_mask(positions))
    actual = flex_attention(q, k, v, block_mask=make_flex_mask(positions))
    torch.testing.assert_close(actual, expected)


def test_weight_decay_is_for_matrices_only(model):
    decayed, undecayed = make_parameter_groups(model, 0.1)
    assert {w.dim() for w in decayed["params"]} == {2}
    assert {w.dim() for w in undecayed["params"]} == {1}
    assert undecayed["weight_decay"] == 0.0


def test_first_weights_follow_from_the_seed_alone():
    shape = ModelSettings(layers=1, heads=2, width=16)
    weights, same_seed, *other_weights = (
        GPT(shape, 64, seed).embedding.weight for seed in (5, 5, 6, -5, 5 + 2**32, 5 + 2**64, 2**128 - 1)
    )
    assert torch.equal(weights, same_seed)
    assert not any(torch.equal(weights, other) for other in other_weights)


@pytest.mark.parametrize(("name", "millions"), [("150M_1024", 150), ("250M_1024", 250)])
def test_names_state_the_size(name, millions):
    settings = make_settings(load_named_config(name), {})
    with torch.device("meta"):
        model = GPT(settings.model, pad_vocabulary(50_257))
    count = sum(weight.numel() for weight in model.parameters())
    assert count == pytest.approx(millions * 1e6, rel=0.05)
    assert settings.seq_len == 1024
