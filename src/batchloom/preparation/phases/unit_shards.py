"""Phase C: write the remaining documents of each unit as shards."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import release_pages
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.phases.duplicate_resolution import (
    ShardCutter,
    ShardSettings,
    iter_rows_with_reasons,
    iter_unit_rows,
)
from batchloom.preparation.report.progress import Listener, Progress
from batchloom.preparation.units.unit_files import (
    COLUMNS_NAME,
    FIELD_NAMES,
    MEDIA_NAMES,
    UnitColumns,
    concatenate_ranges,
    read_unit_columns,
    read_unit_fields,
    read_unit_media,
    select_flag_ranges,
    stored_lengths,
    tokens_file_name,
    trained_file_name,
)
from batchloom.preparation.units.work_folder import (
    ROWS_NAME,
    SHARDS_NAME,
    SIGNATURES_NAME,
    Decision,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    attempt_folder,
    move_into_place,
    read_unit_shards,
    translate_read_errors,
)
from batchloom.preparation.workers.protocols import Executor, run_tasks
from batchloom.store import CHOSEN, WORK_NAME, ShardEntry, ShardMedia, wrap_write_errors, write_file
from batchloom.store.format import (
    SUBSETS,
    DocumentFields,
    MinHashSignatures,
    PairIndex,
    ProvenanceTable,
    compute_pair_numbers,
    format_shard_name,
)
from batchloom.store.write import ShardWriter, make_folder, sync_folder

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK_TOKENS = 1 << 20


class UnitSidecars(NamedTuple):
    """Further parts of documents; None for a part that none of them has."""

    signatures: MinHashSignatures | None = None
    media: ShardMedia | None = None
    fields: DocumentFields | None = None
    columns: UnitColumns | None = None

    def take(
        self, documents: NDArray[np.int64], rows: NDArray[np.void]
    ) -> tuple[MinHashSignatures | None, ShardMedia | None, DocumentFields | None, "pa.Table | None"]:
        """Return those of some documents.

        Args:
            documents: their numbers in the unit, ascending, int64 [D].
            rows: their rows, [D].
        """
        return (
            None if self.signatures is None else self.signatures.take(documents),
            None if self.media is None else self.media.take(documents),
            None if self.fields is None else self.fields.take(documents),
            None if self.columns is None else self.columns.take(rows),
        )


_NO_SIDECARS = UnitSidecars()


@dataclass(frozen=True, slots=True)
class UnitShards:
    """Shards to write of one unit.

    ``numbers`` gives (number of the first shard, number of shards) by subset. With ``has_all_documents`` every
    document with tokens is kept, in the subset that the shares give it.
    """

    first_part: int
    folder: Path
    resolution_folder: Path
    shards: Path
    checksums: dict[str, str]
    has_all_documents: bool
    numbers: dict[str, tuple[int, int]]
    settings: ShardSettings
    # Subset rule with all overrides.
    membership: SubsetRule


def write_shards(
    executor: Executor,
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    dedup_counts: Sequence[UnitDedupCounts],
    decision: Decision,
    settings: ShardSettings,
    listener: Listener,
) -> list[dict[str, list[ShardEntry]]]:
    """Write the shards of every unit, and return those of each unit by subset."""
    shards: dict[int, dict[str, list[ShardEntry]]] = {}
    tasks: dict[int, Callable[[str], dict[str, list[ShardEntry]]]] = {}
    overrides = tuple((int(value, 16), name) for value, name in decision.overrides.items())
    membership, moved_units = settings.add_overrides(overrides), set(decision.moved)
    itemsize = settings.dtype.itemsize
    counts_by_unit = {unit.unit.number: counts for unit, counts in zip(units, dedup_counts, strict=True)}
    total_bytes = sum(counts.tokens for counts in dedup_counts) * itemsize
    documents = tokens = resumed_bytes = 0

    def report_unit(number: int) -> None:
        nonlocal documents, tokens
        documents += counts_by_unit[number].documents
        tokens += counts_by_unit[number].tokens
        listener(Progress("write", tokens * itemsize, total_bytes, resumed_bytes, documents, tokens, 0))

    for unit, unit_counts, numbers in zip(units, dedup_counts, decision.shards, strict=True):
        number = unit.unit.number
        shard_entries = read_unit_shards(work.shards(number))
        if shard_entries is not None:
            shards[number] = shard_entries
            resumed_bytes += unit_counts.tokens * itemsize
            report_unit(number)
            continue
        unit_shards = UnitShards(
            first_part=unit.unit.first_part,
            folder=unit.folder,
            resolution_folder=work.resolution_folder(number),
            shards=work.shards(number),
            checksums=unit.facts.checksums,
            has_all_documents=not (unit_counts.dropped > unit_counts.seen or number in moved_units),
            numbers=numbers,
            settings=settings,
            membership=membership,
        )
        tasks[number] = partial(write_unit_shards, unit_shards)
    shards |= run_tasks(executor, tasks, work.attempt, report_unit)
    return [shards[number] for number in sorted(shards)]


def write_unit_shards(unit_shards: UnitShards, attempt: str) -> dict[str, list[ShardEntry]]:
    """Write a unit's shards of each subset, then delete its temporary files.

    A token file that equals one complete shard is hard-linked; others are copied. If another attempt was
    first, its shards are the same, and the temporary files may be deleted already.
    """
    try:
        return _write_shards(unit_shards, attempt)
    except StoreConflictError:
        if (shard_entries := read_unit_shards(unit_shards.shards)) is None:
            raise
        return shard_entries


def _write_shards(unit_shards: UnitShards, attempt: str) -> dict[str, list[ShardEntry]]:
    folder = attempt_folder(unit_shards.shards, attempt)
    make_folder(folder)
    entries: dict[str, list[ShardEntry]] = {name: [] for name in SUBSETS}
    copied_subsets = []
    for name, (first, count) in unit_shards.numbers.items():
        entry = _link_shard(unit_shards, folder / name, first) if count == 1 and unit_shards.has_all_documents else None
        if entry is not None:
            entries[name] = [entry]
        elif count:
            copied_subsets.append(name)
    if copied_subsets:
        entries |= _copy_shards(unit_shards, folder, copied_subsets)
    for name in {name for name, subset_entries in entries.items() if subset_entries}:
        sync_folder(folder / name)
    write_file(folder / SHARDS_NAME, msgspec.json.encode(entries))
    sync_folder(folder)
    if not move_into_place(folder, unit_shards.shards):
        entries = read_unit_shards(unit_shards.shards) or entries
    _delete_temporary_files(unit_shards.folder)
    return entries


def _delete_temporary_files(folder: Path) -> None:
    with wrap_write_errors(folder):
        for name in (
            ROWS_NAME,
            SIGNATURES_NAME,
            *MEDIA_NAMES,
            *FIELD_NAMES,
            COLUMNS_NAME,
            *map(tokens_file_name, SUBSETS),
            *map(trained_file_name, SUBSETS),
        ):
            (folder / name).unlink(missing_ok=True)


def _link_shard(unit_shards: UnitShards, folder: Path, number: int) -> ShardEntry | None:
    """Make a complete token file a shard by a hard link; None if that fails."""
    settings, subset = unit_shards.settings, folder.name
    make_folder(folder)
    writer = ShardWriter(folder / format_shard_name(number), settings.dtype)
    tokens_path = unit_shards.folder / tokens_file_name(subset)
    flags = _iter_flags(unit_shards.folder / trained_file_name(subset))
    if not writer.link_tokens(tokens_path, unit_shards.checksums[subset], flags):
        return None
    row_chunks, masks = [], []
    for rows in iter_unit_rows(unit_shards.folder):
        codes = unit_shards.membership.codes(rows)
        masks.append((codes == SUBSETS.index(subset)) & (rows["seen"] == 0))
        row_chunks.append(rows[masks[-1]])
    shard_rows, positions = np.concatenate(row_chunks), np.flatnonzero(np.concatenate(masks))
    sidecars = _read_unit_sidecars(unit_shards).take(positions, shard_rows)
    return writer.finish(
        shard_rows["length"].astype(np.uint32),
        _make_provenance(shard_rows, unit_shards.first_part),
        _make_sides(shard_rows, unit_shards.first_part),
        *sidecars,
    )


def _read_unit_sidecars(unit_shards: UnitShards) -> UnitSidecars:
    folder = unit_shards.folder
    return UnitSidecars(
        _map_unit_signatures(unit_shards), read_unit_media(folder), read_unit_fields(folder), read_unit_columns(folder)
    )


def _map_unit_signatures(unit_shards: UnitShards) -> MinHashSignatures | None:
    """Map the signatures of a unit's documents; None if none are stored."""
    banding = unit_shards.settings.banding
    if banding is None:
        return None
    keys = _map_array(unit_shards.folder / SIGNATURES_NAME, np.dtype("<u8"))
    return MinHashSignatures(keys.reshape(-1, banding.bands), banding)


def _iter_flags(path: Path) -> Iterator[LossFlags]:
    """Yield the flags of a token file; none if the file is missing."""
    if path.exists():
        with translate_read_errors(path), path.open("rb") as file:
            while (codes := np.fromfile(file, np.uint8, _CHUNK_TOKENS)).size:
                yield LossFlags.from_codes(codes)


def _copy_shards(unit_shards: UnitShards, folder: Path, subsets: Sequence[str]) -> dict[str, list[ShardEntry]]:
    """Write the shards of these subsets document by document."""
    settings, sidecars = unit_shards.settings, _read_unit_sidecars(unit_shards)
    writers = {
        name: SubsetWriter(
            folder / name,
            settings.dtype,
            settings.tokens_per_shard,
            unit_shards.numbers[name][0],
            unit_shards.first_part,
            sidecars,
        )
        for name in subsets
    }
    try:
        for batch in _iter_shard_batches(unit_shards):
            codes = unit_shards.membership.codes(batch.rows)
            for name, writer in writers.items():
                row_indices = np.flatnonzero(batch.remaining_mask & (codes == SUBSETS.index(name)))
                for code, subset_indices in _split_by_subset(batch.codes, row_indices):
                    tokens, flags = batch.tokens[code]
                    writer.add(batch.rows, tokens, batch.starts, subset_indices, flags, batch.first)
            if sidecars.signatures is not None:
                release_pages(sidecars.signatures.keys)
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()


@final
class _UnitTokenReader:
    """Reader of a subset's tokens and flags from front to back; a context manager."""

    def __init__(self, folder: Path, subset: str, dtype: np.dtype[np.generic]) -> None:
        self._path, self._dtype, self._hash = folder / tokens_file_name(subset), dtype, xxhash.xxh3_128()
        self._flags_path = folder / trained_file_name(subset)
        with contextlib.ExitStack() as stack:
            with translate_read_errors(self._path):
                self._tokens = stack.enter_context(self._path.open("rb"))
            with translate_read_errors(self._flags_path):
                has_flags = self._flags_path.exists()
                self._flags = stack.enter_context(self._flags_path.open("rb")) if has_flags else None
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, count: int) -> tuple[NDArray[np.generic], LossFlags]:
        """Return the next tokens and their flags."""
        with translate_read_errors(self._path):
            tokens = np.fromfile(self._tokens, self._dtype, count)
        with translate_read_errors(self._flags_path):
            codes = None if self._flags is None else np.fromfile(self._flags, np.uint8, count)
        if len(tokens) < count or (codes is not None and len(codes) < count):
            raise self._make_changed_error()
        self._hash.update(tokens.data)
        return tokens, LossFlags(count, codes)

    def check(self, checksum: str) -> None:
        """Raise if other tokens were read than written; no later check could tell."""
        if self._hash.hexdigest() != checksum:
            raise self._make_changed_error()

    def _make_changed_error(self) -> StoreConflictError:
        work = next(folder for folder in self._path.parents if folder.name == WORK_NAME)
        return StoreConflictError(
            f"{self._path} holds other bytes than were written; delete {work} to start over, and check the disk."
        )


class _ShardBatch(NamedTuple):
    """Documents of a unit, with the tokens and flags of each subset.

    ``first`` is the number of the first document, ``codes`` are the subsets by the shares, ``starts`` is the
    offset of each document in the tokens of its subset.
    """

    rows: NDArray[np.void]
    remaining_mask: NDArray[np.bool_]
    codes: NDArray[np.uint8]
    starts: NDArray[np.int64]
    tokens: list[tuple[NDArray[np.generic], LossFlags]]
    first: int


def _split_by_subset(
    codes: NDArray[np.uint8], row_indices: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (subset code, row indices) for runs of one subset; usually a single run."""
    boundaries = np.flatnonzero(np.diff(codes[row_indices])) + 1
    for subset_indices in np.split(row_indices, boundaries):
        if subset_indices.size:
            yield int(codes[subset_indices[0]]), subset_indices


def _iter_shard_batches(unit_shards: UnitShards) -> Iterator[_ShardBatch]:
    """Yield the documents of a unit, and at the end check the tokens read."""
    folder, settings, first = unit_shards.folder, unit_shards.settings, 0
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(_UnitTokenReader(folder, name, settings.dtype)) for name in SUBSETS]
        for rows, reason_codes in iter_rows_with_reasons(folder, unit_shards.resolution_folder):
            remaining_mask = np.ones(len(rows), bool) if reason_codes is None else reason_codes == 0
            codes, lengths = settings.membership.codes(rows), stored_lengths(rows)
            for begin, end in _iter_row_ranges(rows):
                row_slice, starts = slice(begin, end), np.zeros(end - begin, np.int64)
                tokens = []
                for code, reader in enumerate(readers):
                    selection = codes[row_slice] == code
                    stops = np.cumsum(lengths[row_slice][selection])
                    starts[selection] = stops - lengths[row_slice][selection]
                    tokens.append(reader.read(int(stops[-1]) if stops.size else 0))
                yield _ShardBatch(
                    rows[row_slice], remaining_mask[row_slice], codes[row_slice], starts, tokens, first + begin
                )
            first += len(rows)
        for name, reader in zip(SUBSETS, readers, strict=True):
            reader.check(unit_shards.checksums[name])


def _iter_row_ranges(rows: NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """Yield row ranges of about a million tokens or one longer document.

    A preference pair is never split.
    """
    cumulative_lengths = np.cumsum(rows["length"], dtype=np.int64)
    start = 0
    while start < len(rows):
        tokens_before = int(cumulative_lengths[start - 1]) if start else 0
        stop = max(int(np.searchsorted(cumulative_lengths, tokens_before + _CHUNK_TOKENS, side="right")), start + 1)
        stop += int(rows["side"][stop - 1] == CHOSEN)
        yield start, stop
        start = stop


def _map_array(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    with translate_read_errors(path):
        if not path.stat().st_size:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r").view(np.ndarray)


def _make_provenance(rows: NDArray[np.void], first_part: int) -> ProvenanceTable:
    parts = (rows["part"] + np.uint32(first_part)).astype(np.uint32)
    return ProvenanceTable(rows["hash"], rows["record"], rows["offset"], parts)


def _make_sides(rows: NDArray[np.void], first_part: int) -> PairIndex | None:
    """Return the pair index of the documents; None without an objective."""
    if not rows["side"].any():
        return None
    provenance = _make_provenance(rows, first_part)
    return PairIndex(compute_pair_numbers(provenance.parts, provenance.records), rows["side"])


@final
class SubsetWriter:
    """Writer of consecutive shards of one subset.

    ``sidecars`` are those of all documents of the unit.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        tokens_per_shard: int,
        first_shard: int = 0,
        first_part: int = 0,
        sidecars: UnitSidecars = _NO_SIDECARS,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._next, self._first_part = first_shard, first_part
        self._cutter = ShardCutter(tokens_per_shard)
        self._shard: ShardWriter | None = None
        self._rows: list[NDArray[np.void]] = []
        self._sidecars, self._positions = sidecars, list[NDArray[np.int64]]()
        self._entries: list[ShardEntry] = []

    def add(
        self,
        rows: NDArray[np.void],
        tokens: NDArray[np.generic],
        starts: NDArray[np.int64],
        row_indices: NDArray[np.int64],
        flags: LossFlags,
        first: int = 0,
    ) -> None:
        """Append the documents ``row_indices`` of ``rows``.

        ``starts`` is the offset of each row's first token in ``tokens``, whose loss flags are ``flags``. ``first`` is
        the index of the first row among the documents of the signatures.
        """
        for begin, end, starts_shard in self._cutter.cut(rows[row_indices]):
            if starts_shard:
                self._close()
                self._open()
            shard_indices = row_indices[begin:end]
            if self._shard is None:
                raise AssertionError("the first range of a cutter must start a shard")
            shard_rows = rows[shard_indices]
            bounds = starts[shard_indices], starts[shard_indices] + shard_rows["length"]
            self._shard.append(concatenate_ranges(tokens, *bounds), select_flag_ranges(flags, *bounds))
            self._rows.append(shard_rows)
            self._positions.append(first + shard_indices)

    def finish(self) -> list[ShardEntry]:
        """Close the last shard and return the entries of all shards."""
        self._close()
        return self._entries

    def abandon(self) -> None:
        if self._shard is not None:
            with contextlib.suppress(OSError):
                self._shard.abandon()

    def _open(self) -> None:
        make_folder(self._folder)
        self._shard = ShardWriter(self._folder / format_shard_name(self._next), self._dtype)
        self._next += 1

    def _close(self) -> None:
        if self._shard is not None:
            rows, self._rows = np.concatenate(self._rows), []
            provenance = _make_provenance(rows, self._first_part)
            sides = _make_sides(rows, self._first_part)
            lengths = rows["length"].astype(np.uint32)
            positions, self._positions = np.concatenate(self._positions), []
            entry = self._shard.finish(lengths, provenance, sides, *self._sidecars.take(positions, rows))
            self._entries.append(entry)
            self._shard = None
