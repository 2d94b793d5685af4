"""Phase C, per unit: the documents that are left become shards of their own."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import release_pages
from batchloom.core.partial_files import PARTIAL_SUFFIX
from batchloom.preparation.documents import SubsetRule
from batchloom.preparation.phases.duplicate_resolution import iter_rows_with_reasons, iter_unit_rows
from batchloom.preparation.units import (
    MEDIA_NAMES,
    ROWS_NAME,
    SHARDS_NAME,
    SIGNATURES_NAME,
    ShardCutter,
    attempt_folder,
    move_into_place,
    read_unit_media,
    read_unit_shards,
    split_ranges,
    stored_lengths,
    tokens_file_name,
    trained_file_name,
    translate_read_errors,
)
from batchloom.store import CHOSEN, WORK_NAME, ShardEntry, ShardMedia, wrap_write_errors, write_file
from batchloom.store.format import (
    SUBSETS,
    Banding,
    MaskBuilder,
    MinHashSignatures,
    PairIndex,
    ProvenanceTable,
    compute_file_checksums,
    compute_pair_numbers,
    encode_index,
    format_shard_name,
)
from batchloom.store.write import (
    ShardWriter,
    make_folder,
    sync_folder,
    write_checksum_file,
    write_mask,
    write_media,
    write_pair_index,
    write_signatures,
)

_CHUNK_TOKENS = 1 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """What writing the shards of every unit needs to know.

    Attributes:
        store: folder of the growing store.
        dtype: of a token on disk.
        natural: the shares of the subsets, by which the temporary files are apart.
        decided: the subsets, overrides included.
        most: tokens of a shard at most.
        banding: how the keys were made by which documents are found alike; None where none are kept.
    """

    store: Path
    dtype: np.dtype[np.generic]
    natural: SubsetRule
    decided: SubsetRule
    most: int
    banding: Banding | None = None


@dataclass(frozen=True, slots=True)
class WriteShardsTask:
    """One unit whose documents go into shards.

    Attributes:
        first_part: number of its first part among all parts of the store.
        folder: its temporary files.
        place: what is decided of it.
        shards: folder of its shards when they are whole.
        attempt: sets the files of this attempt apart from those of another one.
        checksums: of its token files.
        whole: whether every document that has tokens stays, in the subset that the shares say.
        numbers: of each subset the number of the unit's first shard, and how many it has.
        task: the settings of the job; its folder is not used.
    """

    first_part: int
    folder: Path
    place: Path
    shards: Path
    attempt: str
    checksums: dict[str, str]
    whole: bool
    numbers: dict[str, tuple[int, int]]
    task: ShardSettings


def write_unit_shards(order: WriteShardsTask) -> dict[str, list[ShardEntry]]:
    """Write a unit's documents into its own shards of each subset, then drop its temporary files.

    A token file that is one whole shard already is linked into the store; others are copied. Where
    another attempt was first, its shards are the same, and there may be nothing left to make them of.

    Raises:
        OutputError: the shards cannot be written.
    """
    try:
        return _write_shards(order)
    except StoreConflictError:
        found = read_unit_shards(order.shards)
        if found is None:
            raise
        return found


def _write_shards(order: WriteShardsTask) -> dict[str, list[ShardEntry]]:
    folder = attempt_folder(order.shards, order.attempt)
    make_folder(folder)
    task = replace(order.task, store=folder)
    entries: dict[str, list[ShardEntry]] = {name: [] for name in SUBSETS}
    copied = []
    for name, (first, count) in order.numbers.items():
        stem = folder / name / format_shard_name(first)
        if count == 1 and order.whole and _link_tokens(order.folder / tokens_file_name(name), stem):
            entries[name] = [_finish_linked_shard(order, task, stem, order.checksums[name])]
        elif count:
            copied.append(name)
    if copied:
        entries |= _copy_shards(order, task, {name: order.numbers[name][0] for name in copied})
    for name in {name for name, found in entries.items() if found}:
        sync_folder(folder / name)
    write_file(folder / SHARDS_NAME, msgspec.json.encode(entries))
    sync_folder(folder)
    if not move_into_place(folder, order.shards):
        entries = read_unit_shards(order.shards) or entries
    _delete_temporary_files(order.folder)
    return entries


def _delete_temporary_files(folder: Path) -> None:
    with wrap_write_errors(folder):
        for name in (
            ROWS_NAME,
            SIGNATURES_NAME,
            *MEDIA_NAMES,
            *map(tokens_file_name, SUBSETS),
            *map(trained_file_name, SUBSETS),
        ):
            (folder / name).unlink(missing_ok=True)


def _link_tokens(tokens: Path, stem: Path) -> bool:
    """Give a token file its place in the store, under the name of a file not finished."""
    make_folder(stem.parent)
    aside = _partial_path(stem)
    aside.unlink(missing_ok=True)
    try:
        aside.hardlink_to(tokens)
    except OSError:
        # Not every file system has links; copying finds any other fault and names it.
        return False
    return True


def _partial_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".bin" + PARTIAL_SUFFIX)


def _finish_linked_shard(
    order: WriteShardsTask, task: ShardSettings, stem: Path, checksum: str
) -> ShardEntry:
    """Finish a shard whose tokens are linked: its index, its origins, its name."""
    code = SUBSETS.index(stem.parent.name)
    mine = [
        (task.decided.codes(rows["hash"]) == code) & (rows["seen"] == 0)
        for rows in iter_unit_rows(order.folder)
    ]
    taken = np.concatenate(
        [rows[some] for rows, some in zip(iter_unit_rows(order.folder), mine, strict=True)]
    )
    bands = _map_unit_signatures(order, task)
    bands = None if bands is None else bands.take(np.flatnonzero(np.concatenate(mine)))
    lengths, tokens = taken["length"].astype(np.uint32), int(taken["length"].sum(dtype=np.int64))
    idx = write_file(stem.with_suffix(".idx"), encode_index(lengths, task.dtype))
    docs = write_file(
        stem.with_suffix(".docs"), _make_provenance(taken, order.first_part).to_bytes()
    )
    bits = _read_mask_bits(order.folder / trained_file_name(stem.parent.name))
    mask = write_mask(stem, bits)
    pairs = write_pair_index(stem, _make_sides(taken, order.first_part))
    alike = write_signatures(stem, bands)
    media = read_unit_media(order.folder)
    if media is not None:
        media = media.take(np.flatnonzero(np.concatenate(mine)))
    files = write_media(stem, media)
    sums = write_checksum_file(
        stem.with_suffix(".sums"), compute_file_checksums(_partial_path(stem))
    )
    with wrap_write_errors(stem):
        _partial_path(stem).replace(stem.with_suffix(".bin"))
    return ShardEntry(
        name=stem.name,
        documents=len(taken),
        tokens=tokens,
        bytes=tokens * task.dtype.itemsize,
        bin=checksum,
        idx=idx,
        docs=docs,
        mask=mask,
        trained=bits.trained if mask else None,
        pairs=pairs,
        bands=alike,
        sums=sums,
        **files._asdict(),
    )


def _map_unit_signatures(order: WriteShardsTask, task: ShardSettings) -> MinHashSignatures | None:
    """The keys of a unit's documents, mapped; None where none are kept."""
    if task.banding is None:
        return None
    keys = _map_array(order.folder / SIGNATURES_NAME, np.dtype("<u8"))
    return MinHashSignatures(keys.reshape(-1, task.banding.bands), task.banding)


def _read_mask_bits(path: Path) -> MaskBuilder:
    """The flags of a whole token file, packed; none where the file is not there."""
    bits = MaskBuilder()
    if path.exists():
        with translate_read_errors(path), path.open("rb") as file:
            while (flags := np.fromfile(file, np.bool_, _CHUNK_TOKENS)).size:
                bits.append(flags)
    return bits


def _copy_shards(
    order: WriteShardsTask, task: ShardSettings, first_shards: dict[str, int]
) -> dict[str, list[ShardEntry]]:
    """Write the shards of these subsets document by document.

    Raises:
        StoreConflictError: tokens are not those that were written.
    """
    for name, checksum in order.checksums.items():
        _check_unchanged(order.folder / tokens_file_name(name), checksum)
    bands, media = _map_unit_signatures(order, task), read_unit_media(order.folder)
    writers = {
        name: SubsetWriter(task, name, first, order.first_part, bands, media)
        for name, first in first_shards.items()
    }
    try:
        for found in _iter_shard_batches(order, task):
            codes = task.decided.codes(found.rows["hash"])
            for name, writer in writers.items():
                mine = np.flatnonzero(found.kept & (codes == SUBSETS.index(name)))
                for code, some in _split_by_subset(found.codes, mine):
                    writer.add(
                        *(found.rows, found.tokens[code], found.starts, some),
                        *(found.trained[code], found.first),
                    )
            if bands is not None:
                release_pages(bands.keys)
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()


def _check_unchanged(path: Path, checksum: str) -> None:
    """Refuse a token file with other bytes than were written, which no later check could tell."""
    found = xxhash.xxh3_128()
    with translate_read_errors(path), path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            found.update(piece)
    if found.hexdigest() != checksum:
        work = next(folder for folder in path.parents if folder.name == WORK_NAME)
        raise StoreConflictError(
            f"{path} holds other bytes than were written; delete {work} to begin anew, and look at the disk."
        )


class _ShardBatch(NamedTuple):
    """Documents of a unit, whose tokens lie apart by the subset that the shares say.

    Attributes:
        rows: the documents.
        kept: which are left.
        codes: the subset of each, as the shares say.
        starts: where the tokens of each begin in those of its subset.
        tokens: of each subset.
        trained: of the tokens of each subset whether they are; None where all are.
        first: the place of the first of the documents in the unit.
    """

    rows: NDArray[np.void]
    kept: NDArray[np.bool_]
    codes: NDArray[np.uint8]
    starts: NDArray[np.int64]
    tokens: tuple[NDArray[np.generic], ...]
    trained: tuple[NDArray[np.bool_] | None, ...]
    first: int


def _split_by_subset(
    codes: NDArray[np.uint8], mine: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Documents in stretches of one subset; nearly always all are of one."""
    cuts = np.flatnonzero(np.diff(codes[mine])) + 1
    for some in np.split(mine, cuts):
        if some.size:
            yield int(codes[some[0]]), some


def _iter_shard_batches(order: WriteShardsTask, task: ShardSettings) -> Iterator[_ShardBatch]:
    """A unit's documents, a bounded stretch at a time."""
    folder = order.folder
    files = [_map_array(folder / tokens_file_name(name), task.dtype) for name in SUBSETS]
    flags = [folder / trained_file_name(name) for name in SUBSETS]
    masks = [_map_array(path, np.dtype(np.bool_)) if path.exists() else None for path in flags]
    at, first = [0] * len(SUBSETS), 0
    for rows, why in iter_rows_with_reasons(folder, order.place):
        kept = np.ones(len(rows), bool) if why is None else why == 0
        codes = task.natural.codes(rows["hash"])
        starts, begins = np.zeros(len(rows), np.int64), tuple(at)
        for code in range(len(SUBSETS)):
            mine = codes == code
            lengths = stored_lengths(rows[mine])
            stops = np.cumsum(lengths)
            starts[mine] = stops - lengths
            at[code] += int(lengths.sum())
        tokens = tuple(file[a:b] for file, a, b in zip(files, begins, at, strict=True))
        trained = tuple(
            None if mask is None else mask[a:b]
            for mask, a, b in zip(masks, begins, at, strict=True)
        )
        for begin, end in _iter_row_ranges(rows):
            some = slice(begin, end)
            mine = rows[some], kept[some], codes[some], starts[some]
            yield _ShardBatch(*mine, tokens, trained, first + begin)
            for file in files:
                release_pages(file)
        first += len(rows)


def _iter_row_ranges(rows: NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """Stretches of rows of some million tokens at most, or of a single longer document; pairs stay together."""
    sums = np.cumsum(rows["length"], dtype=np.int64)
    at = 0
    while at < len(rows):
        before = int(sums[at - 1]) if at else 0
        stop = max(int(np.searchsorted(sums, before + _CHUNK_TOKENS, side="right")), at + 1)
        stop += int(rows["side"][stop - 1] == CHOSEN)
        yield at, stop
        at = stop


def _map_array(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    with translate_read_errors(path):
        if not path.stat().st_size:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r").view(np.ndarray)


def _make_provenance(rows: NDArray[np.void], first_part: int) -> ProvenanceTable:
    parts = (rows["part"] + np.uint32(first_part)).astype(np.uint32)
    return ProvenanceTable(rows["hash"], rows["record"], rows["offset"], parts)


def _make_sides(rows: NDArray[np.void], first_part: int) -> PairIndex | None:
    """Pair and side of each document; None where they are no preferences."""
    if not rows["side"].any():
        return None
    origins = _make_provenance(rows, first_part)
    return PairIndex(compute_pair_numbers(origins.parts, origins.records), rows["side"])


@final
class SubsetWriter:
    """Writes shards of one subset one after the other: those of a unit, or of copied ids.

    Args:
        task: the settings of the job.
        subset: its name.
        first_shard: number of the first shard.
        first_part: number of the first part.
        bands: of the documents among which those of the shards are; None where none are kept.
        media: of the same documents; None where they hold none.
    """

    def __init__(
        self,
        task: ShardSettings,
        subset: str,
        first_shard: int,
        first_part: int,
        bands: MinHashSignatures | None = None,
        media: ShardMedia | None = None,
    ) -> None:
        self._task, self._folder = task, task.store / subset
        self._next, self._first_part = first_shard, first_part
        self._cutter = ShardCutter(task.most)
        self._shard: ShardWriter | None = None
        self._rows: list[NDArray[np.void]] = []
        self._bands, self._places = bands, list[NDArray[np.int64]]()
        self._media = media
        self._entries: list[ShardEntry] = []

    def add(
        self,
        rows: NDArray[np.void],
        tokens: NDArray[np.generic],
        starts: NDArray[np.int64],
        mine: NDArray[np.int64],
        trained: NDArray[np.bool_] | None = None,
        first: int = 0,
    ) -> None:
        """Append the documents ``mine`` of a stretch, whose tokens begin at ``starts``.

        ``trained`` says of each of ``tokens`` whether it is trained; None: every one. ``first`` is the place of
        the stretch's first document among those that the bands are of.
        """
        for begin, end, fresh in self._cutter.cut(rows[mine]):
            if fresh:
                self._close()
                self._open()
            chosen = mine[begin:end]
            if self._shard is None:
                raise AssertionError("a cutter's first stretch begins a shard")
            taken = rows[chosen]
            bounds = starts[chosen], starts[chosen] + taken["length"]
            pieces = split_ranges(tokens, *bounds)
            masks = [None] * len(pieces) if trained is None else split_ranges(trained, *bounds)
            for piece, flags in zip(pieces, masks, strict=True):
                self._shard.append(piece, flags)
            self._rows.append(taken)
            self._places.append(first + chosen)

    def finish(self) -> list[ShardEntry]:
        """Close the last shard; the entries of all."""
        self._close()
        return self._entries

    def abandon(self) -> None:
        """Close what is open without a name, after an error."""
        if self._shard is not None:
            with contextlib.suppress(OSError):
                self._shard.abandon()

    def _open(self) -> None:
        make_folder(self._folder)
        self._shard = ShardWriter(self._folder / format_shard_name(self._next), self._task.dtype)
        self._next += 1

    def _close(self) -> None:
        if self._shard is not None:
            rows, self._rows = np.concatenate(self._rows), []
            origins = _make_provenance(rows, self._first_part)
            sides = _make_sides(rows, self._first_part)
            lengths = rows["length"].astype(np.uint32)
            places, self._places = np.concatenate(self._places), []
            bands = None if self._bands is None else self._bands.take(places)
            media = None if self._media is None else self._media.take(places)
            self._entries.append(self._shard.finish(lengths, origins, sides, bands, media))
            self._shard = None
