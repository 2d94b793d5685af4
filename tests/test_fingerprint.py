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
def test_canonical_json_equals_the_standard_library_with_sorted_keys(value):
    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert encode_canonical(value) == expected.encode()


@pytest.mark.parametrize("value", [[float("nan")], {"a": [1, {"b": float("inf")}]}])
def test_numbers_outside_json_have_no_fingerprint(value):
    with pytest.raises(ValueError, match="Out of range float values"):
        fingerprint(value)


def test_large_integers_and_integer_keys_are_encoded():
    assert encode_canonical({"b": 2**70, "a": -(2**64)}) == (b'{"a":-18446744073709551616,"b":1180591620717411303424}')
    assert encode_canonical({2: 1}) == b'{"2":1}'


def test_an_unpaired_surrogate_has_no_fingerprint():
    with pytest.raises(UnicodeEncodeError):
        fingerprint(["\ud800"])
