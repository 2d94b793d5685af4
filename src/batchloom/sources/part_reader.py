"""Reading one part of a source as records."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Self, final

from batchloom.core.document import Records
from batchloom.core.errors import InputError
from batchloom.sources.files import (
    Begin,
    Part,
    PartStream,
    ReadRules,
    Source,
    Way,
    splittable,
    way_of,
)
from batchloom.sources.formats import (
    read_csv,
    read_cut,
    read_delimited,
    read_json,
    read_jsonl,
    read_samples,
    read_whole,
)
from batchloom.sources.record_bounds import RecordBounds, open_table

# What needs to know of a part no more than its bytes.
_READERS: dict[Way, Callable[[PartStream, ReadRules], Iterator[Records]]] = {
    "jsonl": read_jsonl,
    "samples": read_samples,
    "file": read_whole,
    "cut": read_cut,
}


def parts_of(source: Source, rules: ReadRules, unit_bytes: int) -> list[Part]:
    """The nominal parts of a source: cut at multiples of ``unit_bytes`` where it can be."""
    if not splittable(source, rules):
        return [Part(source, 0, source.size)]
    places = [*range(0, source.size, unit_bytes), source.size]
    return [Part(source, a, b) for a, b in pairwise(places)]


@final
class PartReader:
    """Opens a part and gives its records, in order; use as a context manager.

    Args:
        part: the stretch to read.
        rules: how records are found in it.
        bounds: moves the ends of a nominal part to where records begin; None where they do.

    Attributes:
        start: the part's first byte in the (decompressed) source.
        stop: one after its last byte; of a compressed source known after ``finish``.

    Raises:
        InputError: the source cannot be read or has changed.
    """

    def __init__(self, part: Part, rules: ReadRules, bounds: RecordBounds | None = None) -> None:
        source = part.source
        self._rules, self._way = rules, way_of(source, rules)
        self.start, self.stop = part.start, part.stop
        self._begin: Begin | None = None
        if bounds is not None and splittable(source, rules):
            self.start, self.stop = bounds.at(source, part.start), bounds.at(source, part.stop)
            self._begin = bounds.begin(source, part.start)
        # The bytes of a table are hashed by the stream; what reads it jumps about in them.
        self._table = open_table(source) if self._way == "table" else None
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
        if read := _READERS.get(self._way):
            return read(self._stream, self._rules)
        if self._table is not None:
            return self._table.read(self.start, self.stop, self._rules)
        if self._way == "csv":
            return read_csv(self._stream, self._rules, self._begin)
        if self._way == "json":
            return read_json(self._stream, self._rules, self._begin)
        return read_delimited(self._stream, self._rules, self._way)

    def _close_table(self) -> None:
        if self._table is not None:
            self._table.close()

    @property
    def consumed(self) -> int:
        """Bytes of the listed file that were read so far."""
        return self._stream.consumed if self._table is None else self._table.consumed

    def finish(self) -> bytes:
        """Read what is left; the XXH3-128 of the part's bytes after decompression, 16 bytes.

        Raises:
            InputError: the file was changed while it was read.
        """
        digest = self._stream.finish()
        self.stop = self._stream.position
        return digest
