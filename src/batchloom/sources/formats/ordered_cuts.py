"""Part boundaries of CSV files and JSON lists, which depend on all earlier bytes.

One pass from the front finds the boundaries. Known cuts are cached and the next search starts at
the last one, so all parts of a source in order cost a single pass.
"""

from bisect import bisect_left, bisect_right
from typing import final

from batchloom.sources.files.source_rules import PartStart, ReadRules, Source, choose_read_method
from batchloom.sources.formats.csv_cuts import find_row_cut
from batchloom.sources.formats.csv_format import CsvHeader, read_csv_header
from batchloom.sources.formats.json_list_cuts import find_list_cut

# (path of a source, nominal offset, cut at that offset)
KnownCut = tuple[str, int, PartStart | None]


@final
class SequentialCuts:
    """The cuts of one source found so far."""

    def __init__(self, source: Source, rules: ReadRules) -> None:
        self.source, self._rules = source, rules
        self._header: CsvHeader | None = None
        self._cuts_by_nominal: dict[int, PartStart | None] = {}
        self._known_cuts: list[PartStart] = []
        self._end_nominal: int | None = None

    def get_cut(self, nominal: int) -> PartStart | None:
        """Return the first cut at or after byte ``nominal``, or None.

        Raises:
            InputError: the source cannot be read, or its header or list is invalid.
        """
        if nominal not in self._cuts_by_nominal:
            cut = self._find_cut(nominal)
            self._cuts_by_nominal[nominal] = cut
            if cut is not None:
                offsets = [known_cut.offset for known_cut in self._known_cuts]
                self._known_cuts.insert(bisect_left(offsets, cut.offset), cut)
            elif self._end_nominal is None or nominal < self._end_nominal:
                self._end_nominal = nominal
        return self._cuts_by_nominal[nominal]

    def _find_cut(self, nominal: int) -> PartStart | None:
        if self._end_nominal is not None and nominal >= self._end_nominal:
            return None
        index = bisect_right([known_cut.offset for known_cut in self._known_cuts], nominal)
        previous_cut = self._known_cuts[index - 1] if index else None
        if previous_cut is not None and previous_cut.offset == nominal:
            return previous_cut
        if choose_read_method(self.source, self._rules) == "json":
            return find_list_cut(self.source, self._rules, previous_cut, nominal)
        if self._header is None:
            self._header = read_csv_header(self.source, self._rules)
        if nominal <= self._header.rows.offset:
            return self._header.rows if self._header.rows.offset < self.source.size else None
        return find_row_cut(self.source, self._rules, self._header, previous_cut or self._header.rows, nominal)
