"""What a document begins with, for people."""

import numpy as np
from hypothesis import given, strategies as st

from batchloom.store import decode_beginning
from batchloom.tokens import resolve_tokenizer

BYTES = resolve_tokenizer("bytes")


def ids_of(text):
    return BYTES.encode_batch([text])[0]


@given(st.text(st.characters(codec="ascii"), max_size=60), st.integers(1, 80))
def test_without_runs_it_is_the_text_of_the_first_tokens(text, most):
    ids = ids_of(text)
    if (np.diff(ids) == 0).sum() < 7:
        assert decode_beginning(BYTES, ids, most) == BYTES.decode(ids[:most])


def test_a_run_is_written_once_and_counts_as_one_token():
    ids = ids_of("ab" + "-" * 50 + "cd" + "=" * 9 + "e" + "+" * 7 + "f")
    assert decode_beginning(BYTES, ids, 48) == "ab-[x50]cd=[x9]e+++++++f"
    assert decode_beginning(BYTES, ids, 2) == "ab"
    assert decode_beginning(BYTES, ids, 3) == "ab-[x50]"
    assert decode_beginning(BYTES, ids, 4) == "ab-[x50]c"


def test_nothing_and_nothing_but_a_run():
    assert decode_beginning(BYTES, ids_of(""), 48) == ""
    assert decode_beginning(BYTES, ids_of("x" * 70_000), 48) == "x[x70000]"
