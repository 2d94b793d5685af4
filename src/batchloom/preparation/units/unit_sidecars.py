"""Parts of a unit's documents beside the tokens, and the end of its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.units.unit_columns import (
    COLUMNS_NAME,
    FIELD_NAMES,
    UnitColumns,
    read_unit_columns,
    read_unit_fields,
)
from batchloom.preparation.units.unit_media import MEDIA_NAMES, read_unit_media
from batchloom.preparation.units.unit_rows import tokens_file_name, trained_file_name
from batchloom.preparation.units.work_folder import ROWS_NAME, SIGNATURES_NAME, translate_read_errors
from batchloom.store import ShardMedia, wrap_write_errors
from batchloom.store.format import SUBSETS, Banding, DocumentFields, MinHashSignatures

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK_FLAGS = 1 << 20


class UnitSidecars(NamedTuple):
    """Further parts of documents; None for a part that none of them has."""

    signatures: MinHashSignatures | None = None
    media: ShardMedia | None = None
    fields: DocumentFields | None = None
    columns: UnitColumns | None = None

    def take(
        self, documents: NDArray[np.int64], rows: NDArray[np.void]
    ) -> tuple[MinHashSignatures | None, ShardMedia | None, DocumentFields | None, "pa.Table | None"]:
        """Return those of some documents.

        Args:
            documents: their numbers in the unit, ascending, int64 [D].
            rows: their rows, [D].
        """
        return (
            None if self.signatures is None else self.signatures.take(documents),
            None if self.media is None else self.media.take(documents),
            None if self.fields is None else self.fields.take(documents),
            None if self.columns is None else self.columns.take(rows),
        )


def read_unit_sidecars(folder: Path, banding: Banding | None) -> UnitSidecars:
    """Read the further parts of a unit's documents, with signatures of this banding."""
    return UnitSidecars(
        _map_unit_signatures(folder, banding),
        read_unit_media(folder),
        read_unit_fields(folder),
        read_unit_columns(folder),
    )


def _map_unit_signatures(folder: Path, banding: Banding | None) -> MinHashSignatures | None:
    """Map the signatures of a unit's documents; None if none are stored."""
    if banding is None:
        return None
    keys = _map_array(folder / SIGNATURES_NAME, np.dtype("<u8"))
    return MinHashSignatures(keys.reshape(-1, banding.bands), banding)


def iter_flags(folder: Path, subset: str) -> Iterator[LossFlags]:
    """Yield the flags of a subset; none if all its tokens are trained."""
    path = folder / trained_file_name(subset)
    if path.exists():
        with translate_read_errors(path), path.open("rb") as file:
            while (codes := np.fromfile(file, np.uint8, _CHUNK_FLAGS)).size:
                yield LossFlags.from_codes(codes)


def _map_array(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    with translate_read_errors(path):
        if not path.stat().st_size:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r").view(np.ndarray)


def delete_temporary_files(folder: Path) -> None:
    """Delete the files of a unit that its shards replace."""
    with wrap_write_errors(folder):
        for name in (
            ROWS_NAME,
            SIGNATURES_NAME,
            *MEDIA_NAMES,
            *FIELD_NAMES,
            COLUMNS_NAME,
            *map(tokens_file_name, SUBSETS),
            *map(trained_file_name, SUBSETS),
        ):
            (folder / name).unlink(missing_ok=True)
