"""Fixtures of the comparisons with other libraries."""

import pytest

pytest.register_assert_rewrite("peers.known_differences")

from chat.conftest import hf_tokenizers, tokenizer_folders, tokenizers  # noqa: F401
