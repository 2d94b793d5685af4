r"""The ``.fields`` file: columns that the documents of a shard carry, as JSON.

Layout (little-endian): 8 bytes ``BLMFELD\0``; u64 version 1; u64 documents D; u64 bytes of JSON P; then the end of
each document's JSON, u64 [D], ascending; then P bytes: one JSON object per document, back to back, in UTF-8.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, HEADER, read_header

_MAGIC = b"BLMFELD\x00"


@final
@dataclass(frozen=True, slots=True)
class DocumentFields:
    """Carried columns of documents.

    Attributes:
        ends: end of the JSON of each document in ``data``, uint64 [D].
        data: JSON objects, back to back, as a buffer of bytes.
        name: name of their file, for messages.
    """

    ends: NDArray[np.uint64]
    data: Any
    name: str = ""

    def __len__(self) -> int:
        return len(self.ends)

    def _get_range(self, document: int) -> tuple[int, int]:
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])

    def read(self, document: int) -> dict[str, Any]:
        """Return the columns of a document, by its number in the shard."""
        begin, end = self._get_range(document)
        try:
            fields = json.loads(bytes(self.data[begin:end]))
        except ValueError as error:
            raise StoreError(
                f"{self.name}: the columns of document {document} are no JSON: {error}. {CHECK_REMEDY}"
            ) from error
        if not isinstance(fields, dict):
            raise StoreError(f"{self.name}: the columns of document {document} are no JSON object. {CHECK_REMEDY}")
        return fields

    def list_texts(self) -> list[str]:
        """Return the JSON of each document."""
        return [str(bytes(self.data[a:b]), "utf-8") for a, b in map(self._get_range, range(len(self)))]

    def take(self, documents: NDArray[np.int64]) -> "DocumentFields":
        """Return the columns of some documents, int64 [D], in that order."""
        chunks = [bytes(self.data[a:b]) for a, b in map(self._get_range, documents.tolist())]
        return DocumentFields(np.cumsum([len(chunk) for chunk in chunks], dtype=np.uint64), b"".join(chunks))

    def to_bytes(self) -> bytes:
        """Return the complete ``.fields`` file."""
        header = HEADER.pack(_MAGIC, 1, len(self), len(self.data))
        return header + self.ends.astype("<u8").tobytes() + bytes(self.data)


def map_fields(path: Path, documents: int) -> DocumentFields:
    """Map and verify the ``.fields`` file of a shard of ``documents`` documents.

    Raises:
        StoreError: the file is missing, of another type or version, or contradicts itself.
    """
    return parse_fields(map_file(path), path, documents)


def parse_fields(view: memoryview, path: Path, documents: int) -> DocumentFields:
    """Parse the content of a ``.fields`` file; see :func:`map_fields`."""
    count, size = read_header(view, path, _MAGIC)
    start = HEADER.size + 8 * count
    if count != documents or len(view) != start + size:
        raise StoreError(
            f"{path} declares {count:,} documents in {len(view):,} bytes; its shard has {documents:,}. {CHECK_REMEDY}"
        )
    ends = np.frombuffer(view, "<u8", count, HEADER.size)
    if count and (int(ends[-1]) != size or (ends[1:] < ends[:-1]).any()):
        raise StoreError(f"{path} has ends that are out of order or beyond its bytes. {CHECK_REMEDY}")
    return DocumentFields(ends, view[start:], str(path))
