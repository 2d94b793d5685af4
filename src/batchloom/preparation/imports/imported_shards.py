"""Shards of imported files: linked as they are, or copied document by document."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, OutputError
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.imports.import_reader import ImportedFile, ImportReader
from batchloom.preparation.imports.token_files import TokenBatch, TokenFile, hash_ids
from batchloom.preparation.units.subset_writer import SubsetWriter
from batchloom.preparation.units.unit_rows import ROW
from batchloom.preparation.units.units import combine_part_hashes
from batchloom.store import PartEntry, ShardEntry, map_file, wrap_write_errors
from batchloom.store.format import (
    SUBSETS,
    TOKEN_DTYPES,
    BlockChecksums,
    SourceEntry,
    format_shard_name,
    iter_index_chunks,
    iter_provenance_chunks,
)
from batchloom.store.write import make_folder, write_chunks, write_shard_checksums

_CHUNK_SIZE = 1 << 20
# Store dtype of each file dtype, valid once every id is checked against the vocabulary.
_COMPATIBLE_DTYPES = {"uint16": "uint16", "int16": "uint16", "int32": "int32", "uint32": "int32"}
_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


# Entries of the shards of each subset, in order.
SubsetShards = dict[str, list[ShardEntry]]


def _choose_linked_dtype(file: TokenFile) -> str:
    """Return the dtype of a store in which this file is a linked shard."""
    name = file.tokens.dtype.name
    if file.header:
        reason = "its ids begin after a header"
    elif file.starts is not None:
        reason = "its documents are stored in another order than its index lists them"
    elif name not in _COMPATIBLE_DTYPES:
        reason = f"its ids are {name}, and a store holds uint16 or int32"
    else:
        return _COMPATIBLE_DTYPES[name]
    raise InputError(
        f"{file.token_input.path} cannot be used as a shard unchanged: {reason}. Give --copy to write new shards."
    )


def _link_shard(imported_file: ImportedFile, stem: Path, part: int, link_mode: str, reader: ImportReader) -> ShardEntry:
    """Check a file of ids, write its sidecar files and link it as a shard."""
    file = imported_file.file
    dtype = TOKEN_DTYPES[_choose_linked_dtype(file)]
    count = len(file.lengths)
    checksums = BlockChecksums()

    def hashes() -> Iterator[NDArray[np.uint64]]:
        for batch in reader.iter_batches(imported_file):
            checksums.append(np.ascontiguousarray(batch.tokens).data)
            yield hash_ids(batch)

    sizes = [(start, min(_CHUNK_SIZE, count - start)) for start in range(0, count, _CHUNK_SIZE)]
    numbers = (np.arange(start, start + size) for start, size in sizes)
    parts = (np.full(size, part) for _, size in sizes)
    columns = (hashes(), numbers, _iter_offsets(file), parts)
    docs = write_chunks(stem.with_suffix(".docs"), iter_provenance_chunks(count, columns))
    idx = write_chunks(stem.with_suffix(".idx"), iter_index_chunks(file.lengths, dtype))
    mask = _copy_sidecar(file, stem.with_suffix(".mask")) if file.mask else None
    weights = _copy_sidecar(file, stem.with_suffix(".weights")) if file.weights else None
    _link_path(file.token_input.path, stem.with_suffix(".bin"), link_mode)
    return ShardEntry(
        name=stem.name,
        documents=count,
        tokens=file.tokens.size,
        bytes=file.tokens.nbytes,
        bin=imported_file.checksum,
        idx=idx,
        docs=docs,
        mask=mask,
        trained=file.mask.trained if mask and file.mask else None,
        sums=write_shard_checksums(stem, checksums, mask=mask is not None, weights=weights is not None),
        weights=weights,
    )


def _iter_offsets(file: TokenFile) -> Iterator[NDArray[np.int64]]:
    offset = file.header
    for start in range(0, len(file.lengths), _CHUNK_SIZE):
        ends = offset + np.cumsum(file.lengths[start : start + _CHUNK_SIZE], dtype=np.int64) * (
            file.tokens.dtype.itemsize
        )
        yield np.concatenate([[offset], ends[:-1]])
        offset = int(ends[-1])


def _copy_sidecar(file: TokenFile, path: Path) -> str:
    view = map_file(file.token_input.path.with_suffix(path.suffix))
    return write_chunks(path, (view[start : start + _CHUNK_SIZE] for start in range(0, len(view), _CHUNK_SIZE)))


def _link_path(path: Path, destination: Path, link_mode: str) -> None:
    source = path.resolve()
    try:
        if link_mode == "symlink":
            destination.symlink_to(source)
        else:
            destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in _LINK_ERRNOS:
            with wrap_write_errors(destination):
                raise
        raise OutputError(
            f"{path} cannot be linked into {destination.parent} ({os.strerror(error.errno or 0)}: another file "
            "system, or another owner's file). Give an --out next to it, or --copy, or --symlink, which makes the "
            "store depend on the file at its present path."
        ) from error


def choose_linked_dtype(files: Sequence[ImportedFile]) -> str:
    """Return the dtype of a store in which all these files are linked shards."""
    dtypes = {_choose_linked_dtype(imported_file.file): imported_file.file.token_input.path for imported_file in files}
    if len(dtypes) > 1:
        first_description, second_description = (f"{path} holds {name}" for name, path in sorted(dtypes.items()))
        raise InputError(
            f"{first_description}, {second_description}, and a store has one dtype: import them separately, or "
            "give --copy."
        )
    return next(iter(dtypes))


def link_shards(files: Sequence[ImportedFile], store: Path, link_mode: str, reader: ImportReader) -> SubsetShards:
    """Check files and link each as a shard of its subset."""
    shards: SubsetShards = {"train": [], "val": []}
    for part, imported_file in enumerate(files):
        folder = store / imported_file.subset
        make_folder(folder)
        stem = folder / format_shard_name(len(shards[imported_file.subset]))
        shards[imported_file.subset].append(_link_shard(imported_file, stem, part, link_mode, reader))
    return shards


def copy_shards(
    writers: Mapping[str, SubsetWriter], files: Sequence[ImportedFile], membership: SubsetRule, reader: ImportReader
) -> SubsetShards:
    """Copy files, document by document, into shards.

    The hash of a ``train`` document chooses its subset; other documents keep theirs.
    """
    for part, imported_file in enumerate(files):
        for batch in reader.iter_batches(imported_file):
            rows = _make_import_rows(imported_file.file, batch, part)
            codes = np.full(len(rows), SUBSETS.index(imported_file.subset))
            if imported_file.subset == SUBSETS[0]:
                codes = membership.codes(rows).astype(np.int64)
            begins = np.cumsum(batch.lengths) - batch.lengths
            flags = _read_flags(imported_file.file, batch)
            for code, name in enumerate(SUBSETS):
                row_indices = np.flatnonzero(codes == code)
                if row_indices.size:
                    writers[name].add(rows, batch.tokens, begins, row_indices, flags)
    return {name: writer.finish() for name, writer in writers.items()}


def make_source_entry(imported_file: ImportedFile, *, has_bos: bool, has_end: bool) -> SourceEntry:
    """Make the manifest entry of an imported file."""
    file = imported_file.file
    token_input = file.token_input
    count = len(file.lengths)
    return SourceEntry(
        name=token_input.name,
        kind=token_input.kind,
        bytes=token_input.size,
        hash=combine_part_hashes([imported_file.checksum]),
        documents=count,
        tokens=int(np.sum(file.lengths, dtype=np.int64)),
        bos="present" if has_bos else "absent",
        end="present" if has_end else "absent",
        parts=(PartEntry(file.header, token_input.size, count),),
    )


def _make_import_rows(file: TokenFile, batch: TokenBatch, part: int) -> NDArray[np.void]:
    rows = np.zeros(len(batch.lengths), ROW)
    rows["hash"] = hash_ids(batch)
    rows["record"] = batch.first + np.arange(len(rows))
    rows["offset"] = file.header + batch.starts * file.tokens.dtype.itemsize
    rows["part"], rows["length"] = part, batch.lengths
    return rows


def _read_flags(file: TokenFile, batch: TokenBatch) -> LossFlags:
    flag_file = file.flags
    if flag_file is None:
        return LossFlags.all_trained(batch.tokens.size)
    begins = batch.starts.tolist()
    stops = (batch.starts + batch.lengths).tolist()
    if file.starts is None:
        return LossFlags.from_codes(flag_file.slice(begins[0], stops[-1]))
    ranges = zip(begins, stops, strict=True)
    return LossFlags.join(LossFlags.from_codes(flag_file.slice(start, stop)) for start, stop in ranges)
