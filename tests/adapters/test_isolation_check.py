"""Adapters refuse models that ignore position_ids or lose their window."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from adapters.small_stores import make_small_store
from adapters.test_hugging_face import make_trainer
from batchloom import Loader
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.adapters.accelerate import require_isolation
from batchloom.adapters.isolation_check import check_no_leak
from batchloom.batches import add_dense_mask
from batchloom.core.errors import BatchloomError, TrainError
from batchloom.examples.job import tiny_model
from batchloom.testing import write_store

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320}
GROUPED = {**SIZE, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("data") / "store")


def build_model(name, **settings):
    """A small model of a family of transformers."""
    import transformers

    torch.manual_seed(0)
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, config_name)(**settings, use_cache=False)
    return getattr(transformers, f"{name}ForCausalLM")(config)


# Families that ignore resets of positions: ALiBi, learned positions, a state.
POSITION_BLIND = {
    "OPT": {**SIZE, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": SIZE,
    "Mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 320, "max_seq_len": 64},
    "Falcon": SIZE,
    "Mamba": {**SIZE, "state_size": 4},
}


def build_position_blind(name):
    return build_model(name, **POSITION_BLIND[name])


# test_accelerate_users_have_the_same_check has all of them.
BY_TIER = [pytest.param(name, marks=[] if name == "Mamba" else pytest.mark.slow) for name in POSITION_BLIND]


@pytest.mark.parametrize("name", BY_TIER)
def test_hugging_face_refuses_a_model_that_ignores_positions(store, tmp_path, name):
    with pytest.raises(TrainError, match="see each other|takes no position_ids"):
        make_trainer(store, tmp_path, model=build_position_blind(name)).train()


@pytest.mark.parametrize("name", BY_TIER)
def test_fsdp2_refuses_a_model_that_ignores_positions(store, tmp_path, name):
    args = FSDP2Arguments(output_dir=str(tmp_path), max_steps=2, max_length=64, use_cpu=True)
    with pytest.raises(BatchloomError, match="see each other"):
        FSDP2SFTTrainer(model=build_position_blind(name), args=args, train_dataset=store).train()


def test_accelerate_users_have_the_same_check(store):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = Loader(store, seq_len=64, global_batch_size=8, rank=0, world_size=1)
    require_isolation(accelerator, accelerator.prepare(tiny_model(store)), loader)
    for name in POSITION_BLIND:
        with pytest.raises(TrainError, match=f"{name}ForCausalLM .*(see each other|position_ids)"):
            require_isolation(accelerator, build_position_blind(name), loader)


MODELS = {
    "Mistral": GROUPED,
    # Each kind of layer has its own rotary embedding, which masks do not change.
    "Gemma3": {
        **GROUPED,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Gemma2": {**GROUPED, "query_pre_attn_scalar": 16},
    "Qwen2": {**GROUPED, "use_sliding_window": True, "max_window_layers": 1},
}


@pytest.mark.parametrize(
    ("name", "additive"),
    # Gemma 2 has no SDPA.
    [("Mistral", None), ("Gemma3", None), ("Qwen2", None), *((name, "float32") for name in MODELS)],
)
def test_a_dense_mask_has_the_window_of_the_model(tmp_path, name, additive):
    model = build_model(name, **MODELS[name], sliding_window=9)
    # SDPA takes a boolean mask, eager attention an additive one.
    model.set_attn_implementation("sdpa" if additive is None else "eager")
    model.eval()
    documents = [[(7 * n + k) % 256 for n in range(length)] for k, length in enumerate((30, 20, 14))]
    loader = Loader(write_store(tmp_path / "s", documents), seq_len=64, global_batch_size=1)
    batch = loader[0]
    with torch.no_grad():
        masked = model(**add_dense_mask(batch, additive=additive, config=model.config)).logits[0]
        unwindowed = model(**add_dense_mask(batch, additive=additive)).logits[0]
        bounds = [*torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist(), 64]
        for start, stop in pairwise(bounds):
            alone = model(batch["input_ids"][:, start:stop]).logits[0]
            torch.testing.assert_close(masked[start:stop], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(masked, unwindowed, atol=1e-4)


def build_eager(name, sliding_window):
    model = build_model(name, **MODELS[name], sliding_window=sliding_window)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_without_the_window_of_the_model_is_refused(store, name):
    model = build_eager(name, sliding_window=9)
    loader = Loader(store, seq_len=64, global_batch_size=8, rank=0, world_size=1)

    def check(form, model=model):
        check_no_leak(model, loader, lambda parts: {**form(parts[0]), "use_cache": False}, 2)

    masked = partial(add_dense_mask, additive="float32")
    check(partial(masked, config=model.config))
    check(lambda batch: batch)
    with pytest.raises(TrainError, match="sliding window of 9 tokens, which is missing from the mask"):
        check(masked)
    check(masked, build_eager(name, sliding_window=64))
