r"""The ``.docs`` file: source record and text hash of each document of a shard.

Layout (little-endian): 8 bytes ``BLMDOCS\0``; u64 version 1; u64 documents D; u64 zero; then
the columns hash u64 [D, 2] (low half, high half), record u64 [D], offset u64 [D], part u32 [D].
Every column begins at a multiple of 8 bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.manifest import SourceEntry
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, HEADER, make_wrong_format_error, map_file_with_header

MAGIC = b"BLMDOCS\x00"
PROVENANCE_ROW_BYTES = 36


@dataclass(frozen=True, slots=True)
class DocumentProvenance:
    """Provenance of one document.

    Attributes:
        source: name of the input file, relative to the inputs.
        record: 0-based number of the record in that file.
        offset: byte offset of the record in that file, after decompression.
        line: 1-based line number, for files with one record per line; else None.
        hash: XXH3-128 of the document's UTF-8 text, 32 hex digits.
    """

    source: str
    record: int
    offset: int
    line: int | None
    hash: str

    @property
    def position(self) -> str:
        """Line or row of the record, counted from 1."""
        return f"line {self.line:,}" if self.line is not None else f"row {self.record + 1:,}"


@dataclass(frozen=True, slots=True)
class ProvenanceTable:
    """Provenance and hash of documents, in columns of equal length D."""

    hashes: NDArray[np.uint64]  # XXH3-128 of each document's UTF-8 text as (low, high) halves, uint64 [D, 2]
    records: NDArray[np.uint64]  # 0-based number of the record inside its part of the source, uint64 [D]
    offsets: NDArray[np.uint64]  # byte offset of the record in the (decompressed) source, uint64 [D]
    parts: NDArray[np.uint32]  # index into the manifest's list of parts, uint32 [D]

    def __len__(self) -> int:
        return len(self.records)

    def take(self, selection: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """Return the rows ``selection`` (indices or a mask), in that order."""
        return type(self)(
            self.hashes[selection], self.records[selection], self.offsets[selection], self.parts[selection]
        )

    def to_bytes(self) -> bytes:
        """Return the complete ``.docs`` file."""
        columns = ([self.hashes], [self.records], [self.offsets], [self.parts])
        return b"".join(iter_provenance_chunks(len(self), columns))


def iter_provenance_chunks(count: int, columns: Sequence[Iterable[NDArray[np.generic]]]) -> Iterator[bytes]:
    """Yield the bytes of a ``.docs`` file without needing all columns in memory."""
    yield HEADER.pack(MAGIC, 1, count, 0)
    for column, dtype in zip(columns, ("<u8", "<u8", "<u8", "<u4"), strict=True):
        for chunk in column:
            yield chunk.astype(dtype).tobytes()


def locate_provenance_columns(count: int) -> list[tuple[int, int]]:
    """Return byte offset and row size of each column of a ``.docs`` file."""
    offset = HEADER.size
    return [(offset, 16), (offset + 16 * count, 8), (offset + 24 * count, 8), (offset + 32 * count, 4)]


def map_provenance(path: Path, view: memoryview | None = None) -> ProvenanceTable:
    """Read a ``.docs`` file; the columns are views of its content.

    Args:
        path: path of the file, for errors if the content is given.
        view: content of the file; None to map it.

    Raises:
        StoreError: the file is missing, of another type or version, or its count does not
            match its size.
    """
    view, count, zero = map_file_with_header(path, MAGIC, view)
    if zero:
        raise make_wrong_format_error(path)
    if len(view) != HEADER.size + PROVENANCE_ROW_BYTES * count:
        raise StoreError(f"{path} declares {count} documents, which do not fit its {len(view)} bytes.")
    offset = HEADER.size
    return ProvenanceTable(
        hashes=np.frombuffer(view, "<u8", 2 * count, offset).reshape(count, 2),
        records=np.frombuffer(view, "<u8", count, offset + 16 * count),
        offsets=np.frombuffer(view, "<u8", count, offset + 24 * count),
        parts=np.frombuffer(view, "<u4", count, offset + 32 * count),
    )


class PartTable(NamedTuple):
    """Source, record count and preceding records of every part of a store.

    ``numbers`` holds source indices; ``preceding_records`` counts the records of the same source before the part.
    """

    sources: Sequence[SourceEntry]
    numbers: NDArray[np.int64]
    records: NDArray[np.int64]
    preceding_records: NDArray[np.int64]

    def resolve_provenance(self, provenance: ProvenanceTable) -> list[DocumentProvenance]:
        """Look up source names and record numbers of documents."""
        invalid_rows = np.flatnonzero(provenance.records >= self.records[provenance.parts].astype(np.uint64))
        if invalid_rows.size:
            row = int(invalid_rows[0])
            part = int(provenance.parts[row])
            raise StoreError(
                f"A document names record {int(provenance.records[row]):,} of a part of "
                f"{self.sources[int(self.numbers[part])].name} that has {int(self.records[part]):,}: its .docs file "
                f"is damaged. {CHECK_REMEDY}"
            )
        documents = []
        columns = (provenance.parts, provenance.records, provenance.offsets, provenance.hashes)
        for part, record, offset, halves in zip(*(column.tolist() for column in columns), strict=True):
            source = self.sources[int(self.numbers[part])]
            number = int(self.preceding_records[part]) + record
            line = number + 1 if source.kind == "jsonl" else None
            name = f"{(halves[1] << 64) | halves[0]:032x}"
            documents.append(DocumentProvenance(source.name, number, offset, line, name))
        return documents


def make_part_table(sources: Sequence[SourceEntry]) -> PartTable:
    """Return the source and the preceding records of each part of a store."""
    sizes = np.array([len(source.parts) for source in sources], np.int64)
    records = np.array([part.records for source in sources for part in source.parts], np.int64)
    numbers = np.repeat(np.arange(len(sources)), sizes)
    all_before = np.cumsum(records) - records
    firsts = np.cumsum(sizes) - sizes
    first = all_before[np.minimum(firsts, max(len(records) - 1, 0))] if len(records) else firsts
    return PartTable(sources, numbers, records, all_before - np.repeat(first, sizes))
