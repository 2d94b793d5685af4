"""The ``plans/stretches.lanes`` file: bounds of a stream's ranges in its store.

Layout (little-endian): 8 bytes ``BLMLANES``; u64 version 1; u64 ranges S; u64 the first 16 hex digits of the
fingerprint of ``[documents, bin, idx]`` of each shard of the train subset; then the number of the first
document of each range, and the number of documents at the end, u64 [S + 1].
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.fingerprint import fingerprint
from batchloom.store.format.shard_sidecars import HEADER, map_file_with_header, map_provenance
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import make_folder, write_file

MAGIC = b"BLMLANES"
_FILE_NAME = "plans/stretches.lanes"


def compute_range_bounds(store: Store, begins: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the first document of each stream range, int64 [S + 1].

    The last element is the number of documents.
    """
    bounds = np.zeros(len(begins) + 1, np.int64)
    bounds[-1] = len(store)
    parts = np.array([part for part, _ in begins], np.int64)
    offsets = np.array([offset for _, offset in begins], np.int64)
    next_range = 0
    for stem, first in zip(store.shards.stems, store.shards.bounds, strict=False):
        provenance = map_provenance(stem.with_suffix(".docs"))
        last = int(provenance.parts[-1]), int(provenance.offsets[-1])
        # Count the remaining ranges that begin at or before the last document of the shard.
        stop = next_range + int(
            np.sum(
                (parts[next_range:] < last[0]) | ((parts[next_range:] == last[0]) & (offsets[next_range:] <= last[1]))
            )
        )
        for number in range(next_range, stop):
            a, b = np.searchsorted(provenance.parts, [parts[number], parts[number] + 1])
            part_row = np.searchsorted(provenance.offsets[a:b], np.uint64(offsets[number]))
            bounds[number] = first + int(a) + int(part_row)
        next_range = stop
    bounds[next_range:-1] = len(store)
    return bounds


def write_range_bounds(store: Store, bounds: NDArray[np.int64]) -> None:
    """Write range bounds into the folder of the store whose train subset they index."""
    path = store.path / _FILE_NAME
    make_folder(path.parent)
    header = HEADER.pack(MAGIC, 1, len(bounds) - 1, _hash_document_order(store))
    write_file(path, header + bounds.astype("<u8").tobytes())


def _hash_document_order(store: Store) -> int:
    shards = store.manifest.subsets[store.split].shards if store.manifest is not None else ()
    return int(fingerprint([[shard.documents, shard.bin, shard.idx] for shard in shards])[:16], 16)


def read_range_bounds(store: Store) -> NDArray[np.int64]:
    """Read the range bounds of a store written by a stream, int64 [S + 1].

    Raises:
        PlanError: no stream wrote the store, or the store changed since.
        StoreError: the file is damaged.
    """
    path = store.path / _FILE_NAME
    if not path.exists() or store.split != "train":
        raise PlanError(
            f"{store.path} ({store.split}) has no stream ranges: the order of lanes repeats a stream, and exists only "
            "for the train subset of a store that a stream wrote (batchloom.stream(keep=...), then finish())."
        )
    view, count, order_hash = map_file_with_header(path, MAGIC)
    if order_hash != _hash_document_order(store):
        raise PlanError(
            f"{path} belongs to another store, or documents were appended or moved since the stream ended: the order "
            "of the stream cannot be repeated. Use order='pools', or the store that the stream wrote."
        )
    bounds = np.frombuffer(view, "<u8", offset=HEADER.size).astype(np.int64)
    if len(bounds) != count + 1 or (np.diff(bounds) < 0).any():
        raise PlanError(f"{path} is damaged; delete it, and let Stream.finish() write it again.")
    return bounds
