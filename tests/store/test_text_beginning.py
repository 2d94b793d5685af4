"""Shortened beginnings of documents for display."""

import numpy as np
from hypothesis import given, strategies as st

from batchloom.store import decode_beginning
from batchloom.tokens import resolve_tokenizer

BYTES = resolve_tokenizer("bytes")


def encode_text(text):
    return BYTES.encode_batch([text])[0]


@given(st.text(st.characters(codec="ascii"), max_size=60), st.integers(1, 80))
def test_text_without_runs_is_the_text_of_its_first_tokens(text, max_tokens):
    ids = encode_text(text)
    if (np.diff(ids) == 0).sum() < 7:
        assert decode_beginning(BYTES, ids, max_tokens) == BYTES.decode(ids[:max_tokens])


def test_a_run_is_written_once_and_counts_as_one_token():
    ids = encode_text("ab" + "-" * 50 + "cd" + "=" * 9 + "e" + "+" * 7 + "f")
    assert decode_beginning(BYTES, ids, 48) == "ab-[x50]cd=[x9]e+++++++f"
    assert decode_beginning(BYTES, ids, 2) == "ab"
    assert decode_beginning(BYTES, ids, 3) == "ab-[x50]"
    assert decode_beginning(BYTES, ids, 4) == "ab-[x50]c"


def test_an_empty_text_and_a_single_run():
    assert decode_beginning(BYTES, encode_text(""), 48) == ""
    assert decode_beginning(BYTES, encode_text("x" * 70_000), 48) == "x[x70000]"
