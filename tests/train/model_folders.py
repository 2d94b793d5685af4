"""Folders of tiny random Hugging Face models, and chat-like stores for them."""

import numpy as np
import torch

from batchloom.testing import write_store
from train.runs import counting_documents

# Sizes for every family, with embeddings for the ids of the ``bytes`` tokenizer.
LLAMA = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL = {name: LLAMA[name] for name in ("vocab_size", "max_position_embeddings")}
CONFIGS = {
    "llama": ("LlamaConfig", LLAMA),
    "tied": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen2-window": (
        "Qwen2Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 8}),
    "mistral-window": ("MistralConfig", {**LLAMA, "sliding_window": 4}),
    "gemma": ("GemmaConfig", {**LLAMA, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**LLAMA, "head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", {**LLAMA, "head_dim": 8, "sliding_window": 4}),
    "gpt2": ("GPT2Config", {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "neox": ("GPTNeoXConfig", {**LLAMA, "num_attention_heads": 4}),
    "opt": (
        "OPTConfig",
        {
            **SMALL,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "word_embed_proj_dim": 32,
        }
        | {"num_attention_heads": 4},
    ),
    "bloom": ("BloomConfig", {"vocab_size": 264, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "mamba": (
        "MambaConfig",
        {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}


def write_model(folder, kind="llama", dtype=torch.float32, **changes):
    """Save a random model of a family as on the Hub; return it."""
    import transformers

    name, sizes = CONFIGS[kind]
    config = getattr(transformers, name)(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def write_chat_store(folder, longest=20):
    """Write a store that trains on the second half of each document."""
    documents = {
        "train": counting_documents(60, 0, longest),
        "val": counting_documents(10, 1, longest),
    }
    trained = {
        name: [(np.arange(len(d)) >= len(d) // 2).astype(int).tolist() for d in subset_documents]
        for name, subset_documents in documents.items()
    }
    return write_store(folder, documents, trained=trained)
