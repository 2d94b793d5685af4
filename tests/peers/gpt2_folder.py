"""GPT-2's tokenizer with the control tokens of chat templates, as a folder that every library loads.

It is written from batchloom's copy of the vocabulary, so that its ids are the same everywhere. It splits texts
into words as Llama 3 does: GPT-2 splits two line ends differently before a word, so that the libraries that tokenize
the parts of a conversation separately get other ids than from the complete text.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from batchloom.tokens import resolve_tokenizer

CONTROL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
)
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


_CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
# A small vocabulary loads in a fraction of the time.
_MERGES = 2000
_BYTES = 256
# Ids that are named: the control tokens follow the bytes and merges.
CONTROL_IDS = {token: _BYTES + _MERGES + number for number, token in enumerate(CONTROL_TOKENS)}
LINE_END_ID = 198


def write_gpt2_folder(folder: Path, chat_template: str | None, *, eos: str, bos: str | None = None) -> Path:
    """Write tokenizer.json and tokenizer_config.json with the first merges; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_make_tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def _make_tokenizer_json() -> str:
    model = resolve_tokenizer("gpt2").state()["tokenizer"]["model"]
    merges = [(left, right) for left, right in model["merges"][:_MERGES]]
    # The ids are those of the bytes, then one for each merge.
    ids = model["vocab"]
    tokenizer = Tokenizer(models.BPE({t: n for t, n in ids.items() if n < _BYTES + len(merges)}, merges))
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_make_tokens(CONTROL_TOKENS, special=True))
    tokenizer.add_tokens(_make_tokens(ADDED_TOKENS, special=False))
    return tokenizer.to_str()


def _make_tokens(tokens: Sequence[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def write_peer_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of the recorded comparisons: any template names its own control tokens."""
    return write_gpt2_folder(folder, _CHATML, eos="<|endoftext|>", bos="<|begin_of_text|>")
