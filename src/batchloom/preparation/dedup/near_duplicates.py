"""Signature files, and the keys of the documents to search for near duplicates.

For each unit, :func:`~batchloom.preparation.dedup.compute_signatures` gives one key per band and
document, stored in a file (little-endian u64 [D, bands], no header). After exact deduplication,
:func:`write_signature_keys` sorts the keys of the remaining documents.
:func:`~batchloom.preparation.dedup.search_duplicates` links each document to the first with the same
key, and :func:`~batchloom.preparation.dedup.find_components` decides which documents to drop.
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

# Keys that are converted at once.
_CHUNK_KEYS = 1 << 20


def map_signatures(path: Path, bands: int) -> NDArray[np.uint64]:
    """Memory-map the signatures of a unit, uint64 [D, bands].

    Raises:
        OutputError: the file cannot be read, or its size does not match the bands.
    """
    with describe_io_errors(path):
        size = path.stat().st_size
        if size % (8 * bands):
            raise OutputError(
                f"{path} has {size:,} bytes, which is not a multiple of {8 * bands} for {bands} bands per "
                "document: it was truncated, or written with another number of bands; remove it, then give the "
                "same command again."
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
    """Write the keys of one unit for the duplicate search, SIGNATURE_KEY.

    Args:
        path: the file to write.
        signatures: signatures of the unit's documents [D, bands], from :func:`map_signatures`.
        parts: index of each document's file part in the unit [D].
        exact: files of exact duplicates, which are skipped.
        unit: number of the unit.
        excluded: numbers of other documents to skip.

    Raises:
        OutputError: a file cannot be read or written, or is truncated.
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
