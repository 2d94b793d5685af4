"""Assumed log-normal document lengths for the dry run of a plan without a store."""

import re
from functools import cache
from statistics import NormalDist
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError
from batchloom.core.fingerprint import derive_key, fingerprint
from batchloom.core.keyed_hashing import hash_indices

# Standard deviation of the logarithm; web text has about this (measured: 1.0 to 1.2).
SIGMA = 1.1
# Limit of a store: its index holds lengths as signed 32-bit integers.
_MAX_TOKENS = (1 << 31) - 1
# The distribution is approximated by 2**_BITS quantiles.
_BITS = 14
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_NUMBER_PATTERN = r"(\d[\d_]*(?:\.\d+)?)\s*([KMGBT]?)"
_SOURCE_PATTERN = re.compile(
    rf"(?:([^\s=,/]+)\s*=\s*)?{_NUMBER_PATTERN}\s*(?:tokens?)?\s*[,/]\s*{_NUMBER_PATTERN}\s*doc(?:ument)?s?\s*(?:[,;]\s*|$)",
    re.I,
)
_FORMS_HINT = (
    "write '15T tokens, 12B documents', or for several sources 'web=10T tokens/8B documents, code=5T tokens/4B "
    "documents'"
)


@cache
def _compute_quantiles() -> NDArray[np.float64]:
    """Return equally likely quantiles of a log-normal distribution of mean 1."""
    count = 1 << _BITS
    normal = NormalDist(0.0, SIGMA)
    quantiles = np.exp([normal.inv_cdf((n + 0.5) / count) for n in range(count)])
    return np.asarray(quantiles / quantiles.mean())


@final
class AssumedLengths:
    """Assumed document lengths of a given mean, in constant memory."""

    __slots__ = ("_key", "_table", "size")

    def __init__(self, documents: int, mean: float, name: str) -> None:
        self.size = documents
        # Lengths are rounded up or down at random, because always rounding one way would shift the mean.
        self._table = _compute_quantiles() * mean
        self._key = derive_key("assumed", name)

    def take(self, documents: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the lengths of these documents, uint32 of the same length."""
        hashes = hash_indices(documents, self._key)
        exact = self._table[(hashes >> np.uint64(64 - _BITS)).astype(np.int64)]
        fractions = (hashes & np.uint64(0xFFFFFFFF)).astype(np.float64) / (1 << 32)
        return np.asarray(np.floor(exact + fractions), np.uint32)


@final
class AssumedStore:
    """Store with assumed lengths that a plan can be computed on."""

    __slots__ = ("fingerprint", "lengths", "tokens")

    def __init__(self, name: str, tokens: int, documents: int) -> None:
        self.tokens = tokens
        self.lengths = AssumedLengths(documents, tokens / documents, name)
        self.fingerprint = fingerprint({"assumed": name, "tokens": tokens, "documents": documents})


def parse_assumed_stores(text: str) -> dict[str, AssumedStore]:
    """Parse the assumed sources by name; a single unnamed source is called ``data``.

    Raises:
        SettingsError: the text does not describe a source; shows the syntax.
    """
    assumed_stores: dict[str, AssumedStore] = {}
    problems: list[str] = []
    offset = 0
    text = text.strip()
    max_mean = int(_MAX_TOKENS / _compute_quantiles()[-1])
    while offset < len(text) and (match := _SOURCE_PATTERN.match(text, offset)):
        name = match[1] or "data"
        tokens = _parse_count(match[2], match[3])
        documents = _parse_count(match[4], match[5])
        if name in assumed_stores:
            problems.append(f"assume: source {name!r} is named twice")
        elif not 0 < documents < 1 << 62 or not documents <= tokens < 1 << 62:
            problems.append(
                f"assume: {tokens:,} tokens in {documents:,} documents: give at least one document, and one token "
                "per document"
            )
        elif tokens > max_mean * documents:
            problems.append(
                f"assume: {tokens:,} tokens in {documents:,} documents are a mean of {tokens / documents:,.0f} "
                f"tokens. With a mean above {max_mean:,} the longest document would have more than {_MAX_TOKENS:,} "
                "tokens, the most a store can hold. Give more documents"
            )
        else:
            assumed_stores[name] = AssumedStore(name, tokens, documents)
        offset = match.end()
    if offset < len(text) or not text:
        problems.append(f"assume: {text[offset:]!r} is not understood; {_FORMS_HINT}")
    if len(assumed_stores) > 1 and "data" in assumed_stores and "data=" not in text.replace(" ", ""):
        problems.append(f"assume: one of several sources has no name; {_FORMS_HINT}")
    if problems:
        raise SettingsError(problems)
    return assumed_stores


def _parse_count(number: str, unit: str) -> int:
    return round(float(number.replace("_", "")) * _UNITS[unit.upper()])
