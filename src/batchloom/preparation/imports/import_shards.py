"""Shards of imported token id files, either linked or copied with bounded size."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import InputError, OutputError
from batchloom.preparation.documents.subsets import SmallestHashes, SubsetRule
from batchloom.preparation.imports.token_files import (
    EdgeTokens,
    TokenBatch,
    TokenFile,
    VocabularyCheck,
    hash_ids,
    iter_token_batches,
)
from batchloom.preparation.phases.unit_shards import SubsetWriter
from batchloom.preparation.units.unit_files import ROW
from batchloom.store import ShardEntry, map_file, wrap_write_errors
from batchloom.store.format import SUBSETS, TOKEN_DTYPES, BlockChecksums, iter_index_chunks, iter_provenance_chunks
from batchloom.store.write import write_checksum_file, write_chunks

_CHUNK_SIZE = 1 << 20
# Store dtype of each file dtype, valid once every id is checked against the vocabulary.
_COMPATIBLE_DTYPES = {"uint16": "uint16", "int16": "uint16", "int32": "int32", "uint32": "int32"}
_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(slots=True)
class ImportedFile:
    """An imported file with the XXH3-128 of its ids and its document edges."""

    file: TokenFile
    subset: str
    checksum: str = ""
    edges: EdgeTokens = field(default_factory=EdgeTokens)


OnBatch = Callable[[TokenBatch], None]


def choose_linked_dtype(file: TokenFile) -> str:
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


def link_shard(
    imported_file: ImportedFile, stem: Path, part: int, link_mode: str, check: VocabularyCheck, tick: OnBatch
) -> ShardEntry:
    """Check a file of ids, write its sidecar files and link it as a shard.

    Fills in the checksum and the edges of ``imported_file``.
    """
    file = imported_file.file
    dtype, count = TOKEN_DTYPES[choose_linked_dtype(file)], len(file.lengths)
    digest, checksums = xxhash.xxh3_128(), BlockChecksums()

    def hashes() -> Iterator[NDArray[np.uint64]]:
        for batch in iter_token_batches(file):
            check.check(file, batch)
            imported_file.edges.add(batch)
            data = np.ascontiguousarray(batch.tokens).data
            digest.update(data)
            checksums.append(data)
            tick(batch)
            yield hash_ids(batch)

    sizes = [(start, min(_CHUNK_SIZE, count - start)) for start in range(0, count, _CHUNK_SIZE)]
    numbers = (np.arange(start, start + size) for start, size in sizes)
    parts = (np.full(size, part) for _, size in sizes)
    columns = (hashes(), numbers, _iter_offsets(file), parts)
    docs = write_chunks(stem.with_suffix(".docs"), iter_provenance_chunks(count, columns))
    imported_file.checksum = digest.hexdigest()
    idx = write_chunks(stem.with_suffix(".idx"), iter_index_chunks(file.lengths, dtype))
    mask = _copy_mask(file, stem.with_suffix(".mask"))
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
        sums=write_checksum_file(stem.with_suffix(".sums"), checksums),
    )


def _iter_offsets(file: TokenFile) -> Iterator[NDArray[np.int64]]:
    offset = file.header
    for start in range(0, len(file.lengths), _CHUNK_SIZE):
        ends = offset + np.cumsum(file.lengths[start : start + _CHUNK_SIZE], dtype=np.int64) * (
            file.tokens.dtype.itemsize
        )
        yield np.concatenate([[offset], ends[:-1]])
        offset = int(ends[-1])


def _copy_mask(file: TokenFile, path: Path) -> str | None:
    if file.mask is None:
        return None
    view = map_file(file.token_input.path.with_suffix(".mask"))
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


@final
class ShardCopier:
    """Writer that copies files of ids, document by document, into shards of a store."""

    def __init__(self, store: Path, dtype: np.dtype[Any], most: int, check: VocabularyCheck, tick: OnBatch) -> None:
        self._writers = {name: SubsetWriter(store / name, dtype, most) for name in SUBSETS}
        self._check, self._tick = check, tick

    def write(self, files: Sequence[ImportedFile], membership: SubsetRule) -> dict[str, list[ShardEntry]]:
        """Copy files into shards.

        The hash of a ``train`` document chooses its subset; other documents keep theirs.
        """
        try:
            for part, imported_file in enumerate(files):
                self._add(part, imported_file, membership)
            return {name: writer.finish() for name, writer in self._writers.items()}
        finally:
            for writer in self._writers.values():
                writer.abandon()

    def _add(self, part: int, imported_file: ImportedFile, membership: SubsetRule) -> None:
        file, digest = imported_file.file, xxhash.xxh3_128()
        for batch in iter_token_batches(file):
            self._check.check(file, batch)
            imported_file.edges.add(batch)
            digest.update(np.ascontiguousarray(batch.tokens).data)
            rows = _make_import_rows(file, batch, part)
            codes = np.full(len(rows), SUBSETS.index(imported_file.subset))
            if imported_file.subset == SUBSETS[0]:
                codes = membership.codes(rows["hash"]).astype(np.int64)
            begins = np.cumsum(batch.lengths) - batch.lengths
            trained = _read_trained(file, batch)
            for code, name in enumerate(SUBSETS):
                row_indices = np.flatnonzero(codes == code)
                if row_indices.size:
                    self._writers[name].add(rows, batch.tokens, begins, row_indices, trained)
            self._tick(batch)
        imported_file.checksum = digest.hexdigest()


def choose_subset_rule(
    files: Sequence[ImportedFile], val_fraction: float, check: VocabularyCheck, tick: OnBatch
) -> SubsetRule:
    """Return the rule that assigns documents to ``val`` by hash.

    Given two distinct documents, ``val`` gets at least one.
    """
    natural, smallest = SubsetRule(val_fraction, 0.0), SmallestHashes()
    if not val_fraction:
        return natural
    for imported_file in files:
        for batch in iter_token_batches(imported_file.file):
            check.check(imported_file.file, batch)
            hashes = hash_ids(batch)
            smallest.add(hashes, natural.codes(hashes))
            tick(batch)
    return SubsetRule(val_fraction, 0.0, smallest.overrides(natural.list_required()))


def _make_import_rows(file: TokenFile, batch: TokenBatch, part: int) -> NDArray[np.void]:
    rows = np.zeros(len(batch.lengths), ROW)
    rows["hash"] = hash_ids(batch)
    rows["record"] = batch.first + np.arange(len(rows))
    rows["offset"] = file.header + batch.starts * file.tokens.dtype.itemsize
    rows["part"], rows["length"] = part, batch.lengths
    return rows


def _read_trained(file: TokenFile, batch: TokenBatch) -> NDArray[np.bool_] | None:
    if file.mask is None:
        return None
    begins, stops = batch.starts.tolist(), (batch.starts + batch.lengths).tolist()
    if file.starts is None:
        return file.mask.slice(begins[0], stops[-1])
    return np.concatenate([file.mask.slice(a, b) for a, b in zip(begins, stops, strict=True)])
