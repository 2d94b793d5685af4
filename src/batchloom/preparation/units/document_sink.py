"""Protocols of the input and the output of a tokenized unit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.core.loss_weights import TokenFlags
from batchloom.preparation.documents.chat_encoding import PlacedMedium


class DocumentSink(Protocol):
    """Protocol for the output of documents and bad records, like :class:`UnitFiles`."""

    def add(
        self,
        tokens: NDArray[np.generic],
        rows: NDArray[np.void],
        codes: NDArray[np.uint8],
        trained: TokenFlags | None = None,
        *,
        added: tuple[int, int] = (0, 0),
        plain: tuple[NDArray[np.generic], NDArray[np.uint32]] | None = None,
        media: Sequence[Sequence[PlacedMedium]] = (),
    ) -> None:
        """Add documents."""

    def add_fields(self, fields: Sequence[bytes]) -> None:
        """Add the columns that the next documents carry; none if they carry none."""

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
