"""Duplicate counts by pair of sources, dropped from one and kept in the other."""

from collections.abc import Sequence
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.units.unit_report import MAX_SAMPLES, format_snippet

# Maximum rows of sources, reasons, pairs and languages. The other rows are only counted.
MAX_ROWS = 50
# A table of pairs of more source groups than this would be unreadable.
_MAX_GROUPS = 200


class DuplicateExample(msgspec.Struct, frozen=True):
    """A dropped duplicate: its record, the kept copy's record, and its first words."""

    dropped_record: int
    kept_record: int
    words: str = ""


class DuplicatePair(msgspec.Struct, frozen=True, kw_only=True):
    """Number of duplicates dropped from one source because another keeps them.

    Both may be the same source.

    Attributes:
        dropped_from: source, or group of sources, of the dropped documents.
        kept_in: source, or group of sources, of the kept copies.
        count: number of documents.
        examples: first of the documents in input order.
    """

    dropped_from: str
    kept_in: str
    count: int
    examples: tuple[DuplicateExample, ...] = ()


class OmittedRows(msgspec.Struct, frozen=True):
    """Number of rows that a list omits, and their documents."""

    rows: int = 0
    documents: int = 0


def group_sources(names: Sequence[str], inputs: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the group number of each source, and the names of the groups.

    Grouping keeps a table of pairs readable. Up to 200 sources form one group each; more are grouped
    by folder, or else by input.

    Args:
        names: names of the sources.
        inputs: label of each source's input.
    """
    for group_names in (list(names), [name.rpartition("/")[0] or name for name in names], list(inputs)):
        groups = {name: number for number, name in enumerate(dict.fromkeys(group_names))}
        if len(groups) <= _MAX_GROUPS:
            return [groups[name] for name in group_names], list(groups)
    return [0] * len(names), ["all inputs"]


@final
class DuplicatePairCounter:
    """Counter of dropped duplicates by their group and the kept copy's group.

    Args:
        groups: names of the groups, at most a few hundred.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self._counts = np.zeros((len(groups), len(groups)), np.int64)
        self._examples: dict[tuple[int, int], list[DuplicateExample]] = {}

    def add(self, dropped_groups: NDArray[np.integer], kept_groups: NDArray[np.integer]) -> None:
        """Count duplicates by their group and the group of the kept copy [documents]."""
        size = len(self._groups)
        pairs = dropped_groups.astype(np.int64) * size + kept_groups
        self._counts += np.bincount(pairs, minlength=size * size).reshape(size, size)

    def needs_example(self, dropped_group: int, kept_group: int) -> bool:
        """Return whether there is room for another example of a pair of groups."""
        return len(self._examples.get((dropped_group, kept_group), ())) < MAX_SAMPLES

    def add_example(self, dropped_group: int, kept_group: int, example: DuplicateExample) -> None:
        """Add an example if there is room; called in input order, so the first ones stay."""
        if self.needs_example(dropped_group, kept_group):
            printable_example = DuplicateExample(
                example.dropped_record, example.kept_record, format_snippet(example.words)
            )
            self._examples.setdefault((dropped_group, kept_group), []).append(printable_example)

    def list_pairs(self) -> tuple[list[DuplicatePair], OmittedRows]:
        """Return the pairs with most documents, largest first, and totals of the others."""
        flat = self._counts.ravel()
        pair_indices = np.flatnonzero(flat)
        sorted_indices = pair_indices[np.argsort(-flat[pair_indices], kind="stable")]
        size = len(self._groups)
        listed = [
            DuplicatePair(
                dropped_from=self._groups[pair_index // size],
                kept_in=self._groups[pair_index % size],
                count=int(flat[pair_index]),
                examples=tuple(self._examples.get((pair_index // size, pair_index % size), ())),
            )
            for pair_index in sorted_indices[:MAX_ROWS].tolist()
        ]
        omitted_indices = sorted_indices[MAX_ROWS:]
        return listed, OmittedRows(len(omitted_indices), int(flat[omitted_indices].sum()))
