"""Reader of the records in one part of a source."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Self, final

from batchloom.core.document import Records
from batchloom.core.errors import InputError
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import (
    PartStart,
    ReadMethod,
    ReadRules,
    Source,
    SourcePart,
    choose_read_method,
    is_splittable,
)
from batchloom.sources.formats.csv_format import read_csv
from batchloom.sources.formats.json_list_format import read_json
from batchloom.sources.formats.jsonl_format import read_jsonl
from batchloom.sources.formats.text_format import read_cut, read_delimited, read_text_file
from batchloom.sources.formats.webdataset_format import read_samples
from batchloom.sources.record_bounds import RecordBounds, open_table

# Readers that need only the bytes of a part.
_READER_BY_METHOD: dict[ReadMethod, Callable[[PartStream, ReadRules], Iterator[Records]]] = {
    "jsonl": read_jsonl,
    "samples": read_samples,
    "file": read_text_file,
    "cut": read_cut,
}


def split_source(source: Source, rules: ReadRules, unit_bytes: int) -> list[SourcePart]:
    """Return the nominal parts of a source.

    A splittable source is cut at multiples of ``unit_bytes``, any other is one part.
    """
    if not is_splittable(source, rules):
        return [SourcePart(source, 0, source.size)]
    cut_offsets = [*range(0, source.size, unit_bytes), source.size]
    return [SourcePart(source, a, b) for a, b in pairwise(cut_offsets)]


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
        self._rules, self._method = rules, choose_read_method(source, rules)
        self.start, self.stop = part.start, part.stop
        self._begin: PartStart | None = None
        if bounds is not None and is_splittable(source, rules):
            self.start, self.stop = bounds.find_bound(source, part.start), bounds.find_bound(source, part.stop)
            self._begin = bounds.begin(source, part.start)
        # The stream hashes the bytes of a table in order; the table reader needs random access.
        self._table = open_table(source) if self._method == "table" else None
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
        if self.start == self.stop:
            return iter(())
        if read_records := _READER_BY_METHOD.get(self._method):
            return read_records(self._stream, self._rules)
        if self._table is not None:
            return self._table.read(self.start, self.stop, self._rules)
        if self._method == "csv":
            return read_csv(self._stream, self._rules, self._begin)
        if self._method == "json":
            return read_json(self._stream, self._rules, self._begin)
        return read_delimited(self._stream, self._rules, self._method)

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
