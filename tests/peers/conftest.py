"""Fixtures of the comparisons with other libraries."""

from chat.conftest import tokenizer_folders  # noqa: F401
