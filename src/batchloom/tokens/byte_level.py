"""Byte-level BPE as a tokenizer.json: merges over bytes that are spelled as printable characters."""

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
    """A tokenizer.json of a byte-level BPE.

    Args:
        vocab: tokens in the byte-level alphabet, control tokens included, and their ids.
        merges: pairs in order of rank.
        control: the control tokens and their ids.
        pre_tokenizer: how text is cut before merging.
        ignore_merges: whether a piece that is a token is taken whole.
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
    """The character that stands for each byte, [256] (Radford et al. 2019, ``bytes_to_unicode``).

    A printable Latin-1 character stands for itself, the other bytes follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
