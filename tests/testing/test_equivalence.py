"""``assert_packed_equals_unpacked`` on isolating and on leaking models."""

import math
import re

import pytest

torch = pytest.importorskip("torch")

import numpy as np

from batchloom import SettingsError
from batchloom.testing import assert_packed_equals_unpacked, write_store
from batchloom.train import GPT, ModelSettings
from train.model_folders import CONFIGS
from train.runs import long_conversations


def random_documents(count=60, longest=40):
    rng = np.random.default_rng(0)
    return [[*rng.integers(0, 256, rng.integers(2, longest)).tolist(), 256] for _ in range(count)]


NO_CACHE = {"use_cache": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), random_documents())


def make_model(kind, **changes):
    import transformers

    name, sizes = CONFIGS[kind]
    config = getattr(transformers, name)(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("form", ["rows", "varlen"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_models_that_keep_documents_apart(store, kind, form):
    model = make_model(kind).eval()
    assert assert_packed_equals_unpacked(model, store, seq_len=64, form=form, arguments=NO_CACHE) < 1e-5
    assert model.training is False
    assert assert_packed_equals_unpacked(model.train(), store, form=form, arguments=NO_CACHE) < 1e-5
    assert model.training is True


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_a_module_is_called_as_users_call_it(store, form):
    with pytest.raises(AssertionError, match=r"see each other: .* use_cache is on \(give False\)"):
        assert_packed_equals_unpacked(make_model("llama"), store, seq_len=64, form=form)


def make_call(model, **settings):
    def compute_logits(batch):
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        return model(**{**inputs, "attention_mask": None, "use_cache": False, **settings}).logits

    return compute_logits


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("how", ["ones", "cache"])
def test_the_same_models_called_wrongly(store, kind, how):
    model = make_model(kind).eval()
    ones = torch.ones(4, 64, dtype=torch.int64)

    def compute_logits(batch):
        mask = ones[: len(batch["input_ids"]), :1].expand_as(batch["input_ids"])
        changed = {"attention_mask": mask} if how == "ones" else {"use_cache": None}
        return make_call(model, **changed)(batch)

    with pytest.raises(AssertionError) as caught:
        assert_packed_equals_unpacked(compute_logits, store, seq_len=64)
    message = str(caught.value)
    assert re.search(r"the loss of document \d+ \(its tokens 0 to \d+\) in row \d is", message)
    assert re.search(r"Other tokens in document \d+ .*, before it in the row, change it by", message)
    assert "attention_mask is given (with a mask of ones" in message
    assert "use_cache is on (give False)" in message


def test_a_leak_below_the_tolerance_is_seen_by_what_no_isolation_would_do(store):
    model = make_model("llama").eval()
    ones = torch.ones(4, 64, dtype=torch.int64)

    def faint(batch):
        mask = ones[: len(batch["input_ids"]), :1].expand_as(batch["input_ids"])
        return make_call(model, attention_mask=mask)(batch) * 1e-3

    with pytest.raises(AssertionError, match="0 of 32 documents are beyond the tolerance"):
        assert_packed_equals_unpacked(faint, store, seq_len=64)


def test_a_model_that_does_not_read_positions(store):
    class Deaf(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids, use_cache=False).logits

    with pytest.raises(AssertionError, match="does not read position_ids"):
        assert_packed_equals_unpacked(Deaf(make_model("llama")), store, seq_len=64)
    with pytest.raises(AssertionError, match="does not read position_ids"):
        assert_packed_equals_unpacked(make_model("mamba"), store, seq_len=64, arguments=NO_CACHE)


def test_positions_that_are_counted_along_the_row(store):
    """No neighbor is visible, and still the loss differs."""
    torch.manual_seed(0)
    ids, positions = torch.nn.Embedding(264, 16), torch.nn.Embedding(64, 16)

    def compute_logits(batch):
        row = torch.arange(batch["input_ids"].shape[1])
        return (ids(batch["input_ids"]) + positions(row) + positions(batch["position_ids"])) @ ids.weight.T

    with pytest.raises(AssertionError, match="No neighbour's tokens change it, so its position"):
        assert_packed_equals_unpacked(compute_logits, store, seq_len=64)


def test_the_reference_model(store):
    model = GPT(ModelSettings(layers=2, heads=2, width=32), 320)

    def compute_logits(batch):
        return model.logits(batch["input_ids"], batch["position_ids"])

    # Initially its layers add zero, so that a leak would have no effect.
    with pytest.raises(AssertionError, match="This model cannot be checked"):
        assert_packed_equals_unpacked(compute_logits, store)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("out.weight"):
                weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    assert assert_packed_equals_unpacked(compute_logits, store) < 1e-5


def test_documents_and_rows_without_loss_are_no_nan(tmp_path):
    docs = random_documents()
    # Every second document has no loss; the others have it in their second half.
    trained = [[n % 2 == 0 and at > len(d) // 2 for at in range(len(d))] for n, d in enumerate(docs)]
    store = write_store(tmp_path / "half", docs, trained=trained)
    assert assert_packed_equals_unpacked(make_model("llama"), store, seq_len=64, arguments=NO_CACHE) < 1e-5
    nothing = write_store(tmp_path / "none", docs, trained=[[0] * len(d) for d in docs])
    with pytest.raises(AssertionError, match="60 checked documents have no trained token"):
        assert_packed_equals_unpacked(make_model("llama"), nothing, seq_len=64, arguments=NO_CACHE)
    alone = write_store(tmp_path / "alone", [[1, 2, 3]])
    with pytest.raises(AssertionError, match="no row of 32 tokens holds two of them"):
        assert_packed_equals_unpacked(make_model("llama"), alone, arguments=NO_CACHE)


class AlwaysDrops(torch.nn.Module):
    """Model with dropout in every mode."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids):
        scores = self.model(input_ids, position_ids=position_ids, use_cache=False).logits
        return torch.nn.functional.dropout(scores)


def test_dropout_is_reported_and_taken_for_no_leak(store):
    model = make_model("gpt2")
    assert assert_packed_equals_unpacked(model.train(), store, seq_len=64, arguments=NO_CACHE) < 1e-5
    message = r"other scores each time it is called with the same batch.* \(call model.eval\(\) first\)"
    for drawing in (make_call(model.train()), AlwaysDrops(make_model("gpt2").eval())):
        with pytest.raises(AssertionError, match=message):
            assert_packed_equals_unpacked(drawing, store, seq_len=64)
    assert assert_packed_equals_unpacked(make_call(model.eval()), store, seq_len=64) < 1e-5


def call_model(model, batch):
    return model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (call_model, r"gives a CausalLMOutput\w*, and a tensor of scores \[4, 64, vocabulary\] is"),
        (lambda *args: (call_model(*args).logits,), "gives a tuple, and a tensor of scores"),
        (lambda *args: call_model(*args).logits[:, :-1], r"scores \[4, 63, 264\] for ids \[4, 64\]"),
        (lambda *args: call_model(*args).logits.sum(-1), r"scores \[4, 64\] for ids \[4, 64\]"),
        (lambda *args: call_model(*args).logits[..., :256], "holds id 256 and .* scores for 256 ids"),
    ],
)
def test_outputs_that_are_no_scores_are_reported(store, answer, message):
    model = make_model("llama").eval()
    with pytest.raises(AssertionError, match=message):
        assert_packed_equals_unpacked(lambda batch: answer(model, batch), store, seq_len=64)


def test_a_model_with_too_few_rows_is_reported(store):
    model = make_model("llama", vocab_size=200).eval()
    with pytest.raises(AssertionError, match=r"holds id \d+ and the model has 200 embeddings, from id 0"):
        assert_packed_equals_unpacked(model, store, seq_len=64, arguments=NO_CACHE)
    with pytest.raises(AssertionError, match="for ids up to 256 and positions up to"):
        assert_packed_equals_unpacked(make_call(model), store, seq_len=64)
    with pytest.raises(AssertionError, match=r"positions up to 63: .* or a smaller seq_len"):
        assert_packed_equals_unpacked(make_model("gpt2", n_positions=40), store, seq_len=64, arguments=NO_CACHE)


def test_conversations_that_are_all_longer_than_a_row(tmp_path):
    store = long_conversations(tmp_path)
    assert store.contents.conversations
    assert assert_packed_equals_unpacked(make_model("llama"), store, seq_len=64, arguments=NO_CACHE) < 1e-5


def test_rounding_of_half_precision_is_reported(store):
    model = make_model("llama").to(torch.bfloat16)
    with pytest.raises(AssertionError, match="in torch.bfloat16 that is rounding"):
        assert_packed_equals_unpacked(model, store, tolerance=1e-7, arguments=NO_CACHE)
    assert assert_packed_equals_unpacked(model.float(), store, arguments=NO_CACHE) < 1e-4


def test_weights_that_are_not_finite_are_reported(store):
    model = make_model("llama")
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(AssertionError, match="are not finite .* check the weights"):
        assert_packed_equals_unpacked(model, store, arguments=NO_CACHE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tolerance": math.nan},
        {"tolerance": -1.0},
        {"tolerance": math.inf},
        {"documents": 0},
        {"seq_len": 0},
    ],
)
def test_numbers_that_are_none_are_refused(store, wrong):
    (name,) = wrong
    with pytest.raises(SettingsError, match=f"{name}: "):
        assert_packed_equals_unpacked(make_model("llama"), store, **wrong, arguments=NO_CACHE)
