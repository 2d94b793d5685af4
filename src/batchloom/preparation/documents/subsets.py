"""Assignment of documents to subsets by their hash alone."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.store.format import SUBSETS

# At most two subsets are filled from another, so a third hash proves that one remains.
_SMALLEST_COUNT = 4
# From this many hashes on, NumPy preselects the smallest before conversion to Python integers.
_PREFILTER_SIZE = 64


@dataclass(frozen=True, slots=True)
class SubsetRule:
    """Shares of ``val`` and ``test``, and overrides that fill empty subsets.

    Attributes:
        val_fraction: share of documents in ``val``.
        test_fraction: share of documents in ``test``.
        overrides: subsets of single hashes (128-bit integers) that differ from the shares.
    """

    val_fraction: float
    test_fraction: float
    overrides: tuple[tuple[int, str], ...] = ()

    @property
    def shares(self) -> dict[str, float]:
        """Shares of all subsets but ``train``."""
        return {"val": self.val_fraction, "test": self.test_fraction}

    def list_required(self) -> tuple[str, ...]:
        """List the subsets that must not be empty if there are enough documents."""
        shares = {"train": 1.0, **self.shares}
        return tuple(name for name in SUBSETS if shares[name] > 0)

    def empty_notes(
        self, shards: Iterable[Mapping[str, tuple[int, int]]], existing_subsets: Iterable[str] = ()
    ) -> list[str]:
        """Return a note for each required subset that stays empty.

        Args:
            shards: for each unit, (number of the first shard, number of shards) by subset.
            existing_subsets: subsets that already hold documents.
        """
        filled = {*existing_subsets} | {name for unit in shards for name, (_, count) in unit.items() if count}
        return [
            f"There is no {name} subset: the input has too few distinct documents. Add data, cut texts into "
            f"smaller documents (--split-on paragraph), or set --{name}-fraction 0."
            for name in self.list_required()
            if name not in filled
        ]

    def codes(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return the index in ``SUBSETS`` of each document, uint8 [D].

        Args:
            hashes: (low, high) halves of each document's XXH3-128, uint64 [D, 2].
        """
        u = hash_to_unit_interval(hashes[:, 1])
        codes = np.zeros(len(u), np.uint8)
        codes[u < self.val_fraction + self.test_fraction] = SUBSETS.index("test")
        codes[u < self.val_fraction] = SUBSETS.index("val")
        if self.overrides:
            decided = dict(self.overrides)
            highs = np.array([value >> 64 for value in decided], np.uint64)
            for document_index in np.flatnonzero(np.isin(hashes[:, 1], highs)).tolist():
                low, high = hashes[document_index].tolist()
                if name := decided.get((high << 64) | low):
                    codes[document_index] = SUBSETS.index(name)
        return codes


def hash_to_unit_interval(high: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map high halves of hashes to uniform numbers in [0, 1), in an unrelated order.

    One round of SplitMix64's finalizer (Steele, Lea, Flood 2014), then the top 53 bits.
    """
    z = high.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@final
class SmallestHashes:
    """Collector of the few smallest distinct hashes of each subset."""

    def __init__(self) -> None:
        self._lists: dict[str, list[int]] = {name: [] for name in SUBSETS}

    def add(self, hashes: NDArray[np.uint64], codes: NDArray[np.uint8]) -> None:
        """Add documents: hashes uint64 [D, 2] and the subset code of each."""
        for code, name in enumerate(SUBSETS):
            subset_hashes = hashes[codes == code]
            smallest = self._lists[name]
            if len(smallest) == _SMALLEST_COUNT:
                subset_hashes = subset_hashes[subset_hashes[:, 1] <= np.uint64(smallest[-1] >> 64)]
            if len(subset_hashes) > _PREFILTER_SIZE:
                # The smallest high halves contain the smallest hashes, and equal halves are rare.
                halves = np.sort(subset_hashes[:, 1])
                ends = np.flatnonzero(halves[1:] != halves[:-1])[:_SMALLEST_COUNT]
                if len(ends) == _SMALLEST_COUNT:
                    subset_hashes = subset_hashes[subset_hashes[:, 1] <= halves[ends[-1]]]
            if len(subset_hashes):
                values = {(high << 64) | low for low, high in subset_hashes.tolist()}
                self._lists[name] = sorted(values.union(smallest))[:_SMALLEST_COUNT]

    def merge(self, lists: Mapping[str, Iterable[str]]) -> None:
        """Merge the :meth:`to_hex` output of another collector."""
        for name, values in lists.items():
            new_hashes = {int(value, 16) for value in values}
            self._lists[name] = sorted(new_hashes.union(self._lists[name]))[:_SMALLEST_COUNT]

    def to_hex(self) -> dict[str, list[str]]:
        """Return the smallest hashes of each subset, 32 hex digits each, ascending."""
        return {name: [f"{value:032x}" for value in values] for name, values in self._lists.items()}

    def hashes(self) -> set[int]:
        """Return the hashes of all subsets."""
        return {value for values in self._lists.values() for value in values}

    def overrides(
        self, required_subsets: Iterable[str], fixed_hashes: Collection[int] = ()
    ) -> tuple[tuple[int, str], ...]:
        """Return the hashes that move so that no required subset stays empty.

        In the order train, val, test an empty subset takes the smallest hash of the subsets that hold at least
        two distinct ones; train also takes a single one. Hashes in ``fixed_hashes`` never move: earlier documents
        have them.
        """
        lists = {name: [value for value in values if value not in fixed_hashes] for name, values in self._lists.items()}
        moved: list[tuple[int, str]] = []
        for name in required_subsets:
            least = 1 if name == "train" else 2
            donors = [values for values in lists.values() if len(values) >= least]
            if lists[name] or self._lists[name] or not donors:
                continue
            donor = min(donors)
            value = donor.pop(0)
            lists[name] = [value]
            moved.append((value, name))
        return tuple(moved)
