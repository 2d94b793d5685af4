"""Protocols of the input and the output of a tokenized unit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.preparation.documents.encoded_batch import EncodedBatch


class DocumentSink(Protocol):
    """Protocol for the output of documents and bad records, like :class:`UnitFiles`."""

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        """Add documents, with their rows and the codes of their subsets."""

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the columns of the next records of a part, by record."""

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        """Add bad records."""

    def checksums(self) -> dict[str, str]:
        """Return the XXH3-128 of each token file; empty if there are none."""


class PartRecordReader(Protocol):
    """Protocol for the records of a part, like :class:`PartReader`."""

    @property
    def consumed(self) -> int:
        """Number of bytes read so far."""

    @property
    def start(self) -> int:
        """Offset of the part's first byte."""

    @property
    def stop(self) -> int:
        """Offset after the part's last byte."""

    def __iter__(self) -> Iterator[Records]: ...

    def finish(self) -> bytes:
        """Read the rest and return the hash of the part's bytes."""
