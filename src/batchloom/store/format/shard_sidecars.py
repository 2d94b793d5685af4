r"""Sidecars of a shard: flags, pairs, columns, signatures, provenance.

All are little-endian and begin with 8 bytes of magic, u64 version 1, u64 count, and a u64 that depends on the file.

``.mask``, one bit per token: ``BLMMASK\0``, 1, tokens T, trained tokens; then ceil(T / 8) bytes. Token i is bit i mod 8
(lowest bit first) of byte i div 8, 1 if it is trained; unused bits of the last byte are 0. A shard without the file is
fully trained.

``.weights``, one byte per token: ``BLMWGHT\0``, 1, tokens T, trained tokens; then the code of the loss weight of each
token (``core/loss_weights.py``), 0 if it is not trained. Only a shard with another weight than 0 and 1 has the file.

``.pairs``, pair number and side of each document: ``BLMPAIR\0``, 1, documents D, 0; then the columns pair u64 [D] and
side u8 [D]. Only stores with an objective (``objectives.py``) have it, for every shard. In a store of pairs, every
even document is a chosen answer and the next one the rejected answer of the same pair. Other documents each have a pair
number of their own. Pair numbers ascend.

``.fields``, columns that the documents carry: ``BLMFELD\0``, 1, documents D, bytes of JSON P; then the end of each
document's JSON, u64 [D], ascending; then P bytes: one JSON object per document, back to back, in UTF-8.

``.bands``, MinHash signatures that find near duplicates: ``BLMBAND\0``, 1, documents D, four u16 (shingle, rows, bands
B, MinHash version); then the keys u64 [D, B], all 0 for a document that matches nothing. Only shards prepared with
``dedup: near`` have it. ``preparation/dedup/near_duplicates.py`` defines the keys.

``.docs``, source record and text hash of each document: ``BLMDOCS\0``, 1, documents D, 0; then the columns hash u64
[D, 2] (low half, high half), record u64 [D], offset u64 [D], part u32 [D]. Every column begins at a multiple of 8
bytes.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.files import release_pages
from batchloom.store.format.manifest import SourceEntry
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.objectives import CHOSEN, OBJECTIVES, REJECTED, ObjectiveName

# Address of flags, and whether they are bits.
_FLAGS_ADDRESS = struct.Struct("=2q")
# Address of the flags of a shard whose tokens are all trained.
NO_FLAGS = bytes(_FLAGS_ADDRESS.size)
_NO_CONTENT = memoryview(b"")
# Magic, u64 version, u64 count, and a u64 whose meaning depends on the file type (0 if unused).
HEADER = struct.Struct("<8sQQQ")
_MASK_MAGIC = b"BLMMASK\x00"
_WEIGHTS_MAGIC = b"BLMWGHT\x00"
_PAIRS_MAGIC = b"BLMPAIR\x00"
_FIELDS_MAGIC = b"BLMFELD\x00"
_BANDS_MAGIC = b"BLMBAND\x00"
DOCS_MAGIC = b"BLMDOCS\x00"
CHECK_REMEDY = "Run batchloom check on the store."
PAIR_ROW_BYTES = 9
PROVENANCE_ROW_BYTES = 36
# A pair number holds the part above the record.
_RECORD_BITS = 40
_MAX_PARTS = 1 << 23
_DAMAGED = "The store is damaged: run batchloom check on it."
# Bits of each banding parameter in the header.
_BITS = 16
_MAX_VALUE = (1 << _BITS) - 1
_CHUNK_BYTES = 8 << 20
# A chunk spans at most this many times its own rows of the mapped keys.
_SEARCH_REACH = 8


def get_address(array: NDArray[Any]) -> int:
    """Return the memory address of an array, for native code."""
    address: int = array.__array_interface__["data"][0]
    return address


def map_file_with_header(path: Path, magic: bytes, view: memoryview | None = None) -> tuple[memoryview, int, int]:
    """Return the content of a file, its count and the last field of its header.

    The file is mapped, or ``view`` is its content and ``path`` only its name for errors.
    """
    view = map_file(path) if view is None else view
    if len(view) < HEADER.size:
        raise StoreError(f"{path} is cut short: {len(view)} bytes, its header alone has {HEADER.size}. {CHECK_REMEDY}")
    file_magic, version, count, last = HEADER.unpack_from(view)
    if file_magic != magic or version != 1:
        raise make_wrong_format_error(path)
    return view, count, last


def check_size(path: Path, view: memoryview, size: int, *, count: int, expected: int, noun: str) -> None:
    """Refuse a file of another size or count than expected."""
    if count != expected or len(view) != size:
        raise StoreError(
            f"{path} declares {count:,} {noun} in {len(view):,} bytes; its shard has {expected:,}. {CHECK_REMEDY}"
        )


def make_wrong_format_error(path: Path) -> StoreError:
    """Build the error for a file whose type or version does not match its suffix."""
    return StoreError(f"{path} is not a {path.suffix} file of version 1. {CHECK_REMEDY}")


@final
class MaskBuilder:
    """Incremental bit mask of a shard."""

    def __init__(self) -> None:
        self.tokens = self.trained = 0
        self._bits = bytearray()
        self._pending_flags = np.zeros(0, bool)

    def append(self, trained: NDArray[np.bool_]) -> None:
        """Add the trained flags of the next tokens [n]."""
        self.tokens += trained.size
        self.trained += int(np.count_nonzero(trained))
        pending_flags = np.concatenate([self._pending_flags, trained])
        aligned_count = pending_flags.size // 8 * 8
        self._bits += np.packbits(pending_flags[:aligned_count], bitorder="little").tobytes()
        self._pending_flags = pending_flags[aligned_count:]

    def iter_flags(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the flags so far in bounded chunks."""
        for start in range(0, len(self._bits), _CHUNK_BYTES):
            yield np.unpackbits(np.frombuffer(self._bits[start : start + _CHUNK_BYTES], np.uint8), bitorder="little")
        yield self._pending_flags.view(np.uint8)

    def to_bytes(self) -> bytes | None:
        """Return the complete ``.mask`` file, or None if every token is trained."""
        if self.trained == self.tokens:
            return None
        header = HEADER.pack(_MASK_MAGIC, 1, self.tokens, self.trained)
        return header + self._bits + np.packbits(self._pending_flags, bitorder="little").tobytes()


def iter_mask_chunks(tokens: int, trained: int, flags: Iterable[NDArray[np.bool_]]) -> Iterator[bytes]:
    """Yield the bytes of a ``.mask`` file in bounded chunks, given its counts."""
    yield HEADER.pack(_MASK_MAGIC, 1, tokens, trained)
    pending_flags = np.zeros(0, bool)
    for chunk in flags:
        buffered_flags = np.concatenate([pending_flags, chunk])
        aligned_count = buffered_flags.size // 8 * 8
        yield np.packbits(buffered_flags[:aligned_count], bitorder="little").tobytes()
        pending_flags = buffered_flags[aligned_count:]
    yield np.packbits(pending_flags, bitorder="little").tobytes()


@final
class LossMask:
    """A ``.mask`` file with its mapped content; ``address`` is ``Flags`` of kernel.c."""

    __slots__ = ("address", "bits", "content", "tokens", "trained")
    suffix = ".mask"
    tokens_per_byte = 8

    def __init__(self, tokens: int, trained: int, content: memoryview) -> None:
        self.tokens = tokens
        self.trained = trained
        self.content = content
        self.bits = np.frombuffer(content, np.uint8, offset=HEADER.size)
        self.address = _FLAGS_ADDRESS.pack(get_address(self.bits), 1)

    def slice(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return the trained flags of tokens ``start`` to ``stop - 1``, bool."""
        first = start >> 3
        unpacked_bits = np.unpackbits(self.bits[first : (stop + 7) >> 3], bitorder="little")
        return unpacked_bits[start - 8 * first : stop - 8 * first].view(np.bool_)

    def count(self) -> int:
        """Return the number of set bits, including those beyond the last token."""
        return int(np.bitwise_count(self.bits).sum(dtype=np.int64))


def map_mask(path: Path, tokens: int, view: memoryview | None = None) -> LossMask:
    """Read the ``.mask`` file of a shard; see :func:`map_file_with_header`."""
    view, header_tokens, trained = map_file_with_header(path, _MASK_MAGIC, view)
    check_size(path, view, compute_mask_size(tokens), count=header_tokens, expected=tokens, noun="tokens")
    return LossMask(tokens, trained, view)


def compute_mask_size(tokens: int) -> int:
    """Return the size of the ``.mask`` of a shard in bytes."""
    return HEADER.size + (tokens + 7) // 8


def encode_weights_header(tokens: int, trained: int) -> bytes:
    """Return the header of a ``.weights`` file, which the codes follow."""
    return HEADER.pack(_WEIGHTS_MAGIC, 1, tokens, trained)


@final
class LossWeights:
    """Codes of loss weights; ``address`` is ``Flags`` of kernel.c.

    ``content`` is their mapped ``.weights`` file, empty for codes in memory.
    """

    __slots__ = ("address", "codes", "content", "tokens", "trained")
    suffix = ".weights"
    tokens_per_byte = 1

    def __init__(self, trained: int, codes: NDArray[np.uint8], content: memoryview = _NO_CONTENT) -> None:
        self.tokens = codes.size
        self.trained = trained
        self.codes = codes
        self.content = content
        self.address = _FLAGS_ADDRESS.pack(get_address(codes), 0)

    def slice(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the weight codes of tokens ``start`` to ``stop - 1``, uint8, as a view."""
        return self.codes[start:stop]

    def count(self) -> int:
        """Return the number of tokens with a weight above 0."""
        return int(np.count_nonzero(self.codes))


def map_weights(path: Path, tokens: int, view: memoryview | None = None) -> LossWeights:
    """Read the ``.weights`` file of a shard; see :func:`map_file_with_header`."""
    view, header_tokens, trained = map_file_with_header(path, _WEIGHTS_MAGIC, view)
    check_size(path, view, compute_weights_size(tokens), count=header_tokens, expected=tokens, noun="tokens")
    return LossWeights(trained, np.frombuffer(view, np.uint8, offset=HEADER.size), view)


def compute_weights_size(tokens: int) -> int:
    """Return the size of the ``.weights`` of a shard in bytes."""
    return HEADER.size + tokens


@dataclass(frozen=True, slots=True)
class PairIndex:
    """Pair and side of documents, in columns of equal length D."""

    pairs: NDArray[np.uint64]  # pair number of each document, uint64 [D]
    sides: NDArray[np.uint8]  # ``CHOSEN``, ``REJECTED``, ``GOOD``, ``BAD`` or ``PROMPT``, uint8 [D]

    def __len__(self) -> int:
        return len(self.sides)

    def to_bytes(self) -> bytes:
        """Return the complete ``.pairs`` file."""
        head = HEADER.pack(_PAIRS_MAGIC, 1, len(self), 0)
        return head + self.pairs.astype("<u8").tobytes() + self.sides.astype("u1").tobytes()

    def find_fault(self, objective: ObjectiveName) -> str:
        """Describe the first fault, or return an empty string; pairs must not be split."""
        known_sides = OBJECTIVES[objective].sides if objective else ()
        unknown_sides = np.flatnonzero(~np.isin(self.sides, known_sides))
        if unknown_sides.size:
            index = int(unknown_sides[0])
            return f"document {index} has side {self.sides[index]}, which is not a side of {objective}"
        firsts = self.pairs
        if objective == "pairs":
            if len(self) % 2:
                return f"{len(self):,} documents do not form pairs"
            firsts = self.pairs[::2]
            is_pair = (self.sides[::2] == CHOSEN) & (self.sides[1::2] == REJECTED)
            broken_pairs = np.flatnonzero(~is_pair | (firsts != self.pairs[1::2]))
            if broken_pairs.size:
                index = 2 * int(broken_pairs[0])
                return f"documents {index} and {index + 1} are not the chosen and the rejected answer of one pair"
        if (firsts[1:] <= firsts[:-1]).any():
            return "its pairs are not in ascending order, so one may be repeated"
        return ""


def compute_pair_numbers(parts: NDArray[np.uint32], records: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the pair number of each document, uint64 [D], below 2**63.

    Args:
        parts: index into the manifest's list of parts, uint32 [D].
        records: 0-based number of the record inside its part, uint64 [D].
    """
    if parts.size and (int(parts.max()) >= _MAX_PARTS or int(records.max()) >= 1 << _RECORD_BITS):
        raise InputError(
            f"A store has at most {_MAX_PARTS:,} parts of at most 2**{_RECORD_BITS} records; give fewer, larger files."
        )
    return (parts.astype(np.uint64) << np.uint64(_RECORD_BITS)) | records.astype(np.uint64)


def split_pair_numbers(pairs: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Return part and record of each pair number; see :func:`compute_pair_numbers`."""
    return (pairs >> np.uint64(_RECORD_BITS)).astype(np.uint32), pairs & np.uint64((1 << _RECORD_BITS) - 1)


def map_pair_index(path: Path, documents: int, objective: ObjectiveName, view: memoryview | None = None) -> PairIndex:
    """Read and check the ``.pairs`` file of a shard; see :func:`map_file_with_header`."""
    view, count, zero = map_file_with_header(path, _PAIRS_MAGIC, view)
    if zero:
        raise make_wrong_format_error(path)
    size = HEADER.size + PAIR_ROW_BYTES * documents
    check_size(path, view, size, count=count, expected=documents, noun="documents")
    sides = PairIndex(
        pairs=np.frombuffer(view, "<u8", count, HEADER.size),
        sides=np.frombuffer(view, "u1", count, HEADER.size + 8 * count),
    )
    if fault := sides.find_fault(objective):
        raise StoreError(f"{path}: {fault}. {_DAMAGED}")
    return sides


@dataclass(frozen=True, slots=True)
class Banding:
    """Parameters of the band keys; keys of different parameters are not comparable."""

    bands: int  # number of keys per document
    rows: int  # number of hashes per band
    shingle: int  # number of adjacent tokens that are hashed together
    minhash: int  # version of the MinHash computation

    def pack(self) -> int:
        """Pack the parameters into one u64."""
        value = 0
        for part in (self.minhash, self.bands, self.rows, self.shingle):
            value = (value << _BITS) | part
        return value

    def estimate_similarity(self, shared: int) -> float:
        """Estimate the Jaccard similarity of documents that share so many bands.

        Documents of similarity s share a band of r rows with probability s^r, so m of b bands give (m / b)^(1 / r).
        """
        return float((shared / self.bands) ** (1 / self.rows))


def unpack_banding(packed: int) -> Banding:
    """Return the parameters of one u64; see :meth:`Banding.pack`."""
    minhash, bands, rows, shingle = (packed >> bits & _MAX_VALUE for bits in (48, 32, 16, 0))
    return Banding(bands, rows, shingle, minhash)


@dataclass(frozen=True, slots=True)
class MinHashSignatures:
    """Band keys of documents, usually mapped."""

    keys: NDArray[np.uint64]  # keys of the documents in the file, uint64 [N, bands]
    banding: Banding  # parameters of the keys
    # Rows of ``keys`` that this object covers, in order, int64 [D]; None for all.
    selection: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.keys) if self.selection is None else len(self.selection)

    def take(self, documents: NDArray[np.int64]) -> Self:
        """Return the signatures of some documents, int64 [D], without copying keys."""
        selection = documents if self.selection is None else self.selection[documents]
        return type(self)(self.keys, self.banding, selection)

    def iter_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the ``.bands`` file in bounded chunks."""
        yield HEADER.pack(_BANDS_MAGIC, 1, len(self), self.banding.pack())
        chunk_documents = max(1, _CHUNK_BYTES // max(1, 8 * self.banding.bands))
        start = 0
        while start < len(self):
            stop = min(start + chunk_documents, len(self))
            if self.selection is None:
                keys = self.keys[start:stop]
            else:
                # Without this limit, a sparse selection would map all the keys between its rows.
                reach = self.selection[start] + _SEARCH_REACH * chunk_documents
                stop = min(stop, int(np.searchsorted(self.selection, reach)))
                keys = self.keys[self.selection[start:stop]]
            yield np.ascontiguousarray(keys, "<u8").tobytes()
            start = stop
            release_pages(self.keys)


def map_signature_file(path: Path, documents: int) -> MinHashSignatures:
    """Map the ``.bands`` file of a shard; the keys are a view of the file.

    Args:
        path: path of the file.
        documents: number of documents of the shard.

    Raises:
        StoreError: the file is missing, of another type or version, or has another number of documents.
    """
    view, count, packed = map_file_with_header(path, _BANDS_MAGIC)
    banding = unpack_banding(packed)
    size = HEADER.size + 8 * banding.bands * documents
    check_size(path, view, size, count=count, expected=documents, noun=f"documents with {banding.bands} bands")
    keys = np.frombuffer(view, "<u8", count * banding.bands, HEADER.size).reshape(count, banding.bands)
    return MinHashSignatures(keys, banding)


@final
@dataclass(frozen=True, slots=True)
class DocumentFields:
    """Carried columns of documents."""

    ends: NDArray[np.uint64]  # end of the JSON of each document in ``data``, uint64 [D]
    data: Any  # JSON objects, back to back, as a buffer of bytes
    name: str = ""  # name of their file, for messages

    def __len__(self) -> int:
        return len(self.ends)

    def _get_range(self, document: int) -> tuple[int, int]:
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])

    def read(self, document: int) -> dict[str, Any]:
        """Return the columns of a document, by its number in the shard."""
        begin, end = self._get_range(document)
        try:
            fields = json.loads(bytes(self.data[begin:end]))
        except ValueError as error:
            raise StoreError(
                f"{self.name}: the columns of document {document} are no JSON: {error}. {CHECK_REMEDY}"
            ) from error
        if not isinstance(fields, dict):
            raise StoreError(f"{self.name}: the columns of document {document} are no JSON object. {CHECK_REMEDY}")
        return fields

    def list_texts(self) -> list[str]:
        """Return the JSON of each document."""
        return [str(bytes(self.data[a:b]), "utf-8") for a, b in map(self._get_range, range(len(self)))]

    def take(self, documents: NDArray[np.int64]) -> "DocumentFields":
        """Return the columns of some documents, int64 [D], in that order."""
        chunks = [bytes(self.data[a:b]) for a, b in map(self._get_range, documents.tolist())]
        return DocumentFields(np.cumsum([len(chunk) for chunk in chunks], dtype=np.uint64), b"".join(chunks))

    def to_bytes(self) -> bytes:
        """Return the complete ``.fields`` file."""
        header = HEADER.pack(_FIELDS_MAGIC, 1, len(self), len(self.data))
        return header + self.ends.astype("<u8").tobytes() + bytes(self.data)


def map_fields(path: Path, documents: int, view: memoryview | None = None) -> DocumentFields:
    """Read and check the ``.fields`` of a shard; see :func:`map_file_with_header`."""
    view, count, size = map_file_with_header(path, _FIELDS_MAGIC, view)
    start = HEADER.size + 8 * count
    check_size(path, view, start + size, count=count, expected=documents, noun="documents")
    ends = np.frombuffer(view, "<u8", count, HEADER.size)
    if count and (int(ends[-1]) != size or (ends[1:] < ends[:-1]).any()):
        raise StoreError(f"{path} has ends that are out of order or beyond its bytes. {CHECK_REMEDY}")
    return DocumentFields(ends, view[start:], str(path))


@dataclass(frozen=True, slots=True)
class DocumentProvenance:
    """Provenance of one document.

    Attributes:
        source: name of the input file, relative to the inputs.
        record: 0-based number of the record in that file.
        offset: byte offset of the record in that file, after decompression.
        line: 1-based line number, for files with one record per line; else None.
        hash: XXH3-128 of the document's UTF-8 text, 32 hex digits.
        columns: columns of the record that the store keeps, such as the ``url`` and ``date`` of a web archive; empty
            for a remote store, whose columns are not read for this.
    """

    source: str
    record: int
    offset: int
    line: int | None
    hash: str
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def position(self) -> str:
        """Line or row of the record, counted from 1."""
        return f"line {self.line:,}" if self.line is not None else f"row {self.record + 1:,}"


@dataclass(frozen=True, slots=True)
class ProvenanceTable:
    """Provenance and hash of documents, in columns of equal length D."""

    hashes: NDArray[np.uint64]  # XXH3-128 of each document's UTF-8 text as (low, high) halves, uint64 [D, 2]
    records: NDArray[np.uint64]  # 0-based number of the record inside its part of the source, uint64 [D]
    offsets: NDArray[np.uint64]  # byte offset of the record in the (decompressed) source, uint64 [D]
    parts: NDArray[np.uint32]  # index into the manifest's list of parts, uint32 [D]

    def __len__(self) -> int:
        return len(self.records)

    def take(self, selection: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """Return the rows ``selection`` (indices or a mask), in that order."""
        return type(self)(
            self.hashes[selection], self.records[selection], self.offsets[selection], self.parts[selection]
        )

    def to_bytes(self) -> bytes:
        """Return the complete ``.docs`` file."""
        columns = ([self.hashes], [self.records], [self.offsets], [self.parts])
        return b"".join(iter_provenance_chunks(len(self), columns))


def iter_provenance_chunks(count: int, columns: Sequence[Iterable[NDArray[np.generic]]]) -> Iterator[bytes]:
    """Yield the bytes of a ``.docs`` file without needing all columns in memory."""
    yield HEADER.pack(DOCS_MAGIC, 1, count, 0)
    for column, dtype in zip(columns, ("<u8", "<u8", "<u8", "<u4"), strict=True):
        for chunk in column:
            yield chunk.astype(dtype).tobytes()


def locate_provenance_columns(count: int) -> list[tuple[int, int]]:
    """Return byte offset and row size of each column of a ``.docs`` file."""
    offset = HEADER.size
    return [(offset, 16), (offset + 16 * count, 8), (offset + 24 * count, 8), (offset + 32 * count, 4)]


def map_provenance(path: Path, view: memoryview | None = None) -> ProvenanceTable:
    """Read a ``.docs`` file; the columns are views of its content.

    Args:
        path: path of the file, for errors if the content is given.
        view: content of the file; None to map it.

    Raises:
        StoreError: the file is missing, of another type or version, or its count does not
            match its size.
    """
    view, count, zero = map_file_with_header(path, DOCS_MAGIC, view)
    if zero:
        raise make_wrong_format_error(path)
    if len(view) != HEADER.size + PROVENANCE_ROW_BYTES * count:
        raise StoreError(f"{path} declares {count} documents, which do not fit its {len(view)} bytes.")
    offset = HEADER.size
    return ProvenanceTable(
        hashes=np.frombuffer(view, "<u8", 2 * count, offset).reshape(count, 2),
        records=np.frombuffer(view, "<u8", count, offset + 16 * count),
        offsets=np.frombuffer(view, "<u8", count, offset + 24 * count),
        parts=np.frombuffer(view, "<u4", count, offset + 32 * count),
    )


class PartTable(NamedTuple):
    """Source, record count and preceding records of every part of a store.

    ``numbers`` holds source indices; ``preceding_records`` counts the records of the same source before the part.
    """

    sources: Sequence[SourceEntry]
    numbers: NDArray[np.int64]
    records: NDArray[np.int64]
    preceding_records: NDArray[np.int64]

    def resolve_provenance(self, provenance: ProvenanceTable) -> list[DocumentProvenance]:
        """Look up source names and record numbers of documents."""
        invalid_rows = np.flatnonzero(provenance.records >= self.records[provenance.parts].astype(np.uint64))
        if invalid_rows.size:
            row = int(invalid_rows[0])
            part = int(provenance.parts[row])
            raise StoreError(
                f"A document names record {int(provenance.records[row]):,} of a part of "
                f"{self.sources[int(self.numbers[part])].name} that has {int(self.records[part]):,}: its .docs file "
                f"is damaged. {CHECK_REMEDY}"
            )
        documents = []
        columns = (provenance.parts, provenance.records, provenance.offsets, provenance.hashes)
        for part, record, offset, halves in zip(*(column.tolist() for column in columns), strict=True):
            source = self.sources[int(self.numbers[part])]
            number = int(self.preceding_records[part]) + record
            line = number + 1 if source.kind == "jsonl" else None
            name = f"{(halves[1] << 64) | halves[0]:032x}"
            documents.append(DocumentProvenance(source.name, number, offset, line, name))
        return documents


def make_part_table(sources: Sequence[SourceEntry]) -> PartTable:
    """Return the source and the preceding records of each part of a store."""
    sizes = np.array([len(source.parts) for source in sources], np.int64)
    records = np.array([part.records for source in sources for part in source.parts], np.int64)
    numbers = np.repeat(np.arange(len(sources)), sizes)
    all_before = np.cumsum(records) - records
    firsts = np.cumsum(sizes) - sizes
    first = all_before[np.minimum(firsts, max(len(records) - 1, 0))] if len(records) else firsts
    return PartTable(sources, numbers, records, all_before - np.repeat(first, sizes))
