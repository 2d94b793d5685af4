"""Canonical JSON: one encoding, independent of the writer."""

import json

import pytest
from hypothesis import given, strategies as st

from batchloom.core.fingerprint import encode_canonical, fingerprint

LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES)
def test_canonical_is_what_the_standard_library_writes_with_sorted_keys(value):
    said = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert encode_canonical(value) == said.encode()


@pytest.mark.parametrize("value", [[float("nan")], {"a": [1, {"b": float("inf")}]}])
def test_what_json_cannot_say_has_no_fingerprint(value):
    with pytest.raises(ValueError, match="Out of range float values"):
        fingerprint(value)


def test_integers_of_any_size_and_keys_that_are_numbers_are_spelled():
    assert encode_canonical({"b": 2**70, "a": -(2**64)}) == (b'{"a":-18446744073709551616,"b":1180591620717411303424}')
    assert encode_canonical({2: 1}) == b'{"2":1}'


def test_half_a_character_has_no_fingerprint():
    with pytest.raises(UnicodeEncodeError):
        fingerprint(["\ud800"])
