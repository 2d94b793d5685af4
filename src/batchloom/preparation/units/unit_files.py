"""Temporary files of a unit: tokens by subset, document rows, media, bad records."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.core.files import PARTIAL_SUFFIX
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumInfo
from batchloom.preparation.dedup.near_duplicates import NO_KEY, compute_signatures
from batchloom.preparation.dedup.sorted_keys import make_key_records, open_key_writer
from batchloom.preparation.documents.document_facts import BAD_LABEL, make_duplicate_keys
from batchloom.preparation.documents.encode_text import strip_control_tokens
from batchloom.preparation.documents.encoded_batch import EncodedBatch
from batchloom.preparation.documents.media_tokens import PlacedMedium
from batchloom.preparation.settings.recipe import DedupRecipe
from batchloom.preparation.units.work_folder import (
    BAD_NAME,
    KEYS_NAME,
    ROWS_NAME,
    SIGNATURES_NAME,
    translate_read_errors,
)
from batchloom.store import BAD, MEDIA_ROW_DTYPE, NOT_STORED, MediaRows, ShardMedia, map_file, wrap_write_errors
from batchloom.store.format import (
    SUBSETS,
    DocumentFields,
    StoredMedium,
    compute_pair_numbers,
    encode_facts,
    get_facts_kind,
    make_stored_media,
    read_blob,
    split_pair_numbers,
)

if TYPE_CHECKING:
    import pyarrow as pa

_T = TypeVar("_T", bound=np.generic)

_CHUNK_TOKENS = 1 << 20
# Number of documents that 32-bit numbers distinguish.
_MAX_DOCUMENTS = 1 << 32

# One document. `part` counts inside the unit. `side` is 0 for no preference. `subset` is 0 if the hash chooses it, else
# 1 plus its code. A `seen` text repeats an earlier one of its unit: it has the length of the first copy, and no tokens
# in the files.
ROW = np.dtype(
    [
        ("hash", "<u8", (2,)),
        ("record", "<u8"),
        ("offset", "<u8"),
        ("part", "<u4"),
        ("length", "<u4"),
        ("side", "u1"),
        ("seen", "u1"),
        ("subset", "u1"),
    ]
)


def stored_lengths(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the tokens of each document in the unit's token files, int64 [D]."""
    return np.where(rows["seen"], 0, rows["length"].astype(np.int64))


def mark_first_of_records(rows: NDArray[np.void], before: tuple[int, int]) -> NDArray[np.bool_]:
    """Mark the first document of each record, after one of (part, record) ``before``."""
    parts = np.concatenate([[before[0]], rows["part"].astype(np.int64)])
    records = np.concatenate([[before[1]], rows["record"].astype(np.int64)])
    fresh: NDArray[np.bool_] = (parts[1:] != parts[:-1]) | (records[1:] != records[:-1])
    return fresh


def concatenate_ranges(tokens: NDArray[_T], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[_T]:
    """Return the ranges [starts, stops) in sequence; a view if they are adjacent."""
    apart = starts[1:] != stops[:-1]
    begins = starts[np.concatenate([[True], apart])]
    ends = stops[np.concatenate([apart, [True]])]
    chunks = [tokens[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def select_flag_ranges(flags: LossFlags, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> LossFlags:
    """Return the flags of the ranges [starts, stops) in sequence."""
    if flags.is_plain:
        return LossFlags.all_trained(int((stops - starts).sum()))
    return LossFlags.from_codes(concatenate_ranges(flags.codes, starts, stops))


def tokens_file_name(subset: str) -> str:
    return f"tokens.{subset}.bin"


def trained_file_name(subset: str) -> str:
    """Return the file name of the flags of a subset.

    The file has one byte per token, the code of its loss weight. It exists only if some token is not
    trained or has another weight than 1.
    """
    return f"trained.{subset}.bool"


@final
class UnitFiles:
    """Writer of a unit's temporary files; ``dedup`` decides which keys are written."""

    def __init__(self, folder: Path, dedup: DedupRecipe) -> None:
        self._folder, self._dedup = folder, dedup
        self._last, self._rows = (-1, -1), 0
        self._last_bad, self._bad_in_order = (-1, -1), True
        self._stack = contextlib.ExitStack()
        self._key = self._stack.enter_context(open_key_writer(folder / KEYS_NAME)) if dedup.mode != "none" else None
        self._open: dict[str, IO[bytes]] = {}
        self._hashes = {name: xxhash.xxh3_128() for name in SUBSETS}
        self._tokens = dict.fromkeys(SUBSETS, 0)
        self._media, self._documents = UnitMediaWriter(folder), 0
        self._field_bytes = 0
        self._columns = UnitColumnsWriter(folder)
        near = [SIGNATURES_NAME] if dedup.mode == "near" else []
        for name in (ROWS_NAME, BAD_NAME, *near, *map(tokens_file_name, SUBSETS)):
            with wrap_write_errors(folder):
                self._open[name] = (folder / name).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*sys.exc_info())
        self._media.close()
        self._columns.close()
        for file in self._open.values():
            # A failed write has raised already; closing would only raise it again.
            with contextlib.suppress(OSError):
                file.close()

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        """Append documents: a batch of the unseen ones, and rows and subset codes of all."""
        lengths = stored_lengths(rows)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        for code, name in enumerate(SUBSETS):
            subset_mask = (codes == code) & (rows["seen"] == 0)
            if subset_mask.any():
                ranges = starts[subset_mask], stops[subset_mask]
                subset_tokens = concatenate_ranges(batch.ids, *ranges)
                self._hashes[name].update(subset_tokens.data)
                with wrap_write_errors(self._folder):
                    self._open[tokens_file_name(name)].write(subset_tokens.data)
                    if not batch.flags.is_plain or trained_file_name(name) in self._open:
                        self._write_flags(name, select_flag_ranges(batch.flags, *ranges))
                self._tokens[name] += subset_tokens.size
        if batch.media:
            self._media.add(batch.media, self._documents)
        self._documents += len(rows)
        self._write_fields(batch.fields)
        with wrap_write_errors(self._folder):
            self._open[ROWS_NAME].write(rows.tobytes())
        if self._key is not None and len(rows):
            fresh = mark_first_of_records(rows, self._last)
            self._last = int(rows["part"][-1]), int(rows["record"][-1])
            first = rows[fresh]
            if self._rows + len(rows) > _MAX_DOCUMENTS:
                raise InputError(
                    f"A file that cannot be split into units holds more than {_MAX_DOCUMENTS:,} documents, too "
                    "many to number; unpack it, split it into several, or set --dedup none."
                )
            numbers = (self._rows + np.flatnonzero(fresh)).astype(np.uint32)
            keys = make_duplicate_keys(first["hash"], first["side"] == BAD)
            self._key(make_key_records(keys, numbers, first["part"].astype(np.uint32)))
            if self._dedup.mode == "near":
                self._write_signatures(batch, rows, fresh)
            self._rows += len(rows)

    def _write_signatures(self, batch: EncodedBatch, rows: NDArray[np.void], fresh: NDArray[np.bool_]) -> None:
        """Write the MinHash signatures; documents of one record are hashed as one."""
        tokens, compared_lengths = batch.ids, stored_lengths(rows)
        if batch.plain is not None:
            tokens, unseen_lengths = batch.plain
            compared_lengths[rows["seen"] == 0] = unseen_lengths
        salts = compute_media_salts(batch.media, len(rows))
        banding = self._dedup.banding
        # Seen texts are exact duplicates already, so they need no signature.
        first = np.flatnonzero(fresh & (rows["seen"] == 0))
        keys = np.full((len(rows), banding.bands), NO_KEY)
        if len(first):
            lengths = np.add.reduceat(compared_lengths, first)
            skipped = int(compared_lengths[: first[0]].sum())
            ids, lengths = strip_control_tokens(tokens[skipped:], lengths, batch.added)
            signatures = compute_signatures(
                ids, lengths, bands=banding.bands, rows=banding.rows, shingle=banding.shingle
            )
            # Answers of one text with different labels are no duplicates.
            salt = np.where(rows["side"][first] == BAD, BAD_LABEL, salts[first])
            needs_salt = (salt != 0)[:, None] & (signatures != NO_KEY)
            keys[first] = np.where(needs_salt, np.maximum(signatures ^ salt[:, None], 1), signatures)
        with wrap_write_errors(self._folder):
            self._open[SIGNATURES_NAME].write(np.ascontiguousarray(keys, "<u8").data)

    def _write_flags(self, subset: str, flags: LossFlags) -> None:
        """Append flags; tokens before the first flags of a subset count as trained."""
        name = trained_file_name(subset)
        if name not in self._open:
            self._open[name] = (self._folder / name).open("wb")
            for start in range(0, self._tokens[subset], _CHUNK_TOKENS):
                size = min(_CHUNK_TOKENS, self._tokens[subset] - start)
                self._open[name].write(np.ones(size, bool).data)
        self._open[name].write(flags.codes.data)

    def _write_fields(self, fields: Sequence[bytes]) -> None:
        """Append the JSON of carried columns: all documents of a job carry some, or none."""
        if not fields:
            return
        ends = self._field_bytes + np.cumsum([len(text) for text in fields], dtype=np.uint64)
        self._field_bytes = int(ends[-1])
        with wrap_write_errors(self._folder):
            for name, data in zip(FIELD_NAMES, (ends.astype("<u8").tobytes(), b"".join(fields)), strict=True):
                if name not in self._open:
                    self._open[name] = (self._folder / name).open("wb")
                self._open[name].write(data)

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Append columns of records of a part; all parts have the same names and types."""
        self._columns.add(part, columns)

    def move_columns(self, columns: "UnitColumns", parts: NDArray[np.uint32], shift: NDArray[np.uint64]) -> None:
        """Append columns of a stream batch under other numbers of parts and records."""
        local_parts, records = split_pair_numbers(columns.keys)
        keys = compute_pair_numbers(parts[local_parts], records + shift[local_parts])
        self._columns.write(UnitColumns(keys, columns.table))

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        with wrap_write_errors(self._folder):
            for bad in bad_records:
                self._open[BAD_NAME].write(msgspec.json.encode((part, bad)) + b"\n")
                position = part, bad.record
                self._bad_in_order &= self._last_bad <= position
                self._last_bad = position

    def sync(self) -> None:
        """Flush the files to disk, bad records in input order."""
        self._stack.close()
        self._media.sync()
        self._columns.sync()
        with wrap_write_errors(self._folder):
            for file in self._open.values():
                file.flush()
                os.fsync(file.fileno())
            # The order of discovery depends on timing.
            if not self._bad_in_order:
                sort_bad_records(self._folder / BAD_NAME)

    def checksums(self) -> dict[str, str]:
        return {name: value.hexdigest() for name, value in self._hashes.items()}


MEDIA_NAMES = ("media.rows", "media.places", "media.blobs")
# Ends of the JSON of each document, and the JSON of all documents.
FIELD_NAMES = ("fields.ends", "fields.json")


def read_unit_fields(folder: Path) -> DocumentFields | None:
    """Return the columns that the documents of a unit carry; None if they carry none."""
    ends, data = (folder / name for name in FIELD_NAMES)
    if not ends.exists():
        return None
    with translate_read_errors(ends):
        return DocumentFields(np.fromfile(ends, "<u8"), map_file(data))


COLUMNS_NAME = "columns.arrow"
# Name of the first column of this file, which no column of a record has.
_KEY = "\0record"


@final
@dataclass(frozen=True, slots=True)
class UnitColumns:
    """Columns of the records of a unit."""

    keys: NDArray[np.uint64]  # pair numbers of part and record, ascending, uint64 [R]
    table: "pa.Table"  # [R]

    def take(self, rows: NDArray[np.void]) -> "pa.Table | None":
        """Return columns of documents, [D], null where a record has none; None if all are."""
        import pyarrow as pa  # noqa: PLC0415 - as above

        keys = compute_pair_numbers(rows["part"], rows["record"])
        indices = np.minimum(self.keys.searchsorted(keys), len(self.keys) - 1)
        is_missing = self.keys[indices] != keys
        return None if is_missing.all() else self.table.take(pa.array(indices, mask=is_missing))


@final
class UnitColumnsWriter:
    """Writer of the columns of records, whose file is created with the first ones."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / COLUMNS_NAME
        self._file: IO[bytes] | None = None
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None

    def add(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Append the columns of records of a part, by record."""
        if columns:
            import pyarrow as pa  # noqa: PLC0415 - heavy, and few units have columns

            keys = compute_pair_numbers(np.full(len(columns), part, np.uint32), np.array([*columns], np.uint64))
            self.write(UnitColumns(keys, pa.Table.from_pylist([*columns.values()])))

    def write(self, columns: UnitColumns) -> None:
        """Append columns."""
        import pyarrow as pa  # noqa: PLC0415 - as above

        table = columns.table.add_column(0, _KEY, pa.array(columns.keys))
        with wrap_write_errors(self._path):
            if self._stream is None:
                self._file = self._path.open("wb")
                self._stream = pa.ipc.new_stream(self._file, table.schema)
            self._stream.write_table(table)

    def sync(self) -> None:
        """Complete the file and flush it to disk."""
        if self._stream is not None and self._file is not None:
            with wrap_write_errors(self._path):
                self._stream.close()
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        # As for other files, a failed write has raised already.
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def read_unit_columns(folder: Path) -> UnitColumns | None:
    """Return the columns of the records of a unit; None if no record has some."""
    path = folder / COLUMNS_NAME
    if not path.exists():
        return None
    import pyarrow as pa  # noqa: PLC0415 - as above

    with translate_read_errors(path):
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        except pa.ArrowInvalid as error:
            raise OSError(str(error)) from error
    return UnitColumns(table[_KEY].to_numpy(), table.drop_columns([_KEY]))


@final
class UnitMediaWriter:
    """Writer of the media files, which are created with the first medium."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[bytes]] = {}
        self._location_bytes = self._blob_bytes = 0
        self._blob_offsets: dict[bytes, int] = {}
        self._last: tuple[bytes, int] | None = None

    def add(self, media: Sequence[Sequence[PlacedMedium]], first: int) -> None:
        """Append the media of documents; ``first`` is the unit's index of the first one."""
        if not self._open:
            for name in MEDIA_NAMES:
                with wrap_write_errors(self._folder):
                    self._open[name] = (self._folder / name).open("wb")
        if first + len(media) > _MAX_DOCUMENTS:
            raise InputError(
                f"A file that cannot be split into units holds more than {_MAX_DOCUMENTS:,} documents with media; "
                "split it into several."
            )
        rows = np.zeros(sum(map(len, media)), MEDIA_ROW_DTYPE)
        encoded_locations = []
        row_index = 0
        for document, document_media in enumerate(media, first):
            for placed_medium in document_media:
                encoded_location = placed_medium.medium.location.encode()
                self._fill(rows[row_index : row_index + 1], placed_medium, document, len(encoded_location))
                encoded_locations.append(encoded_location)
                row_index += 1
        with wrap_write_errors(self._folder):
            self._open[MEDIA_NAMES[0]].write(rows.tobytes())
            self._open[MEDIA_NAMES[1]].write(b"".join(encoded_locations))

    def _fill(self, row: NDArray[np.void], placed_medium: PlacedMedium, document: int, size: int) -> None:
        medium = placed_medium.medium
        if medium.info is None:
            raise AssertionError("media must be inspected before they are encoded")
        number = int.from_bytes(medium.info.digest, "big")
        row["digest"] = (number & NOT_STORED, number >> 64)
        row["size"] = medium.info.size
        row["blob"] = NOT_STORED if medium.data is None else self._store_blob(medium.data)
        row["place"], row["place_size"] = self._location_bytes, size
        row["facts"], row["grid"] = encode_facts(medium.info.facts), placed_medium.grid
        row["document"], row["start"], row["tokens"] = (document, placed_medium.start, placed_medium.tokens)
        row["kind"] = MEDIUM_KINDS.index(get_facts_kind(medium.info.facts))
        self._location_bytes += size

    def _store_blob(self, data: bytes) -> int:
        """Return the offset of bytes in the blob file; equal ones are written once."""
        if self._last is not None and self._last[0] is data:
            return self._last[1]  # The frames of a video share their bytes.
        digest = xxhash.xxh3_128_digest(data)
        begin = self._blob_offsets.get(digest)
        if begin is None:
            begin = self._blob_offsets[digest] = self._blob_bytes
            with wrap_write_errors(self._folder):
                self._open[MEDIA_NAMES[2]].write(data)
            self._blob_bytes += len(data)
        self._last = data, begin
        return begin

    def sync(self) -> None:
        """Flush the files to disk."""
        for file in self._open.values():
            with wrap_write_errors(self._folder):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def compute_media_salts(media: Sequence[Sequence[PlacedMedium]], documents: int) -> NDArray[np.uint64]:
    """Hash the media of each document, 0 for none, uint64 [documents].

    The salts distinguish documents with equal tokens but different media.
    """
    salts = np.zeros(documents, np.uint64)
    for number, document_media in enumerate(media):
        if document_media:
            digests = b"".join(
                placed_medium.medium.info.digest for placed_medium in document_media if placed_medium.medium.info
            )
            salts[number] = xxhash.xxh3_64_intdigest(digests) or 1
    return salts


def read_unit_media(folder: Path) -> ShardMedia | None:
    """Read the media of a unit or of a stream batch; None if there are none."""
    rows, locations_path, blobs = (folder / name for name in MEDIA_NAMES)
    if not rows.exists():
        return None
    with translate_read_errors(rows):
        return ShardMedia(MediaRows(np.fromfile(rows, MEDIA_ROW_DTYPE), locations_path.read_bytes()), blobs)


def read_placed_media(media: ShardMedia | None, first: int, documents: int) -> list[list[PlacedMedium]]:
    """Return the media of documents from ``first`` on, as the media writer takes them.

    Empty if none of these documents has any.
    """
    if media is None:
        return []
    numbers = media.rows.rows["document"]
    begin, end = np.searchsorted(numbers, [first, first + documents]).tolist()
    if begin == end:
        return []
    placed_media: list[list[PlacedMedium]] = [[] for _ in range(documents)]
    blob_cache: dict[int, bytes] = {}
    for number, document_media in groupby(
        make_stored_media(media.rows, range(begin, end), 0, media.blobs), lambda stored_medium: stored_medium.document
    ):
        placed_media[number - first] = [_read_medium(stored_medium, blob_cache) for stored_medium in document_media]
    return placed_media


def _read_medium(stored_medium: StoredMedium, blob_cache: dict[int, bytes]) -> PlacedMedium:
    """Read a medium; ``blob_cache`` holds the latest bytes by offset."""
    data = None
    if stored_medium.blob is not None:
        path, begin = stored_medium.blob
        data = blob_cache.get(begin)
        if data is None:
            blob_cache.clear()
            data = blob_cache[begin] = read_blob(path, begin, stored_medium.size)
    kind = "image" if stored_medium.kind == "video" else stored_medium.kind
    medium = Medium(
        kind, stored_medium.location, data, MediumInfo(stored_medium.facts, stored_medium.digest, stored_medium.size)
    )
    return PlacedMedium(medium, stored_medium.start, stored_medium.tokens, stored_medium.grid)


_LINE_DECODER = msgspec.json.Decoder(tuple[int, BadRecord])
_LINE_INDEX = np.dtype([("part", np.uint32), ("record", np.uint64), ("size", np.uint64)])


def _iter_line_positions(file: Iterable[bytes]) -> Iterator[tuple[int, int, int]]:
    """Yield part, record and size of each line of a file of bad records."""
    for line in file:
        part, bad = _LINE_DECODER.decode(line)
        yield part, bad.record, len(line)


def sort_bad_records(path: Path) -> None:
    """Stably sort a file of bad records by part and record, with an index in memory."""
    with path.open("rb") as file:
        index = np.fromiter(_iter_line_positions(file), _LINE_INDEX)
        stops = np.cumsum(index["size"])
        sorted_path = path.with_name(path.name + PARTIAL_SUFFIX)
        with sorted_path.open("wb") as sorted_file:
            for number in np.lexsort((index["record"], index["part"])):
                file.seek(int(stops[number] - index["size"][number]))
                sorted_file.write(file.readline())
            sorted_file.flush()
            os.fsync(sorted_file.fileno())
    sorted_path.replace(path)
