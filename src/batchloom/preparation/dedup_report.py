"""What was left out as a duplicate, by pair of sources, with the first words of some of it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.dedup.find import DUPLICATE
from batchloom.preparation.report_pairs import (
    DuplicateExample,
    DuplicatePair,
    PairTally,
    Rest,
    source_groups,
)
from batchloom.preparation.subsets import Membership
from batchloom.preparation.unit_files import ROW, ROWS_NAME, tokens_name
from batchloom.preparation.work import UnitWork, reading
from batchloom.store.format import SUBSETS
from batchloom.tokens import Tokenizer

_STRETCH = 1 << 20
_WORDS_TOKENS = 64
# Looked at for examples in each stretch: the first of a pair is nearly always among them.
_LOOKED_AT = 1000


@final
class DuplicateReader:
    """Reads the files that name duplicates.

    Args:
        units: all units in order.
        inputs: what each input is called.
        membership: the shares of the subsets, by which temporary files are apart.
        dtype: of a token on disk.
        tokenizer: turns the first tokens into words.
    """

    def __init__(
        self,
        units: Sequence[UnitWork],
        inputs: Sequence[str],
        membership: Membership,
        dtype: np.dtype[np.generic],
        tokenizer: Tokenizer,
    ) -> None:
        self._units, self._membership = units, membership
        self._dtype, self._tokenizer = dtype, tokenizer
        sources = [part.source for one in units for part in one.unit.parts]
        groups, names = source_groups(
            [source.name for source in sources], [inputs[source.input] for source in sources]
        )
        self._groups = np.array(groups, np.int64)
        self._firsts = np.cumsum([0, *(len(one.unit.parts) for one in units)])
        self._tally = PairTally(names)

    def pairs(self, files: Iterable[Path]) -> tuple[list[DuplicatePair], Rest]:
        """Duplicates by pair of sources, and what is said of pairs that are not listed."""
        for rows in _stretches(files):
            dropped = self._groups[self._firsts[rows["unit"]] + rows["part"]]
            kept = self._groups[self._firsts[rows["first_unit"]] + rows["first_part"]]
            self._tally.add(dropped, kept)
            for at in range(min(len(rows), _LOOKED_AT)):
                pair = int(dropped[at]), int(kept[at])
                if self._tally.wants(*pair):
                    self._tally.example(*pair, self._example(rows[at]))
        return self._tally.pairs()

    def _example(self, row: np.void) -> DuplicateExample:
        unit, number = self._units[int(row["unit"])], int(row["number"])
        first = self._units[int(row["first_unit"])]
        return DuplicateExample(
            self._record(unit, number),
            self._record(first, int(row["first_number"])),
            self._words(unit, number),
        )

    def _record(self, unit: UnitWork, number: int) -> int:
        """The record of a document inside its part; -1 where its temporary files are gone."""
        rows = _rows(unit)
        return int(rows["record"][number]) if len(rows) else -1

    def _words(self, unit: UnitWork, number: int) -> str:
        rows = _rows(unit)
        if not len(rows):
            return ""
        codes = self._membership.codes(rows["hash"][: number + 1])
        mine = codes[:-1] == codes[-1]
        start = int(rows["length"][:number][mine].sum(dtype=np.int64))
        count = min(int(rows["length"][number]), _WORDS_TOKENS)
        path = unit.folder / tokens_name(SUBSETS[int(codes[-1])])
        with reading(path):
            ids = np.fromfile(path, self._dtype, count, offset=start * self._dtype.itemsize)
        return self._tokenizer.decode(ids)


def _rows(unit: UnitWork) -> NDArray[np.void]:
    path = unit.folder / ROWS_NAME
    if not path.exists():
        return np.zeros(0, ROW)
    with reading(path):
        return np.memmap(path, ROW, "r").view(np.ndarray)


def _stretches(files: Iterable[Path]) -> Iterator[NDArray[np.void]]:
    for path in files:
        with reading(path), path.open("rb") as file:
            while (rows := np.fromfile(file, DUPLICATE, _STRETCH)).size:
                yield rows
