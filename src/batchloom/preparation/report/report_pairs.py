"""Duplicates by pair of sources: from where they were left out, and where the one that stayed is."""

from collections.abc import Sequence
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.units import MAX_SAMPLES, format_snippet

# Sources, reasons, pairs and languages that are listed; of the others their number is told.
MAX_ROWS = 50
# More groups of sources than this would make a table of pairs that nobody reads.
_MAX_GROUPS = 200


class DuplicateExample(msgspec.Struct, frozen=True):
    """A document that was left out as a duplicate: its record, that of the one that stayed, its first words."""

    dropped_record: int
    kept_record: int
    words: str = ""


class DuplicatePair(msgspec.Struct, frozen=True, kw_only=True):
    """How many documents of one source were left out because another (or the same) has them.

    Attributes:
        dropped_from: the source, or group of sources, that lost them.
        kept_in: the one that has them.
        count: documents.
        examples: the first of them in input order.
    """

    dropped_from: str
    kept_in: str
    count: int
    examples: tuple[DuplicateExample, ...] = ()


class OmittedRows(msgspec.Struct, frozen=True):
    """What a list leaves out to stay short: how many rows, and the documents of these."""

    rows: int = 0
    documents: int = 0


def group_sources(names: Sequence[str], inputs: Sequence[str]) -> tuple[list[int], list[str]]:
    """The group of each source, and the groups' names, so that a table of pairs stays readable.

    Up to 200 sources are each a group of its own; of more, those of one folder, else of one input.

    Args:
        names: of the sources.
        inputs: what the input of each source is called.
    """
    for group_names in (
        list(names),
        [name.rpartition("/")[0] or name for name in names],
        list(inputs),
    ):
        groups = {name: number for number, name in enumerate(dict.fromkeys(group_names))}
        if len(groups) <= _MAX_GROUPS:
            return [groups[name] for name in group_names], list(groups)
    return [0] * len(names), ["all inputs"]


@final
class DuplicatePairCounter:
    """Counts documents that were left out as duplicates, by the group they were in and the group that has them.

    Args:
        groups: names of the groups, at most some hundred.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self._counts = np.zeros((len(groups), len(groups)), np.int64)
        self._examples: dict[tuple[int, int], list[DuplicateExample]] = {}

    def add(self, dropped_groups: NDArray[np.integer], kept_groups: NDArray[np.integer]) -> None:
        """Count duplicates: the group each was in, and the group of the one that stayed [documents]."""
        size = len(self._groups)
        pairs = dropped_groups.astype(np.int64) * size + kept_groups
        self._counts += np.bincount(pairs, minlength=size * size).reshape(size, size)

    def needs_example(self, dropped_group: int, kept_group: int) -> bool:
        """Whether another example of a pair of groups would be kept."""
        return len(self._examples.get((dropped_group, kept_group), ())) < MAX_SAMPLES

    def add_example(self, dropped_group: int, kept_group: int, example: DuplicateExample) -> None:
        """Keep an example, if there is room; told in input order, the first stay."""
        if self.needs_example(dropped_group, kept_group):
            printable_example = DuplicateExample(
                example.dropped_record, example.kept_record, format_snippet(example.words)
            )
            self._examples.setdefault((dropped_group, kept_group), []).append(printable_example)

    def list_pairs(self) -> tuple[list[DuplicatePair], OmittedRows]:
        """The pairs with most documents, largest first, and what is said of the others."""
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
