"""Normalization is NFC and newlines, as in Python's own library."""

import time
import unicodedata

from hypothesis import given, settings, strategies as st

from batchloom.text import normalize
from tiers import examples


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_it_is_nfc_with_newlines(text):
    expected = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    assert normalize(text) == expected
    assert normalize(expected) == expected


def test_letters_keep_their_case_and_spaces_their_place():
    assert normalize("  ÀÉ\tİ  x \r\ny\rz\n") == "  ÀÉ\tİ  x \ny\nz\n"
    assert normalize("e\u0301") == "é"


@settings(max_examples=examples(20))
@given(
    st.lists(st.sampled_from("\u0301\u0316\u0344\u0f71\u0f73\u0f75\u0f81\u0345\u05b0"), min_size=1100, max_size=1500),
    st.text(max_size=5),
)
def test_long_runs_of_marks_give_the_same_nfc(marks, around):
    text = around + "a" + "".join(marks) + around
    assert normalize(text) == normalize(unicodedata.normalize("NFC", text))


def test_a_megabyte_of_marks_takes_no_hours():
    start = time.process_time()
    assert len(normalize("x" + "\u0301\u0316" * 300_000)) >= 600_000
    assert len(normalize("\u0f40" + "\u0f73" * 300_000)) >= 600_000
    assert time.process_time() - start < 60
