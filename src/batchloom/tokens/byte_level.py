"""Byte-level BPE as a tokenizer.json, with bytes spelled as printable characters."""

from typing import Any

GPT2_PRE_TOKENIZER: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def make_byte_level_json(
    vocab: dict[str, int],
    merges: list[list[str]],
    control: dict[str, int],
    *,
    pre_tokenizer: dict[str, Any],
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """Build the tokenizer.json of a byte-level BPE.

    Args:
        vocab: ids of the tokens in the byte-level alphabet, including control tokens.
        merges: pairs in order of rank.
        control: control tokens and their ids.
        pre_tokenizer: split of text before merging.
        ignore_merges: whether a pre-token that is itself a token skips merging.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True}
            for token, number in sorted(control.items(), key=lambda pair: pair[1])
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": GPT2_PRE_TOKENIZER,
        "model": model,
    }


def make_byte_alphabet() -> list[str]:
    """Return the character of each byte, [256] (GPT-2's ``bytes_to_unicode``).

    A printable Latin-1 character stands for itself, the other bytes are numbered from U+0100 (Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
