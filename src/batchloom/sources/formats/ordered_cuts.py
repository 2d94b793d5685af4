"""Parts of sources where a record begins only after all those before it: CSV files, JSON lists.

One pass from the front finds where they meet. What it finds is kept, and the next place is looked
for from there on, so that all parts of a source in order cost a single pass.
"""

from bisect import bisect_left, bisect_right
from typing import final

from batchloom.sources.files import PartStart, ReadRules, Source, choose_read_method
from batchloom.sources.formats.csv_cuts import find_row_cut
from batchloom.sources.formats.csv_format import CsvHeader, read_csv_header
from batchloom.sources.formats.json_list_cuts import find_list_cut

# The path of a source, a nominal place in it, and the cut there.
KnownCut = tuple[str, int, PartStart | None]


@final
class SequentialCuts:
    """The cuts of one source that were looked up so far."""

    def __init__(self, source: Source, rules: ReadRules) -> None:
        self.source, self._rules = source, rules
        self._header: CsvHeader | None = None
        self._asked: dict[int, PartStart | None] = {}
        self._known: list[PartStart] = []
        self._last: int | None = None

    def at(self, nominal: int) -> PartStart | None:
        """The first cut at or after byte ``nominal``; None where there is none.

        Raises:
            InputError: the source cannot be read, or its header or list is not sound.
        """
        if nominal not in self._asked:
            found = self._find(nominal)
            self._asked[nominal] = found
            if found is not None:
                places = [one.offset for one in self._known]
                self._known.insert(bisect_left(places, found.offset), found)
            elif self._last is None or nominal < self._last:
                self._last = nominal
        return self._asked[nominal]

    def _find(self, nominal: int) -> PartStart | None:
        if self._last is not None and nominal >= self._last:
            return None
        before = bisect_right([one.offset for one in self._known], nominal)
        known = self._known[before - 1] if before else None
        if known is not None and known.offset == nominal:
            return known
        if choose_read_method(self.source, self._rules) == "json":
            return find_list_cut(self.source, self._rules, known, nominal)
        if self._header is None:
            self._header = read_csv_header(self.source, self._rules)
        if nominal <= self._header.rows.offset:
            return self._header.rows if self._header.rows.offset < self.source.size else None
        return find_row_cut(
            self.source, self._rules, self._header, known or self._header.rows, nominal
        )
