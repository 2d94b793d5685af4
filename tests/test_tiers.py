"""Tiers and slices of the suite: every test runs in one, and slices are disjoint."""

import pytest

from tiers import is_in_tier, parse_slice, select_slice

NAMES = [f"tests/plan/test_packing.py::test_{n}[{n % 7}]" for n in range(400)]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("is_property", [False, True])
def test_every_test_is_in_the_fast_or_the_slow_tier(slow, is_property):
    kinds = {"slow": slow, "is_property": is_property}
    assert is_in_tier("all", **kinds)
    assert is_in_tier("fast", **kinds) is not slow
    assert is_in_tier("slow", **kinds) is (slow or is_property)


def test_eight_slices_hold_every_test_once():
    slices = [select_slice(NAMES[::-1], k, 8) for k in range(1, 9)]
    assert sum(map(len, slices)) == len(set().union(*slices)) == len(NAMES)
    assert {*map(len, slices)} == {len(NAMES) // 8}


def test_a_slice_is_given_as_k_of_n():
    assert parse_slice("3/8") == (3, 8)
    for text in ("0/8", "9/8", "3", "a/b", "-1/8", ""):
        with pytest.raises(ValueError, match="is not K/N"):
            parse_slice(text)
