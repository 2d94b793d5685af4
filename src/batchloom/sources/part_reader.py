"""Parts of sources: their boundaries, their records, and positions of records.

A boundary depends only on the bytes around the offset, so parts can be read in any order and give the same documents.
"""

import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, BinaryIO, Self, cast, final

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, RecordError, make_record_error
from batchloom.core.files import describe_os_error
from batchloom.core.fingerprint import derive_key
from batchloom.core.wording import shorten
from batchloom.sources.files.file_opening import UTF8_FIRST
from batchloom.sources.files.part_stream import PartStream, ReadRules, Source, SourcePart, open_source
from batchloom.sources.formats.format_registry import get_read_method, is_splittable
from batchloom.sources.formats.record_faults import name_encoding
from batchloom.sources.formats.table_probe import require_no_crash
from batchloom.sources.formats.text_format import NEWLINE, Delimiter, find_best_cut, find_character_start

if TYPE_CHECKING:
    from batchloom.sources.formats.table_format import TableReader

_FIRST_SEARCH_BYTES = 64 << 10
_MAX_SEARCH_BYTES = 8 << 20
_SPOOL_BYTES = 1 << 20
_MAX_SNIPPET_LENGTH = 60


def split_source(source: Source, rules: ReadRules, unit_bytes: int) -> list[SourcePart]:
    """Return the nominal parts of a source.

    A splittable source is cut at multiples of ``unit_bytes``, any other is one part.
    """
    if not is_splittable(source, rules):
        return [SourcePart(source, 0, source.size)]
    cut_offsets = [*range(0, source.size, unit_bytes), source.size]
    return [SourcePart(source, a, b) for a, b in pairwise(cut_offsets)]


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

    def find_bound(self, source: Source, nominal: int) -> int:
        """Return the bound for a nominal offset; the source's size if no record follows."""
        if nominal <= 0 or nominal >= source.size:
            return max(0, min(nominal, source.size))
        cut_rule = get_read_method(source, self._rules).cut
        path, start, stop = self._gap
        # Near the ends of the gap the result also depends on bytes outside it, so it is searched again.
        reach = self._rules.limits.reach_bytes
        if cut_rule == "delimiter" and path == source.path and start + reach <= nominal <= stop - reach:
            return stop
        record_start = self.find_bound_within(source, nominal, source.size)
        bound = source.size if record_start is None else record_start
        if cut_rule == "delimiter":
            self._gap = (source.path, nominal, bound)
        return bound

    def find_bound_within(self, source: Source, nominal: int, limit: int) -> int | None:
        """Return the bound below byte ``limit``, or None if there is none."""
        method = get_read_method(source, self._rules)
        if method.cut == "row groups":
            starts = self.starts(source)
            index = bisect_left(starts, nominal)
            return starts[index] if index < len(starts) and starts[index] < limit else None
        with open_source(source) as file:
            if method.delimiter is None:
                return self._find_text_cut(file, nominal)
            return self._find_record(file, source, method.delimiter(self._rules), nominal, limit)

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

    def _find_record(
        self, file: BinaryIO, source: Source, delimiter: Delimiter, nominal: int, limit: int
    ) -> int | None:
        position = self._find_search_start(file, nominal, delimiter)
        step = _FIRST_SEARCH_BYTES
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

    def _find_search_start(self, file: BinaryIO, nominal: int, delimiter: Delimiter) -> int:
        """Return the search start that finds a record beginning exactly at ``nominal``."""
        if delimiter is NEWLINE:
            return nominal - 1
        start = max(0, nominal - self._rules.limits.reach_bytes)
        file.seek(start)
        return nominal - delimiter.count_reread(file.read(nominal - start))


def open_table(source: Source) -> "TableReader":
    """Open a columnar source; the reader is imported on first use.

    Raises:
        InputError: it cannot be read, or is damaged.
    """
    file = open_source(source) if source.member is None or source.member.direct else _spool(source)
    try:
        require_no_crash(source, file)
        from batchloom.sources.formats.table_format import TableReader

        return TableReader(source, file)
    except BaseException:
        file.close()
        raise


def _spool(source: Source) -> BinaryIO:
    """Copy a compressed member of an archive to a temporary file, for random access."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with PartStream(source) as stream:
            while data := stream.read(_SPOOL_BYTES):
                file.write(data)
            stream.finish()
        file.seek(0)
    except InputError:
        file.close()
        raise
    except OSError as error:
        file.close()
        reason = describe_os_error(error)
        raise InputError(f"{source.name} cannot be copied to {tempfile.gettempdir()}: {reason}.") from error
    return cast("BinaryIO", file)


@final
class PartReader:
    """Context manager that opens a part and iterates over its records in order.

    Args:
        part: byte range to read.
        rules: rules that split it into records.
        bounds: moves the ends of a nominal part to record boundaries; None if they are there already.

    Attributes:
        start: first byte of the part in the (decompressed) source.
        stop: byte after its last; for a compressed source known only after ``finish``.

    Raises:
        InputError: the source cannot be read or has changed.
    """

    def __init__(self, part: SourcePart, rules: ReadRules, bounds: RecordBounds | None = None) -> None:
        source = part.source
        self._rules = rules
        self._method = get_read_method(source, rules)
        self._sample = source.sample
        self.start = part.start
        self.stop = part.stop
        if bounds is not None and is_splittable(source, rules):
            self.start = bounds.find_bound(source, part.start)
            self.stop = bounds.find_bound(source, part.stop)
        # The stream hashes the bytes of a table in order; the table reader needs random access.
        self._table = open_table(source) if self._method.read is None else None
        try:
            self._stream = PartStream(source, self.start, self.stop)
        except InputError:
            self._close_table()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.__exit__(*exc)
        self._close_table()

    def __iter__(self) -> Iterator[Records]:
        batches = self._iter_batches()
        if encoding := self._stream.source.encoding.removeprefix(UTF8_FIRST):
            batches = map(partial(name_encoding, encoding=encoding), batches)
        return batches if self._sample is None else self._sample.filter_batches(batches)

    def _iter_batches(self) -> Iterator[Records]:
        if self.start == self.stop:
            return iter(())
        if self._table is not None:
            return self._table.read(self.start, self.stop, self._rules)
        if self._method.read is None:
            raise AssertionError("only tables are read by random access")
        return self._method.read(self._stream, self._rules)

    def _close_table(self) -> None:
        if self._table is not None:
            self._table.close()

    @property
    def consumed(self) -> int:
        """Number of bytes of the listed file read so far."""
        return self._stream.consumed if self._table is None else self._table.consumed

    def finish(self) -> bytes:
        """Read the rest and return the XXH3-128 of the decompressed part, 16 bytes.

        Raises:
            InputError: the file was changed while it was read.
        """
        digest = self._stream.finish()
        self.stop = self._stream.position
        return digest


def locate_record(
    source: Source, rules: ReadRules, records_before: int | None, bad_record: BadRecord
) -> tuple[int | None, int | None]:
    """Return the 1-based line and row of a bad record, None where not applicable.

    Args:
        source: source of the record.
        rules: read rules of the source.
        records_before: number of records in the source before the part; None if not counted.
        bad_record: the record.
    """
    numbers = get_read_method(source, rules).numbers
    number = None if records_before is None else records_before + bad_record.record + 1
    if numbers == "line":
        return number, None
    return bad_record.line, number if numbers == "row" else None


def make_bad_record_error(
    source: Source, rules: ReadRules, records_before: int | None, bad_record: BadRecord
) -> RecordError:
    """Return the error for a bad record: location, reason with remedy, and snippet.

    If the records before it are not counted, the location is a byte offset.
    """
    line, row = locate_record(source, rules, records_before, bad_record)
    snippet = shorten(bad_record.snippet, _MAX_SNIPPET_LENGTH)
    # Escapes of raw bytes must not be escaped again.
    quoted_snippet = f"'{snippet}'" if snippet.isprintable() and "'" not in snippet else repr(snippet)
    verb = "reads" if snippet.startswith("...") else "begins"
    reason = f"{bad_record.reason} (it {verb} {quoted_snippet})" if snippet else bad_record.reason
    if records_before is None and line is None and row is None:
        reason = f"{reason} (at byte {bad_record.offset:,})"
    return make_record_error(source.name, line, bad_record.column, reason, row)


def format_record_name(source: Source, rules: ReadRules, records_before: int | None, record: BadRecord) -> str:
    """Return the name of a record: its file with its line, row or byte offset."""
    line, row = locate_record(source, rules, records_before, record)
    if line is not None:
        return f"{source.name}, line {line:,}"
    position = f"row {row:,}" if row is not None else f"byte {record.offset:,}"
    return f"{source.name}, {position}"


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A byte range of a source to sample.

    Attributes:
        part: range that begins and ends at record boundaries.
        position_count: number of positions that the part covers, if only that many probes of its
            beginning are read; None if the part is one probe long and is read completely.
    """

    part: SourcePart
    position_count: int | None = None


def iter_sample_ranges(
    sources: Sequence[Source],
    rules: ReadRules,
    count: int,
    size: int,
    is_usable: Callable[[Source], bool] = lambda _: True,
) -> Iterator[tuple[int, SampleRange]]:
    """Yield probes at ``count`` positions of the input, each with its source number.

    Uncompressed files are sampled at the positions themselves. Compressed files and files of one
    document are sampled at their beginning, and tables at the beginnings of row groups.

    Args:
        sources: the inputs.
        rules: rules that split the inputs into records.
        count: number of positions.
        size: bytes per probe.
        is_usable: whether a source of some positions can be opened; others are left out.
    """
    sizes = [source.size for source in sources]
    for number, offsets in _choose_positions(sizes, count, size).items():
        if not is_usable(sources[number]):
            continue
        for probe in _sample_source(sources[number], rules, offsets, size):
            yield number, probe


def _choose_positions(sizes: Sequence[int], count: int, size: int) -> dict[int, list[int]]:
    """Choose one position in each of ``count`` equal ranges; return offsets by source."""
    ends = list(accumulate(sizes))
    total = ends[-1]
    offsets_by_source: dict[int, list[int]] = {}
    for i in range(count):
        low = total * i // count
        high = total * (i + 1) // count
        position = low + derive_key("sample", total, size, i)[0] % max(high - low, 1)
        number = bisect_right(ends, position)
        offsets_by_source.setdefault(number, []).append(position - ends[number] + sizes[number])
    return offsets_by_source


def _sample_source(source: Source, rules: ReadRules, offsets: Sequence[int], size: int) -> Iterator[SampleRange]:
    cut_rule = get_read_method(source, rules).cut
    if not is_splittable(source, rules):
        yield SampleRange(SourcePart(source, 0, source.size), len(offsets))
        return
    bounds = RecordBounds(rules)
    read_to = 0
    if cut_rule == "row groups":
        starts = bounds.starts(source)
        hits = Counter(max(0, bisect_right(starts, offset) - 1) for offset in offsets)
        for group, times in sorted(hits.items()):
            yield SampleRange(SourcePart(source, starts[group], starts[group] + 1), times)
        return
    for offset in offsets:
        start = _find_bound(bounds, source, max(offset, read_to), size)
        if start is None:
            continue
        stop = _find_bound(bounds, source, start + size, size)
        if stop is not None:
            read_to = stop
            yield SampleRange(SourcePart(source, start, stop))


def _find_bound(bounds: RecordBounds, source: Source, nominal: int, size: int) -> int | None:
    if nominal <= 0 or nominal >= source.size:
        return min(max(nominal, 0), source.size)
    return bounds.find_bound_within(source, nominal, nominal + size)
