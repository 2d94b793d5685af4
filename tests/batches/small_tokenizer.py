"""A tokenizer of another vocabulary than the 256 bytes."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(path: Path) -> str:
    """Write a byte-level tokenizer without merges; return its path."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return str(path)
