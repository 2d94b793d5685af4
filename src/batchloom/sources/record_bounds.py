"""Part boundaries in a large source: records at or after nominal offsets.

A boundary depends only on the bytes around the offset, so parts can be read in any order and give
the same documents.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, BinaryIO, final

from batchloom.sources.files.part_stream import open_source
from batchloom.sources.files.source_rules import (
    PartStart,
    ReadMethod,
    ReadRules,
    Source,
    choose_read_method,
    is_sequential,
)
from batchloom.sources.formats.delimiters import make_delimiter
from batchloom.sources.formats.ordered_cuts import KnownCut, SequentialCuts
from batchloom.sources.formats.table_probe import require_no_crash
from batchloom.sources.formats.text_cuts import find_best_cut, find_character_start

if TYPE_CHECKING:
    from batchloom.sources.formats.table_format import TableReader

_FIRST_SEARCH_BYTES = 64 << 10
_MAX_SEARCH_BYTES = 8 << 20


def open_table(source: Source) -> "TableReader":
    """Open a columnar source; the reader is imported on first use.

    Raises:
        InputError: it cannot be read, or is damaged.
    """
    file = open_source(source)
    try:
        require_no_crash(source, file)
        from batchloom.sources.formats.table_format import TableReader  # noqa: PLC0415 - pyarrow takes half a second

        return TableReader(source, file)
    except BaseException:
        file.close()
        raise


@final
class RecordBounds:
    """Finder of the first record that begins at or after a nominal offset of a source.

    The last gap is cached, so that one enormous record is not searched again for every nominal
    offset inside it.
    """

    def __init__(self, rules: ReadRules) -> None:
        self._rules = rules
        self._gap: tuple[str, int, int] = ("", 0, 0)
        self._starts: tuple[str, list[int]] = ("", [])
        self._sequential_cuts: SequentialCuts | None = None
        self._known_cuts: dict[tuple[str, int], PartStart | None] = {}

    def set_known_cuts(self, known_cuts: Iterable[KnownCut]) -> None:
        """Replace the known cuts; their sources are not read to find them."""
        self._known_cuts = {(path, nominal): begin for path, nominal, begin in known_cuts}

    def find_bound(self, source: Source, nominal: int) -> int:
        """Return the bound for a nominal offset; the source's size if no record follows."""
        if nominal <= 0 or nominal >= source.size:
            return max(0, min(nominal, source.size))
        if is_sequential(source, self._rules):
            begin = self.begin(source, nominal)
            return source.size if begin is None else begin.offset
        if choose_read_method(source, self._rules) == "table":
            record_start = self.find_bound_within(source, nominal, source.size)
            return source.size if record_start is None else record_start
        path, start, stop = self._gap
        # Near the ends of the gap the result also depends on bytes outside it, so it is searched again.
        reach = self._rules.limits.reach_bytes
        if path == source.path and start + reach <= nominal <= stop - reach:
            return stop
        record_start = self.find_bound_within(source, nominal, source.size)
        bound = source.size if record_start is None else record_start
        if choose_read_method(source, self._rules) != "cut":
            self._gap = (source.path, nominal, bound)
        return bound

    def begin(self, source: Source, nominal: int) -> PartStart | None:
        """Return the reader state at the bound of a nominal offset.

        It is None if no record begins there, and for sources whose records can be recognized by their
        beginning.
        """
        if not 0 < nominal < source.size or not is_sequential(source, self._rules):
            return None
        if (source.path, nominal) in self._known_cuts:
            return self._known_cuts[source.path, nominal]
        if self._sequential_cuts is None or self._sequential_cuts.source != source:
            self._sequential_cuts = SequentialCuts(source, self._rules)
        return self._sequential_cuts.get_cut(nominal)

    def find_bound_within(self, source: Source, nominal: int, limit: int) -> int | None:
        """Return the bound below byte ``limit``, or None if there is none."""
        if choose_read_method(source, self._rules) == "table":
            starts = self.starts(source)
            index = bisect_left(starts, nominal)
            return starts[index] if index < len(starts) and starts[index] < limit else None
        with open_source(source) as file:
            if choose_read_method(source, self._rules) == "cut":
                return self._find_text_cut(file, nominal)
            return self._find_record(file, source, nominal, limit)

    def starts(self, source: Source) -> list[int]:
        """Return the first byte of each row group of a columnar source."""
        path, starts = self._starts
        if path != source.path:
            with open_table(source) as table:
                starts = table.starts
            self._starts = (source.path, starts)
        return starts

    def _find_text_cut(self, file: BinaryIO, nominal: int) -> int:
        file.seek(nominal)
        window = file.read(self._rules.limits.reach_bytes)
        best_cut = find_best_cut(window, 0, len(window))
        return nominal + (find_character_start(window, 0) if best_cut is None else best_cut)

    def _find_record(self, file: BinaryIO, source: Source, nominal: int, limit: int) -> int | None:
        read_method = choose_read_method(source, self._rules)
        delimiter = make_delimiter(read_method, self._rules)
        position, step = self._find_search_start(file, nominal, read_method), _FIRST_SEARCH_BYTES
        while position < limit:
            file.seek(position)
            window = file.read(step)
            at_end = position + len(window) >= source.size
            end = delimiter.first_end(window, final=at_end)
            if end >= 0 and position + end >= nominal:
                return position + end
            if end >= 0:
                position = nominal
                continue
            if at_end:
                return source.size
            position += len(window) - delimiter.overlap(window)
            step = min(2 * step, _MAX_SEARCH_BYTES)
        return None

    def _find_search_start(self, file: BinaryIO, nominal: int, read_method: ReadMethod) -> int:
        """Return the search start that finds a record beginning exactly at ``nominal``."""
        if read_method in ("jsonl", "line"):
            return nominal - 1
        start = max(0, nominal - self._rules.limits.reach_bytes)
        file.seek(start)
        window = file.read(nominal - start)
        if read_method == "paragraph":
            return nominal - (len(window) - len(window.rstrip(b" \t\r\n")))
        # Marks match from left to right without overlaps, so earlier marks matter too.
        mark, position = self._rules.split_on.encode(), 0
        while (mark_start := window.find(mark, position)) >= 0:
            position = mark_start + len(mark)
        if position == len(window):
            return nominal - len(mark)
        return start + max(position, len(window) - len(mark) + 1)
