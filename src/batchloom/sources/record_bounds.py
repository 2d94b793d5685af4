"""Where parts of a large source meet: the records that begin at or after nominal places.

A function of the bytes around the place alone, so that parts can be read in any order and give the
same documents.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, BinaryIO, final

from batchloom.sources.files import (
    PartStart,
    ReadMethod,
    ReadRules,
    Source,
    choose_read_method,
    is_sequential,
    open_source,
)
from batchloom.sources.formats import (
    KnownCut,
    SequentialCuts,
    find_best_cut,
    find_character_start,
    make_delimiter,
    require_no_crash,
)

if TYPE_CHECKING:
    from batchloom.sources.formats import TableReader

_FIRST_SEARCH_BYTES = 64 << 10
_MAX_SEARCH_BYTES = 8 << 20


def open_table(source: Source) -> "TableReader":
    """Open a columnar source; what reads it is loaded with the first one.

    Raises:
        InputError: it cannot be read, or is not sound.
    """
    file = open_source(source)
    try:
        require_no_crash(source, file)
        from batchloom.sources.formats import TableReader  # noqa: PLC0415 - pyarrow takes half a second

        return TableReader(source, file)
    except BaseException:
        file.close()
        raise


@final
class RecordBounds:
    """Finds the first record that begins at or after a nominal place of a source.

    Remembers the last gap it crossed, so that one enormous record is not searched through
    again for every nominal place inside it.
    """

    def __init__(self, rules: ReadRules) -> None:
        self._rules = rules
        self._gap: tuple[str, int, int] = ("", 0, 0)
        self._starts: tuple[str, list[int]] = ("", [])
        self._cuts: SequentialCuts | None = None
        self._told: dict[tuple[str, int], PartStart | None] = {}

    def tell(self, cuts: Iterable[KnownCut]) -> None:
        """Take cuts that somebody found, in place of those told before: no source is read for them."""
        self._told = {(path, nominal): begin for path, nominal, begin in cuts}

    def at(self, source: Source, nominal: int) -> int:
        """The true bound for a nominal one; the source's size where no record begins after it."""
        if nominal <= 0 or nominal >= source.size:
            return max(0, min(nominal, source.size))
        if is_sequential(source, self._rules):
            begin = self.begin(source, nominal)
            return source.size if begin is None else begin.offset
        if choose_read_method(source, self._rules) == "table":
            found = self.within(source, nominal, source.size)
            return source.size if found is None else found
        path, start, stop = self._gap
        # Near the ends of the gap the bytes outside it count too: there it is looked up again.
        reach = self._rules.limits.reach_bytes
        if path == source.path and start + reach <= nominal <= stop - reach:
            return stop
        found = self.within(source, nominal, source.size)
        bound = source.size if found is None else found
        if choose_read_method(source, self._rules) != "cut":
            self._gap = (source.path, nominal, bound)
        return bound

    def begin(self, source: Source, nominal: int) -> PartStart | None:
        """What a reader must know to begin at the bound of a nominal place inside of a source.

        None where no record begins there, and for sources whose records can be told by what
        they begin with.
        """
        if not 0 < nominal < source.size or not is_sequential(source, self._rules):
            return None
        if (source.path, nominal) in self._told:
            return self._told[source.path, nominal]
        if self._cuts is None or self._cuts.source != source:
            self._cuts = SequentialCuts(source, self._rules)
        return self._cuts.at(nominal)

    def within(self, source: Source, nominal: int, limit: int) -> int | None:
        """The same, looked for no further than byte ``limit``; None where none was found."""
        if choose_read_method(source, self._rules) == "table":
            starts = self.starts(source)
            at = bisect_left(starts, nominal)
            return starts[at] if at < len(starts) and starts[at] < limit else None
        with open_source(source) as file:
            if choose_read_method(source, self._rules) == "cut":
                return self._cut(file, nominal)
            return self._record(file, source, nominal, limit)

    def starts(self, source: Source) -> list[int]:
        """Where the groups of rows of a columnar source begin."""
        path, starts = self._starts
        if path != source.path:
            with open_table(source) as table:
                starts = table.starts
            self._starts = (source.path, starts)
        return starts

    def _cut(self, file: BinaryIO, nominal: int) -> int:
        file.seek(nominal)
        window = file.read(self._rules.limits.reach_bytes)
        cut = find_best_cut(window, 0, len(window))
        return nominal + (find_character_start(window, 0) if cut is None else cut)

    def _record(self, file: BinaryIO, source: Source, nominal: int, limit: int) -> int | None:
        way = choose_read_method(source, self._rules)
        delimiter = make_delimiter(way, self._rules)
        at, step = self._search_from(file, nominal, way), _FIRST_SEARCH_BYTES
        while at < limit:
            file.seek(at)
            window = file.read(step)
            final = at + len(window) >= source.size
            end = delimiter.first_end(window, final=final)
            if end >= 0 and at + end >= nominal:
                return at + end
            if end >= 0:
                at = nominal
                continue
            if final:
                return source.size
            at += len(window) - delimiter.overlap(window)
            step = min(2 * step, _MAX_SEARCH_BYTES)
        return None

    def _search_from(self, file: BinaryIO, nominal: int, way: ReadMethod) -> int:
        """Where to begin, so that a record which begins exactly at ``nominal`` is found."""
        if way in ("jsonl", "line"):
            return nominal - 1
        start = max(0, nominal - self._rules.limits.reach_bytes)
        file.seek(start)
        window = file.read(nominal - start)
        if way == "paragraph":
            return nominal - (len(window) - len(window.rstrip(b" \t\r\n")))
        # Marks are matched from left to right without overlaps, so the ones before count too.
        mark, at = self._rules.split_on.encode(), 0
        while (found := window.find(mark, at)) >= 0:
            at = found + len(mark)
        if at == len(window):
            return nominal - len(mark)
        return start + max(at, len(window) - len(mark) + 1)
