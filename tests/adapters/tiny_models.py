"""Tiny models of the causal families of transformers, from their default configs."""

import inspect
from typing import Any

# Sizes under the names that configs give them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_key_value_groups", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim", "attention_head_size", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "rotary_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "lru_width": 32,
    "ffn_hidden_size": 48,
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
_MOST_WEIGHTS = 2_000_000


def make_tiny_model(family: str) -> Any:
    """Return a model of a family in evaluation mode, with weights that let tokens see each other.

    Raises:
        Exception: of transformers, if these sizes are none for the family.
        ValueError: its config has sizes under other names, so that it is not tiny.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[family]
    names = {*inspect.signature(config_class).parameters}
    names.update(name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {}))
    config = config_class(**{name: size for name, size in _SIZES.items() if name in names})
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return model
