"""The ``plans/stretches.lanes`` file: bounds of a stream's ranges in its store.

Layout (little-endian): 8 bytes ``BLMLANES``; u64 version 1; u64 ranges S; u64 the first 16 hex digits of the
fingerprint of ``[documents, bin, idx]`` of each shard of the train subset; then the number of the first document of
each range, and the number of documents at the end, u64 [S + 1].
"""

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, StoreError
from batchloom.core.fingerprint import fingerprint
from batchloom.store.format.shard_sidecars import HEADER, map_file_with_header
from batchloom.store.read.store_reader import Store

RANGES_NAME = "plans/stretches.lanes"
_MAGIC = b"BLMLANES"


def encode_range_bounds(store: Store, bounds: NDArray[np.int64]) -> bytes:
    """Return the content of the file.

    Args:
        store: the train subset of the store.
        bounds: number of the first document of each range, and of all documents, int64 [S + 1].
    """
    header = HEADER.pack(_MAGIC, 1, len(bounds) - 1, _hash_document_order(store))
    return header + bounds.astype("<u8").tobytes()


def read_range_bounds(store: Store) -> NDArray[np.int64]:
    """Read the range bounds of a store written by a stream, int64 [S + 1].

    Raises:
        PlanError: no stream wrote the store, or the store changed since.
        StoreError: the file is damaged.
    """
    path = store.path / RANGES_NAME
    if not path.exists() or store.split != "train":
        raise PlanError(
            f"{store.path} ({store.split}) has no stream ranges: the order of lanes repeats a stream, and exists only "
            "for the train subset of a store that a stream wrote (batchloom.stream(keep=...), then finish())."
        )
    view, count, order_hash = map_file_with_header(path, _MAGIC)
    if order_hash != _hash_document_order(store):
        raise PlanError(
            f"{path} belongs to another store, or documents were appended or moved since the stream ended: the order "
            "of the stream cannot be repeated. Use order='pools', or the store that the stream wrote."
        )
    bounds = np.frombuffer(view, "<u8", offset=HEADER.size).astype(np.int64)
    if len(bounds) != count + 1 or (np.diff(bounds) < 0).any():
        raise StoreError(f"{path} is damaged; delete it, and let Stream.finish() write it again.")
    return bounds


def _hash_document_order(store: Store) -> int:
    shards = store.manifest.subsets[store.split].shards if store.manifest is not None else ()
    return int(fingerprint([[shard.documents, shard.bin, shard.idx] for shard in shards])[:16], 16)
