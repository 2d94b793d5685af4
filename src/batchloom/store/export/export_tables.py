"""Export to Parquet files, the folder format of ``datasets``, and MDS shards.

MDS shards of mosaicml-streaming equal those of its MDSWriter byte for byte. A shard: u32 samples N; u32 offset of each
sample, and the end [N + 1]; the JSON of its columns; the samples. A sample: the u32 size of each variable-size column,
then the values. Source: streaming/base/format/mds (writer.py, encodings.py), version 2.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchloom.core.errors import InputError
from batchloom.store.format.shard_sidecars import SIDE_NAMES
from batchloom.store.read.document_walk import DocumentRange, iter_document_ranges, to_int32
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import wrap_write_errors, write_chunks, write_file

ProgressCallback = Callable[[int], None]
_MDS_SHARD_BYTES = 1 << 26
_MAX_MDS_SHARD_BYTES = 2**32 - 1


def export_parquet(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write one Parquet file per shard.

    Columns: ``input_ids`` list<int32>; ``loss_mask`` list<int8> if masked; provenance; for preferences also
    ``pair`` int64 and ``side`` (``chosen``, ``rejected``, ``good`` or ``bad``).
    """
    name, schema = store.split or store.path.name, _make_schema(store)
    for number in range(len(store.shards)):
        path = folder / f"{name}-{number:05d}-of-{len(store.shards):05d}.parquet"
        # Token ids do not fit a dictionary page, and trying to build one takes longer than all other work.
        options = {"compression": "zstd", "use_dictionary": ["source", "side"]}
        with _open_synced(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            for table in _iter_tables(store, number, schema, tick):
                writer.write_table(table)


def export_hf(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write a folder for ``datasets.load_from_disk``: one Arrow stream per shard."""
    schema, names = _make_schema(store), []
    for number in range(len(store.shards)):
        names.append(f"data-{number:05d}-of-{len(store.shards):05d}.arrow")
        path = folder / names[-1]
        with _open_synced(path) as file, pa.ipc.new_stream(file, schema) as writer:
            for table in _iter_tables(store, number, schema, tick):
                writer.write_table(table)
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": store.fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": store.split or None,
    }
    # Without features in dataset_info.json, `datasets` takes the column types from the Arrow schema.
    write_file(folder / "dataset_info.json", b"{}\n")
    write_file(folder / "state.json", json.dumps(state, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _open_synced(path: Path) -> Iterator[IO[bytes]]:
    with wrap_write_errors(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _make_schema(store: Store) -> pa.Schema:
    fields = [("input_ids", pa.list_(pa.int32()))]
    if store.masked:
        fields.append(("loss_mask", pa.list_(pa.int8())))
    if store.manifest is not None:
        fields += [("source", pa.string()), ("record", pa.int64())]
    if store.contents.preferences:
        fields += [("pair", pa.int64()), ("side", pa.string())]
    return pa.schema(fields)


def _iter_tables(store: Store, shard: int, schema: pa.Schema, tick: ProgressCallback) -> Iterator[pa.Table]:
    names = pa.array([source.name for source in store.manifest.sources] if store.manifest else [])
    for document_range in iter_document_ranges(store, shard):
        yield pa.Table.from_arrays(_make_columns(document_range, names), schema=schema)
        tick(len(document_range.lengths))


def _make_columns(document_range: DocumentRange, names: pa.Array) -> list[pa.Array]:
    bounds = pa.array(np.concatenate([[0], np.cumsum(document_range.lengths)]), pa.int32())
    columns = [pa.ListArray.from_arrays(bounds, pa.array(to_int32(document_range.ids)))]
    if document_range.trained is not None:
        columns.append(pa.ListArray.from_arrays(bounds, pa.array(document_range.trained.view(np.int8))))
    if document_range.sources is not None:
        columns += [names.take(pa.array(document_range.sources)), pa.array(document_range.records)]
    if document_range.sides is not None:
        columns.append(pa.array(document_range.sides.pairs.astype(np.int64)))
        columns.append(pa.array(SIDE_NAMES).take(pa.array(document_range.sides.sides)))
    return columns


def export_mds(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write MDS shards of about 64 MiB and their ``index.json``.

    Columns: ``input_ids`` ndarray:int32; ``loss_mask`` ndarray:uint8 if masked; ``source`` str
    and ``record`` int; for preferences ``side`` str and ``pair`` int.
    """
    columns: dict[str, tuple[str, int | None]] = {"input_ids": ("ndarray:int32", None)}
    if store.masked:
        columns["loss_mask"] = ("ndarray:uint8", None)
    if store.manifest is not None:
        columns["source"] = "str", None
    if store.contents.preferences:
        columns["side"] = "str", None
    # Fixed-size columns follow the others: a sample is sizes, then texts, then numbers.
    if store.manifest is not None:
        columns["record"] = "int", 8
    if store.contents.preferences:
        columns["pair"] = "int", 8
    shards = _MdsWriter(folder, columns)
    sources = store.manifest.sources if store.manifest else ()
    names = [source.name.encode() for source in sources]
    for document_range in iter_document_ranges(store):
        for sample in _encode_samples(document_range, names):
            shards.add(sample)
        tick(len(document_range.lengths))
    shards.finish()


def _encode_samples(document_range: DocumentRange, names: list[bytes]) -> list[bytes]:
    stops = np.cumsum(document_range.lengths).tolist()
    ids = to_int32(document_range.ids).astype("<i4").tobytes()
    flags = None if document_range.trained is None else document_range.trained.tobytes()
    sources = None if document_range.sources is None else document_range.sources.tolist()
    records = b"" if document_range.records is None else document_range.records.astype("<i8").tobytes()
    sides = None if document_range.sides is None else document_range.sides.sides.tolist()
    pairs = b"" if document_range.sides is None else document_range.sides.pairs.astype("<i8").tobytes()
    samples = []
    for number, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        shape = _encode_shape(stop - start)
        values = [shape + ids[4 * start : 4 * stop]]
        if flags is not None:
            values.append(shape + flags[start:stop])
        if sources is not None:
            values.append(names[sources[number]])
        if sides is not None:
            values.append(SIDE_NAMES[sides[number]].encode())
        sizes = list(map(len, values))
        if sum(sizes) > _MAX_MDS_SHARD_BYTES - _MDS_SHARD_BYTES:
            raise InputError(
                f"A document of {stop - start:,} tokens is too long for an MDS shard, which holds at most 4 GiB; give "
                "--to megatron or parquet."
            )
        head = [size.to_bytes(4, "little") for size in sizes]
        column_slice = slice(8 * number, 8 * number + 8)
        samples.append(b"".join([*head, *values, records[column_slice], pairs[column_slice]]))
    return samples


def _encode_shape(size: int) -> bytes:
    """Encode the prefix of a one-dimensional array: rank and size width, then size."""
    code = 0 if size < 1 << 8 else 1 if size < 1 << 16 else 2
    return bytes([1 << 2 | code]) + size.to_bytes(1 << code, "little")


@final
class _MdsWriter:
    def __init__(self, folder: Path, columns: dict[str, tuple[str, int | None]]) -> None:
        self._folder = folder
        self._config = {
            "column_encodings": [encoding for encoding, _ in columns.values()],
            "column_names": list(columns),
            "column_sizes": [size for _, size in columns.values()],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": _MDS_SHARD_BYTES,
            "version": 2,
        }
        self._head = json.dumps(self._config, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._bytes = 0
        self._entries: list[dict[str, Any]] = []

    def add(self, sample: bytes) -> None:
        """Add a sample, after writing the shard if it would be too large."""
        size = len(sample) + 4
        if self._samples and 8 + len(self._head) + self._bytes + size > _MDS_SHARD_BYTES:
            self._flush()
        self._samples.append(sample)
        self._bytes += size

    def finish(self) -> None:
        """Write the last shard and the index of all shards."""
        if self._samples:
            self._flush()
        index = {"shards": self._entries, "version": 2}
        write_file(self._folder / "index.json", json.dumps(index, sort_keys=True).encode())

    def _flush(self) -> None:
        name = f"shard.{len(self._entries):05d}.mds"
        count = len(self._samples)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum([len(sample) for sample in self._samples], out=offsets[1:])
        offsets += 4 + 4 * (count + 1) + len(self._head)
        head = np.array([count], "<u4").tobytes() + offsets.astype("<u4").tobytes() + self._head
        write_chunks(self._folder / name, [head, *self._samples])
        data = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
        self._entries.append({**self._config, "raw_data": data, "samples": count, "zip_data": None})
        self._samples, self._bytes = [], 0
