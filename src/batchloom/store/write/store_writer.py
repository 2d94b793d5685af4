"""Writers of store files: each file is complete before it gets its name."""

import contextlib
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, final

import numpy as np
import xxhash
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.errors import OutputError
from batchloom.core.files import PARTIAL_SUFFIX, lock_exclusively, refuse_url, sync_path, wrap_os_errors
from batchloom.core.loss_weights import LossFlags
from batchloom.store.format.block_checksums import COUNTED_ENTRY_BYTES, BlockChecksums, compute_file_checksums
from batchloom.store.format.layout import (
    LENGTHS_CHECKSUMS_NAME,
    LENGTHS_NAME,
    compute_checksum,
    format_generation_file_name,
)
from batchloom.store.format.manifest import ShardEntry
from batchloom.store.format.media_index import ShardMedia, iter_blob_chunks
from batchloom.store.format.megatron_index import encode_index, map_file
from batchloom.store.format.shard_columns import encode_columns
from batchloom.store.format.shard_sidecars import (
    DocumentFields,
    MaskBuilder,
    MinHashSignatures,
    PairIndex,
    ProvenanceTable,
    encode_weights_header,
)

if TYPE_CHECKING:
    import pyarrow as pa


def wrap_write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Convert OSErrors while writing ``path`` to one sentence with a remedy.

    Raises:
        OutputError: replaces an OSError raised inside.
    """
    return wrap_os_errors("write", path)


def make_folder(path: Path) -> None:
    """Create ``path`` and its missing parents."""
    refuse_url(path, "The output")
    with wrap_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, data: bytes) -> str:
    """Write ``data`` atomically (temporary file, sync, rename); return its checksum."""
    return write_chunks(path, [data])


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write a file from chunks as :func:`write_file` does; return its checksum."""
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    digest = xxhash.xxh3_128()
    with wrap_write_errors(path):
        with partial_path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
    return str(digest.hexdigest())


@final
class AtomicFile(io.RawIOBase):
    """A file that gets its name when it is finished and is deleted otherwise.

    Use it as a context manager. Nothing is created before the first write.

    Args:
        path: final path; an existing file is replaced.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
        self._file: Any = None
        self._size = 0

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._partial_path.unlink(missing_ok=True)
        self.close()

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def write(self, data: Any, /) -> int:
        """Append all of ``data``.

        Raises:
            StoreConflictError: another process is writing this file.
            OutputError: the file cannot be written.
        """
        with wrap_write_errors(self._path):
            if self._file is None:
                self._file = self._open()
            self._file.write(data)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def finish(self) -> int:
        """Sync the file, rename it to its path and return its size in bytes."""
        self.write(b"")
        with wrap_write_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._partial_path.replace(self._path)
            self._file.close()
        self._file = None
        sync_folder(self._path.absolute().parent)
        return self._size

    def remove_previous(self) -> None:
        """Delete the file of an earlier run at the final path."""
        with wrap_write_errors(self._path):
            self._path.unlink(missing_ok=True)

    def _open(self) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A link that somebody left there would lead the bytes elsewhere.
        if self._partial_path.is_symlink():
            raise OutputError(f"{self._partial_path} is a symbolic link: delete it, or choose another --out.")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.fdopen(os.open(self._partial_path, flags, 0o666), "ab")
        try:
            lock_exclusively(
                file.fileno(),
                self._partial_path,
                busy=lambda: f"Another run is writing {self._path}; wait for it, or choose another --out.",
                ended=f"Another run that wrote {self._path} has just ended; give the command again.",
            )
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        return file


def sync_folder(path: Path) -> None:
    """Sync a folder so that renames in it survive a power failure."""
    with wrap_write_errors(path):
        sync_path(path)


def write_mask(stem: Path, bits: MaskBuilder) -> str | None:
    """Write a shard's ``.mask``; return its checksum, or None if all is trained."""
    data = bits.to_bytes()
    return None if data is None else write_file(stem.with_suffix(".mask"), data)


def write_shard_checksums(stem: Path, checksums: BlockChecksums, *, mask: bool, weights: bool) -> str:
    """Write the ``.sums`` of a shard; return the checksum of its header.

    ``checksums`` are those of its tokens; those of its ``.mask`` and ``.weights``, already written, are added.
    """
    for suffix, exists in ((".mask", mask), (".weights", weights)):
        if exists:
            checksums.append_file(stem.with_suffix(suffix))
    return write_checksum_file(stem.with_suffix(".sums"), checksums)


def write_checksum_file(path: Path, checksums: BlockChecksums) -> str:
    """Write a ``.sums`` file; return the checksum of its header."""
    data, head = checksums.to_bytes()
    write_file(path, data)
    return head


def _write_media(stem: Path, media: ShardMedia, entry: ShardEntry) -> ShardEntry:
    """Write a shard's ``.media``, and its ``.blobs`` if bytes are stored."""
    rows, byte_ranges = media.pack()
    data = rows.to_bytes()
    entry = replace(entry, media=write_file(stem.with_suffix(".media"), data), media_bytes=len(data))
    if media.blobs is None or not byte_ranges:
        return entry
    checksums = BlockChecksums()
    return replace(
        entry,
        blobs=write_chunks(
            stem.with_suffix(".blobs"), checksums.iter_and_add(iter_blob_chunks(media.blobs, byte_ranges))
        ),
        blobs_bytes=sum(end - begin for begin, end in byte_ranges),
        blobsums=write_checksum_file(stem.with_suffix(".blobsums"), checksums),
    )


@final
class _WeightsWriter:
    """Writer of a ``.weights`` file, whose header is written last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
        self._tokens = 0
        with wrap_write_errors(path):
            self._file: BinaryIO = self._partial_path.open("wb")
            self._file.write(encode_weights_header(0, 0))

    def append(self, codes: NDArray[np.uint8]) -> None:
        """Append the weight codes of tokens."""
        with wrap_write_errors(self._path):
            self._file.write(np.ascontiguousarray(codes).data)
        self._tokens += codes.size

    def finish(self, trained: int) -> str:
        """Complete and rename the file; return its checksum."""
        with wrap_write_errors(self._path):
            self._file.seek(0)
            self._file.write(encode_weights_header(self._tokens, trained))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial_path.replace(self._path)
        return compute_checksum(map_file(self._path))

    def abandon(self) -> None:
        self._file.close()


class ShardWriter:
    """Writer of one shard: streams tokens, and adds index and provenance at the end."""

    def __init__(self, stem: Path, dtype: np.dtype[np.generic]) -> None:
        self._stem = stem
        self._dtype = dtype
        self._partial_path = stem.with_name(stem.name + ".bin" + PARTIAL_SUFFIX)
        self._hash = xxhash.xxh3_128()
        self._checksums = BlockChecksums()
        self._checksum = ""
        self._tokens = 0
        self._mask: MaskBuilder | None = None
        self._weights: _WeightsWriter | None = None
        with wrap_write_errors(self._partial_path):
            # An interrupted attempt may have linked the file; truncating it would empty the linked tokens.
            self._partial_path.unlink(missing_ok=True)
            self._file: BinaryIO = self._partial_path.open("wb")

    def append(self, tokens: NDArray[np.generic], flags: LossFlags) -> None:
        """Append tokens and their flags; calls need not align with document boundaries."""
        data = np.ascontiguousarray(tokens, self._dtype)
        with wrap_write_errors(self._partial_path):
            self._file.write(data.data)
        self._hash.update(data.data)
        self._checksums.append(data.data)
        if self._mask is None and not flags.is_plain:
            self._mask = MaskBuilder()
            self._mask.append(np.ones(self._tokens, bool))
        if self._mask is not None:
            self._append_flags(self._mask, flags)
        self._tokens += data.size

    def _append_flags(self, mask: MaskBuilder, flags: LossFlags) -> None:
        if self._weights is None and flags.has_weights:
            self._weights = _WeightsWriter(self._stem.with_suffix(".weights"))
            for earlier_flags in mask.iter_flags():
                self._weights.append(earlier_flags)
        if self._weights is not None:
            self._weights.append(flags.codes)
        mask.append(flags.trained)

    def link_tokens(self, path: Path, checksum: str, flags: Iterable[LossFlags]) -> bool:
        """Hard-link a complete file as the shard's tokens, instead of :meth:`append`.

        ``flags`` yields those of all tokens; nothing if all are trained. False means that the file system has no hard
        links; the shard is then abandoned.
        """
        self._file.close()
        with wrap_write_errors(self._partial_path):
            self._partial_path.unlink()
        try:
            self._partial_path.hardlink_to(path)
        except OSError:
            return False
        # Another attempt may delete the original at any time, so only the link is read.
        with wrap_write_errors(self._partial_path):
            self._file = self._partial_path.open("rb")
            self._tokens = self._partial_path.stat().st_size // self._dtype.itemsize
        self._checksum = checksum
        self._checksums = compute_file_checksums(self._partial_path)
        self._mask = MaskBuilder()
        for chunk_flags in flags:
            self._append_flags(self._mask, chunk_flags)
        return True

    def finish(
        self,
        lengths: NDArray[np.uint32],
        provenance: ProvenanceTable,
        sides: PairIndex | None = None,
        signatures: MinHashSignatures | None = None,
        media: ShardMedia | None = None,
        fields: DocumentFields | None = None,
        columns: "pa.Table | None" = None,
    ) -> ShardEntry:
        """Close the shard and rename its files to their final names.

        Args:
            lengths: tokens of each document, [D]; their sum must equal the tokens appended.
            provenance: provenance and hash of each document, [D].
            sides: pair and side of each document, [D]; None without an objective.
            signatures: MinHash signatures of the documents; None without near deduplication.
            media: media of the documents; None if they hold none.
            fields: columns that the documents carry, [D]; None if they carry none.
            columns: columns of their records, [D]; None if no record has some.
        """
        if int(lengths.sum(dtype=np.int64)) != self._tokens or len(lengths) != len(provenance):
            raise AssertionError(f"{self._stem}: lengths do not add up to the tokens appended")
        with wrap_write_errors(self._partial_path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        idx = write_file(self._stem.with_suffix(".idx"), encode_index(lengths, self._dtype))
        docs = write_file(self._stem.with_suffix(".docs"), provenance.to_bytes())
        mask = write_mask(self._stem, self._mask) if self._mask else None
        weights = self._weights.finish(self._mask.trained) if self._weights and self._mask else None
        entry = ShardEntry(
            name=self._stem.name,
            documents=len(lengths),
            tokens=self._tokens,
            bytes=self._tokens * self._dtype.itemsize,
            bin=self._checksum or self._hash.hexdigest(),
            idx=idx,
            docs=docs,
            mask=mask,
            trained=self._mask.trained if mask and self._mask else None,
            pairs=None if sides is None else write_file(self._stem.with_suffix(".pairs"), sides.to_bytes()),
            bands=None
            if signatures is None
            else write_chunks(self._stem.with_suffix(".bands"), signatures.iter_chunks()),
            sums=write_shard_checksums(self._stem, self._checksums, mask=mask is not None, weights=weights is not None),
            weights=weights,
        )
        if media is not None and len(media.rows):
            entry = _write_media(self._stem, media, entry)
        if fields is not None:
            data = fields.to_bytes()
            checksum = write_file(self._stem.with_suffix(".fields"), data)
            entry = replace(entry, fields=checksum, fields_bytes=len(data))
        if columns is not None and any(column.null_count < len(columns) for column in columns.columns):
            data = encode_columns(columns)
            checksum = write_file(self._stem.with_suffix(".parquet"), data)
            entry = replace(entry, parquet=checksum, parquet_bytes=len(data))
        with wrap_write_errors(self._stem):
            self._partial_path.replace(self._stem.with_suffix(".bin"))
        return entry

    def abandon(self) -> None:
        """Close the file without renaming it (after an error)."""
        self._file.close()
        if self._weights is not None:
            self._weights.abandon()


class LengthsWriter:
    """Writer of the lengths of documents that a generation adds, in shard order."""

    def __init__(self, folder: Path, generation: int = 1) -> None:
        self._path = folder / format_generation_file_name(LENGTHS_NAME, generation)
        self._checksums_path = folder / format_generation_file_name(LENGTHS_CHECKSUMS_NAME, generation)
        self._partial_path = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._hash = xxhash.xxh3_128()
        self._checksums = BlockChecksums(COUNTED_ENTRY_BYTES)
        with wrap_write_errors(self._partial_path):
            self._file = self._partial_path.open("wb")

    def append(self, lengths: NDArray[np.uint32]) -> None:
        """Append the lengths of the next documents, uint32 [D]."""
        data = np.ascontiguousarray(lengths, "<u4")
        with wrap_write_errors(self._partial_path):
            self._file.write(data.data)
        self._hash.update(data.data)
        self._checksums.append(data.data)

    def finish(self) -> tuple[str, str]:
        """Sync and rename the file; return its checksum and that of its ``.sums`` header."""
        header_checksum = write_checksum_file(self._checksums_path, self._checksums)
        with wrap_write_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial_path.replace(self._path)
        return str(self._hash.hexdigest()), header_checksum

    def abandon(self) -> None:
        """Close the file without renaming it (after an error)."""
        self._file.close()
