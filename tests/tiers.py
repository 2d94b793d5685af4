"""Tiers of the suite: the tests to run and the number of examples of a property.

The fast tier is for runs before a commit. The slow tier holds tests marked ``slow``, and
every property again with more examples; ``--slice K/N`` runs one of N equal parts of it. The tier "properties" holds
these alone, with examples that differ in every run; see ``explore.py``.
"""

import re
from collections.abc import Iterable

TIERS = ("fast", "slow", "all", "properties")
_FAST_SHARE = 12
_RAY_PATTERN = re.compile(r"(?:^|[/\[_])ray[_.\-]|[_]ray\b")

# conftest.py sets this from ``--tier`` before test modules are imported.
tier = "fast"


def examples(count: int) -> int:
    """Return the number of examples in this tier, of ``count`` in the others."""
    return max(5, count // _FAST_SHARE) if tier == "fast" else count


def parse_slice(text: str) -> tuple[int, int]:
    """Parse ``K/N`` as slice K of N, counted from 1."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--slice {text!r} is not K/N with 1 <= K <= N, such as 3/8.")
    return int(number), int(count)


def is_in_tier(name: str, *, slow: bool, is_property: bool) -> bool:
    """Return whether a test belongs to the tier that runs.

    ``name`` is one of ``TIERS``. ``is_property`` marks a test that draws examples, more of them in the slow tier.
    """
    if name == "fast":
        return not slow
    if name == "properties":
        return is_property
    return name == "all" or slow or is_property


def select_slice(names: Iterable[str], number: int, count: int) -> set[str]:
    """Return the tests of slice ``number`` of ``count``.

    Neighbours by name take about the same time, so they go to different slices. Clusters of Ray take longest.
    """
    return set(sorted(names, key=lambda name: (not _RAY_PATTERN.search(name), name))[number - 1 :: count])
