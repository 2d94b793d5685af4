"""Fixtures of the comparisons with other libraries."""

from chat.conftest import hf_tokenizers, tokenizer_folders, tokenizers  # noqa: F401
