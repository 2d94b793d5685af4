"""Export to Parquet files, and to the folder format of ``datasets``."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchloom.store.format.objectives import SIDE_NAMES
from batchloom.store.read.document_walk import DocumentRange, iter_document_ranges, to_int32
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import wrap_write_errors, write_file

ProgressCallback = Callable[[int], None]


def export_parquet(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write one Parquet file per shard.

    Columns: ``input_ids`` list<int32>; ``loss_mask`` list<int8> if masked; ``loss_weights`` list<float> if weighted;
    provenance; with an objective also ``pair`` int64 and ``side`` (``chosen``, ``rejected``, ``good``, ``bad``,
    ``prompt`` or ``steps``); for documents that carry columns ``fields``, their JSON; the columns of their records.
    """
    name = store.split or store.path.name
    schema = _make_schema(store)
    for number in range(len(store.shards)):
        path = folder / f"{name}-{number:05d}-of-{len(store.shards):05d}.parquet"
        # Token ids do not fit a dictionary page, and trying to build one takes longer than all other work.
        options = {"compression": "zstd", "use_dictionary": ["source", "side"]}
        with _open_synced(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            for table in _iter_tables(store, number, schema, tick):
                writer.write_table(table)


def export_hf(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Write a folder for ``datasets.load_from_disk``: one Arrow stream per shard."""
    schema = _make_schema(store)
    names = []
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
    return pa.schema([*fields, *_list_record_columns(store)])


def _list_record_columns(store: Store) -> list[pa.Field]:
    """Return the columns of the records of all shards."""
    no_rows = np.empty(0, np.int64)
    tables = [store.shards.columns(shard, no_rows) for shard in range(len(store.shards))]
    return [*{field.name: field for table in tables if table is not None for field in table.schema}.values()]


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
    if "loss_mask" in schema.names:
        columns.append(pa.ListArray.from_arrays(bounds, pa.array(document_range.flags.trained.view(np.int8))))
    if "loss_weights" in schema.names:
        columns.append(pa.ListArray.from_arrays(bounds, pa.array(document_range.flags.weights)))
    if document_range.sources is not None:
        columns += [names.take(pa.array(document_range.sources)), pa.array(document_range.records)]
    if document_range.sides is not None:
        columns.append(pa.array(document_range.sides.pairs.astype(np.int64)))
        columns.append(pa.array(SIDE_NAMES).take(pa.array(document_range.sides.sides)))
    if document_range.fields is not None:
        columns.append(pa.array(document_range.fields.list_texts()))
    rows = len(document_range.lengths)
    table = document_range.columns
    for field in list(schema)[len(columns) :]:
        if table is not None and field.name in table.column_names:
            columns.append(table[field.name].combine_chunks())
        else:
            columns.append(pa.nulls(rows, field.type))
    return columns
