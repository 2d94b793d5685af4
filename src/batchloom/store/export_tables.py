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
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchloom.core.errors import InputError
from batchloom.core.loss_weights import decode_loss_weights
from batchloom.store.format.objectives import SIDE_NAMES
from batchloom.store.read.document_walk import DocumentRange, iter_document_ranges, to_int32
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import wrap_write_errors, write_chunks, write_file

ProgressCallback = Callable[[int], None]
_MDS_SHARD_BYTES = 1 << 26
_MAX_MDS_SHARD_BYTES = 2**32 - 1


def export_parquet(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write one Parquet file per shard.

    Columns: ``input_ids`` list<int32>; ``loss_mask`` list<int8> if masked; ``loss_weights`` list<float> if weighted;
    provenance; with an objective also ``pair`` int64 and ``side`` (``chosen``, ``rejected``, ``good``, ``bad``,
    ``prompt`` or ``steps``); for documents that carry columns ``fields``, their JSON.
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
    if store.reader.weighted:
        fields.append(("loss_weights", pa.list_(pa.float32())))
    if store.manifest is not None:
        fields += [("source", pa.string()), ("record", pa.int64())]
    if store.contents.objective:
        fields += [("pair", pa.int64()), ("side", pa.string())]
    if _carries_fields(store):
        fields.append(("fields", pa.string()))
    return pa.schema(fields)


def _carries_fields(store: Store) -> bool:
    return any(store.shards.fields(shard) is not None for shard in range(len(store.shards)))


def _iter_tables(store: Store, shard: int, schema: pa.Schema, tick: ProgressCallback) -> Iterator[pa.Table]:
    names = pa.array([source.name for source in store.manifest.sources] if store.manifest else [])
    for document_range in iter_document_ranges(store, shard):
        columns = _make_columns(document_range, names, schema)
        yield pa.Table.from_arrays(columns, schema=schema)
        tick(len(document_range.lengths))


def _make_columns(document_range: DocumentRange, names: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    bounds = pa.array(np.concatenate([[0], np.cumsum(document_range.lengths)]), pa.int32())
    columns = [pa.ListArray.from_arrays(bounds, pa.array(to_int32(document_range.ids)))]
    if document_range.trained is not None and "loss_mask" in schema.names:
        columns.append(pa.ListArray.from_arrays(bounds, pa.array((document_range.trained != 0).view(np.int8))))
    if document_range.trained is not None and "loss_weights" in schema.names:
        columns.append(pa.ListArray.from_arrays(bounds, pa.array(decode_loss_weights(document_range.trained))))
    if document_range.sources is not None:
        columns += [names.take(pa.array(document_range.sources)), pa.array(document_range.records)]
    if document_range.sides is not None:
        columns.append(pa.array(document_range.sides.pairs.astype(np.int64)))
        columns.append(pa.array(SIDE_NAMES).take(pa.array(document_range.sides.sides)))
    if document_range.fields is not None:
        columns.append(pa.array(document_range.fields.list_texts()))
    return columns


def export_mds(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write MDS shards of about 64 MiB and their ``index.json``.

    Columns: ``input_ids`` ndarray:int32; ``loss_mask`` ndarray:uint8 if masked; ``loss_weights`` ndarray:float32 if
    weighted; ``source`` str and ``record`` int; with an objective ``side`` str and ``pair`` int.
    """
    if _carries_fields(store):
        raise InputError(f"{store.location.name} holds documents that carry columns: give --to parquet or hf.")
    columns: list[tuple[str, str, int | None]] = [("input_ids", "ndarray:int32", None)]
    if store.masked:
        columns.append(("loss_mask", "ndarray:uint8", None))
    if store.reader.weighted:
        columns.append(("loss_weights", "ndarray:float32", None))
    if store.manifest is not None:
        columns.append(("source", "str", None))
    if store.contents.objective:
        columns.append(("side", "str", None))
    # Fixed-size columns follow the others: a sample is sizes, then texts, then numbers.
    if store.manifest is not None:
        columns.append(("record", "int", 8))
    if store.contents.objective:
        columns.append(("pair", "int", 8))
    config = {
        "column_encodings": [encoding for _, encoding, _ in columns],
        "column_names": [name for name, _, _ in columns],
        "column_sizes": [size for _, _, size in columns],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": _MDS_SHARD_BYTES,
        "version": 2,
    }
    header = json.dumps(config, sort_keys=True).encode()
    entries: list[dict[str, Any]] = []
    for samples in _group_samples(_iter_samples(store, tick), 8 + len(header)):
        name = f"shard.{len(entries):05d}.mds"
        count = np.array([len(samples)], "<u4").tobytes()
        offsets = np.cumsum([8 + 4 * len(samples) + len(header), *map(len, samples)], dtype=np.int64)
        write_chunks(folder / name, [count + offsets.astype("<u4").tobytes() + header, *samples])
        data = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
        entries.append({**config, "raw_data": data, "samples": len(samples), "zip_data": None})
    index = {"shards": entries, "version": 2}
    write_file(folder / "index.json", json.dumps(index, sort_keys=True).encode())


def _group_samples(samples: Iterator[bytes], header_size: int) -> Iterator[list[bytes]]:
    """Yield the samples of each shard; each also takes an offset of 4 bytes."""
    group: list[bytes] = []
    size = header_size
    for sample in samples:
        if group and size + len(sample) + 4 > _MDS_SHARD_BYTES:
            yield group
            group, size = [], header_size
        group.append(sample)
        size += len(sample) + 4
    if group:
        yield group


def _iter_samples(store: Store, tick: ProgressCallback) -> Iterator[bytes]:
    names = [source.name.encode() for source in store.manifest.sources] if store.manifest else []
    for documents in iter_document_ranges(store):
        stops = np.cumsum(documents.lengths).tolist()
        ids = to_int32(documents.ids).astype("<i4").tobytes()
        flags = documents.trained if documents.trained is not None and store.masked else None
        mask = None if flags is None else (flags != 0).tobytes()
        codes = documents.trained if documents.trained is not None and store.reader.weighted else None
        weights = None if codes is None else decode_loss_weights(codes).astype("<f4").tobytes()
        records = b"" if documents.records is None else documents.records.astype("<i8").tobytes()
        pairs = b"" if documents.sides is None else documents.sides.pairs.astype("<i8").tobytes()
        for number, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            shape = _encode_shape(stop - start)
            values = [shape + ids[4 * start : 4 * stop]]
            if mask is not None:
                values.append(shape + mask[start:stop])
            if weights is not None:
                values.append(shape + weights[4 * start : 4 * stop])
            if documents.sources is not None:
                values.append(names[documents.sources[number]])
            if documents.sides is not None:
                values.append(SIDE_NAMES[documents.sides.sides[number]].encode())
            sizes = list(map(len, values))
            if sum(sizes) > _MAX_MDS_SHARD_BYTES - _MDS_SHARD_BYTES:
                raise InputError(
                    f"A document of {stop - start:,} tokens is too long for an MDS shard, which holds at most 4 GiB; "
                    "give --to megatron or parquet."
                )
            numbers = [column[8 * number : 8 * number + 8] for column in (records, pairs)]
            yield b"".join([*(size.to_bytes(4, "little") for size in sizes), *values, *numbers])
        tick(len(documents.lengths))


def _encode_shape(size: int) -> bytes:
    """Encode the prefix of a one-dimensional array: rank and size width, then size."""
    code = 0 if size < 1 << 8 else 1 if size < 1 << 16 else 2
    return bytes([1 << 2 | code]) + size.to_bytes(1 << code, "little")
