"""Near duplicates: documents that agree in a band, then everything that hangs together.

The way of a unit: :func:`~batchloom.preparation.dedup.band_keys` gives a key a band for each document,
which a file keeps (little-endian u64 [D, bands], nothing else); when the exact duplicates are known,
:func:`write_signature_keys` sorts the keys of those that stay; :func:`~batchloom.preparation.dedup.find` links
each document to the first with its key, and :func:`~batchloom.preparation.dedup.components` says who goes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import OutputError
from batchloom.core.files import release_pages
from batchloom.preparation.dedup.duplicate_search import read_unit_duplicates
from batchloom.preparation.dedup.key_files import describe_io_errors
from batchloom.preparation.dedup.minhash import NO_KEY
from batchloom.preparation.dedup.sorted_keys import SIGNATURE_KEY, open_key_writer

# Keys that are laid out at once.
_CHUNK_KEYS = 1 << 20


def map_signatures(path: Path, bands: int) -> NDArray[np.uint64]:
    """Map the file of the band keys of a unit, uint64 [D, bands].

    Raises:
        OutputError: it cannot be read, or does not hold so many keys a document.
    """
    with describe_io_errors(path):
        size = path.stat().st_size
        if size % (8 * bands):
            raise OutputError(
                f"{path} has {size:,} bytes, no multiple of {8 * bands} for {bands} bands a document: it was cut, "
                "or written with another number of bands; remove it, then give the same command again."
            )
        if not size:
            return np.zeros((0, bands), np.uint64)
        return np.memmap(path, "<u8", "r").view(np.ndarray).reshape(-1, bands)


def write_signature_keys(
    path: Path,
    signatures: NDArray[np.uint64],
    parts: NDArray[np.uint32],
    exact: Sequence[Path] = (),
    unit: int = 0,
    excluded: NDArray[np.int64] | None = None,
) -> None:
    """Write the keys of one unit as :func:`~batchloom.preparation.dedup.find` takes them, SIGNATURE_KEY.

    Args:
        path: the file to write.
        signatures: keys of the unit's documents by number [D, bands], as :func:`map_signatures` maps them.
        parts: the place of each document's file part in the unit [D].
        exact: what was found of exact duplicates; they take no part.
        unit: the number of the unit.
        excluded: numbers of other documents that take no part.

    Raises:
        OutputError: a file cannot be read or written, or was cut.
    """
    count = signatures.shape[1]
    chunk_documents = max(1, _CHUNK_KEYS // count)
    with open_key_writer(path, SIGNATURE_KEY) as add:
        for start in range(0, len(signatures), chunk_documents):
            chunk = signatures[start : start + chunk_documents]
            keep = (chunk != NO_KEY).any(axis=1)
            keep[read_unit_duplicates(exact, unit, start, start + len(chunk))["number"] - start] = False
            if excluded is not None:
                keep[excluded[(excluded >= start) & (excluded < start + len(chunk))] - start] = False
            numbers = np.flatnonzero(keep)
            records = np.empty((len(numbers), count), SIGNATURE_KEY)
            records["high"] = chunk[numbers]
            records["number"] = (numbers + start)[:, None]
            records["part"] = parts[start : start + len(chunk)][numbers, None]
            add(records.reshape(-1))
            release_pages(signatures)
            release_pages(parts)
