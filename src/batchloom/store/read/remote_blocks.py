"""Blocks of a subset that lies elsewhere: fetched once a node, checked as they come, read where they are kept."""

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import redact_url
from batchloom.core.errors import StoreError
from batchloom.remote import (
    BLOCK_BYTES,
    BLOCK_TABLE_DTYPE,
    EMPTY_INDEX,
    BlockCache,
    CachedBlocks,
    CacheFile,
    CacheFileSet,
    IntArray,
    Intervals,
    RangeError,
    RangeFetcher,
    add_to_index,
    bridge_gaps,
    count_interval_blocks,
    group_intervals,
    join_range,
    make_remote_error,
    mask_overlaps,
    merge_intervals,
    remove_from_index,
    slice_ranges,
    split_by_ranges,
    split_intervals,
    subtract_intervals,
    view_ranges,
)
from batchloom.store.format import compute_block_checksums, compute_checksum, parse_root_checksums
from batchloom.store.read.remote_file_table import RemoteFileTable, RemoteStoreFile

# A request asks for at most so many blocks, a file of the cache holds about so many: 1 MiB and 8 MiB.
_MAX_REQUEST_BLOCKS, _MAX_FILE_BLOCKS = 256, 2048
# Groups on their way at the same time: what of them has come waits in memory.
_MAX_CONCURRENT_GROUPS = 8
# Blocks that nobody asked for may be so much of what comes, where that saves requests.
_MAX_GAP_SHARE = 0.05
# Of lengths and checksums, all of which an epoch uses, gaps of up to 64 KiB come with the rest: a request costs more.
_SMALL_GAP_BLOCKS = 16
# What others fetched is checked about so many blocks at a time: 1 MiB, so that most extents are checked as a whole.
_CHECK_BLOCKS = 256
# What comes wrong is asked for so often.
MAX_FETCH_ATTEMPTS = 3
# Before a call relies on what it fetches itself alone: rounds in which others deleted what it found, and waits.
_MAX_ROUNDS, _POLL_SECONDS, _MAX_WAIT_SECONDS = 8, 0.01, 120.0


@final
class _FetchedBlocks:
    """What one call has fetched itself, and holds."""

    def __init__(self) -> None:
        self.index, self.segments = EMPTY_INDEX, dict[int, NDArray[np.uint8]]()


@final
class RemoteBlocks:
    """The blocks of the files of one subset. Safe to share between threads and to use after a fork.

    Args:
        ranges: asks for stretches of the store's files.
        files: the files of the subset.
        cache: where blocks are kept.
        verify: ``first-read``: blocks that another process fetched are checked when this one first reads
            them; ``full``: and every time they are read; ``off``: only as they come, and those that were written
            before the machine was last started.
    """

    def __init__(
        self, ranges: RangeFetcher, files: RemoteFileTable, cache: BlockCache, verify: str
    ) -> None:
        self.files, self._ranges, self._cache, self._verify = files, ranges, cache, verify
        self._roots: dict[int, NDArray[np.uint64]] = {}
        self._keys = np.argsort(files.keys[:, 0], kind="stable")
        self._bases: list[int] = files.bases.tolist()
        self._refused: set[str] = set()
        self._begin()

    def after_fork(self) -> None:
        """Begin anew: a thread that was at it does not live on in a child, but the locks it held would."""
        # Those of a process that lives on stay as they are: other subsets share them.
        self._ranges.after_fork()
        self._cache.after_fork()
        self._begin()

    def _begin(self) -> None:
        self._index, self._segments = EMPTY_INDEX, CacheFileSet(self._cache.limit)
        self._busy: set[int] = set()
        self._lock = threading.RLock()

    @property
    def received(self) -> int:
        """Bytes that this process fetched."""
        return self._ranges.received

    def read(
        self, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
    ) -> list[NDArray[Any]]:
        """Stretches of files, as views of what is kept.

        Args:
            begins: where each begins: 4096 times the number of its file's first block, and its place in the file [N].
            sizes: bytes of each [N].
            dtype: of the items; begins and sizes are multiples of its.

        Raises:
            StoreError: a file is gone, or holds other bytes than its checksums say.
            InputError: it cannot be reached.
        """
        views = None if self._verify == "full" else self._at_once(begins, sizes, dtype)
        if views is not None:
            return views
        first = begins // BLOCK_BYTES
        wanted = merge_intervals(
            first, np.where(sizes > 0, -(-(begins + sizes) // BLOCK_BYTES), first)
        )
        held = self.obtain(wanted, always=self._verify == "full")
        return view_ranges(held, begins, sizes, dtype)

    def here(self, numbers: Iterable[int]) -> bool:
        """Whether all blocks of some files are mapped and known to be right: then there is nothing to fetch."""
        index = self._index
        if (
            not index.sound.all()
            or subtract_intervals(self.files.extents(numbers), index.extents).size
        ):
            return False
        with self._lock:
            known = self._segments.known
            return all(known[owner].data is not None for owner in np.unique(index.owners).tolist())

    def whole(self, numbers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """The content of files that are checked as one, or by blocks, each copied together.

        Raises:
            StoreError, InputError: as :meth:`read`.
        """
        wanted = list(numbers)
        for tries in range(1, MAX_FETCH_ATTEMPTS + 1):
            held = self.obtain(self.files.extents(wanted))
            files = [self.files.files[number] for number in wanted]
            begins = np.array([BLOCK_BYTES * file.base for file in files])
            sizes = np.array([file.size for file in files])
            found = view_ranges(held, begins, sizes, np.dtype(np.uint8))
            wrong = [
                number
                for number, data in zip(wanted, found, strict=True)
                if self.files.files[number].checked == "whole"
                and compute_checksum(data.data) != self.files.files[number].checksum
            ]
            if not wrong:
                return found
            if tries == MAX_FETCH_ATTEMPTS:
                break
            self._give_up(self.files.extents(wrong))
        raise self._changed(self.files.files[wrong[0]], 0, self.files.files[wrong[0]].size)

    def obtain(self, wanted: Intervals, *, always: bool = False) -> CachedBlocks:
        """Have blocks here: those that no process of the node has are fetched, once.

        Args:
            wanted: the blocks.
            always: whether those that this process knows to be right are checked again.

        Raises:
            StoreError, InputError: as :meth:`read`.
        """
        own = _FetchedBlocks()
        try:
            return self._obtain(wanted, own, always=always)
        finally:
            with self._lock:
                self._busy -= own.segments.keys()

    def _obtain(self, wanted: Intervals, own: "_FetchedBlocks", *, always: bool) -> CachedBlocks:
        looked, napped, rounds, least = False, 0.0, 0, 1 << 62
        while rounds < _MAX_ROUNDS and napped < _MAX_WAIT_SECONDS:
            missing = subtract_intervals(wanted, self._index.extents)
            if not missing.size:
                if (held := self._ready(wanted, always=always)) is not None:
                    return held
                looked, rounds = False, rounds + 1
                continue
            if not looked:
                self._look()
                looked = True
                continue
            with self._cache.open_fetch_locks() as claims:
                mine = claims.take(split_intervals(missing, _MAX_REQUEST_BLOCKS))
                if mine.size:
                    # Somebody may have fetched them between the look and the claim.
                    self._look()
                    asked = merge_intervals(mine[:, 0], mine[:, 1])
                    self._fetch(subtract_intervals(asked, self._index.extents), own)
                    # Many processes that want the same come forward together, each by what it claimed.
                    left = count_interval_blocks(subtract_intervals(wanted, self._index.extents))
                    rounds, least = rounds + (left >= least), min(left, least)
                    continue
            time.sleep(_POLL_SECONDS)
            looked, napped = False, napped + _POLL_SECONDS
        # What others keep is deleted as fast as it is found: all of it is fetched, and nothing else relied on.
        self._fetch(subtract_intervals(wanted, own.index.extents), own)
        return CachedBlocks(own.index, own.segments)

    def _at_once(
        self, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
    ) -> list[NDArray[Any]] | None:
        """What :meth:`read` gives, where all of it is mapped and known to be right, as nearly always; else None."""
        index, ends = self._index, begins + sizes
        at = index.starts.searchsorted(begins // BLOCK_BYTES, side="right") - 1
        if not at.size or not index.starts.size or at.min() < 0:
            return None
        apart = np.flatnonzero(ends > index.ends[at])
        touched = at
        if apart.size:
            to = index.starts.searchsorted((ends[apart] - 1) // BLOCK_BYTES, side="right") - 1
            if (index.runs[to] != index.runs[at[apart]]).any() or (
                ends[apart] > index.ends[to]
            ).any():
                return None
            between = zip((at[apart] + 1).tolist(), (to + 1).tolist(), strict=True)
            touched = np.concatenate([at, *(np.arange(*one) for one in between)])
        if not index.sound[touched].all():
            return None
        known, segments = self._segments.known, {}
        for owner in set(index.owners[touched].tolist()):
            segment = known.get(owner)
            data = segment.data if segment is not None else None
            if segment is None or data is None:
                return None
            segment.used = True
            segments[owner] = data
        views = slice_ranges(index, segments, at, begins, sizes, dtype)
        for number in apart.tolist():
            whole = join_range(
                CachedBlocks(index, segments), int(begins[number]), int(sizes[number])
            )
            views[number] = whole.view(dtype)
        return views

    def _ready(self, wanted: Intervals, *, always: bool) -> CachedBlocks | None:
        """The blocks that the index has, mapped and checked; None where some turned out to be gone or wrong."""
        with self._lock:
            index = self._index
            # Another thread may have given some of it up meanwhile.
            if subtract_intervals(wanted, index.extents).size:
                return None
            rows, pieces = split_by_ranges(wanted, index.starts, index.stops)
            segments = self._mapped(set(index.owners[rows].tolist()))
            if segments is None:
                return None
            known = {owner: self._segments.known[owner] for owner in segments}
        held = CachedBlocks(index, segments)
        doubted = np.arange(len(rows)) if always else np.flatnonzero(~index.sound[rows])
        if doubted.size and not self._sound(
            held, known, (rows[doubted], pieces[doubted]), always=always
        ):
            return None
        return held

    def _sound(
        self,
        held: CachedBlocks,
        known: dict[int, CacheFile],
        doubted: tuple[IntArray, Intervals],
        *,
        always: bool,
    ) -> bool:
        """Whether blocks are right; those that are not are given up.

        Args:
            held: all that is asked for.
            known: its segments.
            doubted: rows of the index, and of each what is asked for of it.
            always: whether blocks are looked at that are known to be right.
        """
        index, (rows, pieces) = held.index, doubted
        if not always:
            # What lies around it is read soon, and many small checks cost more than their bytes.
            pieces = _round_to_units(pieces, index.starts[rows], index.stops[rows])
        places = index.places[rows] + pieces[:, 0] - index.starts[rows]
        bits = [
            known[owner].sound[place : place + count]
            for owner, place, count in zip(
                index.owners[rows].tolist(),
                places.tolist(),
                (pieces[:, 1] - pieces[:, 0]).tolist(),
                strict=True,
            )
        ]
        unknown = pieces if always else _find_unsound(pieces[:, 0], bits)
        wrong = self._find_wrong(held, unknown)
        if wrong.size:
            self._give_up(unknown[wrong])
            return False
        for one in bits:
            one[:] = True
        for row in set(rows.tolist()):
            place, count = index.places[row], index.stops[row] - index.starts[row]
            index.sound[row] = known[int(index.owners[row])].sound[place : place + count].all()
        return True

    def _find_wrong(self, held: CachedBlocks, extents: Intervals) -> NDArray[np.int64]:
        """Which of these extents hold other blocks than their checksums say."""
        expected = self._list_expected(self._load_checksums(extents), extents)
        begins, sizes = BLOCK_BYTES * extents[:, 0], self._sizes(extents)
        found = view_ranges(held, begins, sizes, np.dtype(np.uint8))
        wrong = [
            at
            for at, (data, sums) in enumerate(zip(found, expected, strict=True))
            if sums is not None and not np.array_equal(compute_block_checksums(data.data), sums)
        ]
        return np.array(wrong, np.int64)

    def _sizes(self, extents: Intervals) -> NDArray[np.int64]:
        """Bytes of extents; the last block of a file is shorter."""
        numbers = self.files.of(extents)
        ends = BLOCK_BYTES * self.files.bases[numbers] + self.files.sizes[numbers]
        found: NDArray[np.int64] = (
            np.minimum(BLOCK_BYTES * extents[:, 1], ends) - BLOCK_BYTES * extents[:, 0]
        )
        return found

    def _mapped(self, owners: set[int]) -> dict[int, NDArray[np.uint8]] | None:
        """The bytes of segments; None where one is gone, which is forgotten then. Holds the lock."""
        found: dict[int, NDArray[np.uint8]] = {}
        for owner in owners:
            segment = self._segments.known.get(owner)
            if segment is None:
                return None
            data = segment.data
            if data is None and segment.name is not None:
                data = segment.data = self._cache.map(segment.name, segment.table)
            if data is None:
                self._forget({owner})
                return None
            found[owner] = data
        for owner in owners:
            self._forget(self._segments.mapped(owner, self._busy | owners))
        return found

    def _forget(self, owners: set[int]) -> None:
        if owners:
            for owner in owners:
                self._segments.remove(owner)
            self._index = remove_from_index(self._index, owners)

    def _give_up(self, extents: Intervals) -> None:
        """Delete what is kept of some blocks: their bytes are wrong."""
        with self._lock:
            at = mask_overlaps(self._index.extents, extents)
            owners = set(self._index.owners[at].tolist())
            for owner in owners:
                name = self._segments.known[owner].name
                if name is not None:
                    self._refused.add(name)
                    self._cache.drop(name)
            self._forget(owners)

    def _look(self) -> None:
        """Learn what other processes keep."""
        names = self._cache.names()
        with self._lock:
            known = self._segments.names
            gone = {
                number
                for name, number in known.items()
                if name not in names and self._segments.known[number].data is None
            }
            self._forget(gone)
            for name in sorted(names - known.keys() - self._refused):
                table = self._cache.look(name)
                if table is not None:
                    blocks = int(table.rows["blocks"].sum())
                    self._learn(CacheFile(name, table, None, np.zeros(blocks, bool)))

    def _learn(self, segment: CacheFile) -> None:
        """Add a segment that another process made, as far as it is of these files."""
        rows = segment.table.rows
        blocks = rows["blocks"].astype(np.int64)
        places = np.cumsum(blocks) - blocks
        keys = self.files.keys
        at = np.minimum(keys[self._keys, 0].searchsorted(rows["low"]), len(keys) - 1)
        numbers = self._keys[at]
        ours = (keys[numbers, 0] == rows["low"]) & (keys[numbers, 1] == rows["high"])
        starts = self.files.bases[numbers] + rows["first"].astype(np.int64)
        extents = np.stack([starts, starts + blocks], axis=1)[ours]
        sound = np.zeros(len(extents), bool)
        if self._verify == "off" and segment.table.whole:
            # What others are checked by is checked itself.
            sound = self.files.by_blocks[numbers[ours]]
        owner = self._segments.add(segment)
        self._index = add_to_index(self._index, owner, extents, places[ours], sound)

    def _load_checksums(self, extents: Intervals) -> CachedBlocks:
        """What some blocks are checked by, all of it checked itself."""
        files = self.files.files
        starts, stops, heads = [], [], set()
        for number, (first, stop) in zip(
            self.files.of(extents).tolist(), extents.tolist(), strict=True
        ):
            file = files[number]
            if file.checked == "blocks":
                begin = BLOCK_BYTES * files[file.beside].base
                starts.append((begin + (first - file.base) * file.width) // BLOCK_BYTES)
                stops.append(-(-(begin + (stop - file.base) * file.width) // BLOCK_BYTES))
            elif file.checked == "entries" and file.beside not in self._roots:
                heads.add(file.beside)
        for number, head in zip(heads, self.whole(heads) if heads else [], strict=True):
            file = files[number]
            roots = parse_root_checksums(head.data, file.checksum, file.covers, file.width)
            if roots is None:
                raise self._changed(file, 0, file.size)
            self._roots[number] = roots
        return (
            self.obtain(merge_intervals(starts, stops)) if starts else CachedBlocks(EMPTY_INDEX, {})
        )

    def _list_expected(
        self, sums: CachedBlocks, extents: Intervals
    ) -> list[NDArray[np.uint64] | None]:
        """The checksums of the blocks of each extent; None for those that are not checked one by one."""
        found: list[NDArray[np.uint64] | None] = [None] * len(extents)
        places, begins, sizes, widths = [], [], [], []
        numbers = self.files.of(extents).tolist()
        for at, (number, (start, end)) in enumerate(zip(numbers, extents.tolist(), strict=True)):
            file = self.files.files[number]
            first, stop = start - file.base, end - file.base
            if file.checked == "entries":
                found[at] = self._roots[file.beside][first:stop]
            elif file.checked == "blocks":
                places.append(at)
                widths.append(file.width // 8)
                begins.append(BLOCK_BYTES * self.files.files[file.beside].base + first * file.width)
                sizes.append((stop - first) * file.width)
        views = view_ranges(
            sums, np.array(begins, np.int64), np.array(sizes, np.int64), np.dtype("<u8")
        )
        for at, width, view in zip(places, widths, views, strict=True):
            found[at] = view[::width]
        return found

    def _fetch(self, extents: Intervals, own: "_FetchedBlocks") -> None:
        """Fetch blocks, check them and keep them, a bounded number at a time."""
        if not extents.size:
            return
        numbers = self.files.of(extents)
        wide = bridge_gaps(
            extents, numbers, _MAX_GAP_SHARE, _SMALL_GAP_BLOCKS * self.files.dense[numbers]
        )
        asked = split_intervals(wide, _MAX_REQUEST_BLOCKS)
        sums = self._load_checksums(asked)
        waiting: deque[tuple[Intervals, list[Future[bytes]]]] = deque()
        try:
            for group in group_intervals(asked, _MAX_FILE_BLOCKS):
                waiting.append((group, [self._ask(*extent) for extent in group.tolist()]))
                if len(waiting) == _MAX_CONCURRENT_GROUPS:
                    self._store_group(*waiting[0], sums, own)
                    waiting.popleft()
            while waiting:
                self._store_group(*waiting[0], sums, own)
                waiting.popleft()
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()

    def _ask(self, first: int, stop: int) -> Future[bytes]:
        file = self._find_file(first)
        start = file.at + BLOCK_BYTES * (first - file.base)
        size = file.at + file.size
        return self._ranges.ask(file.name, start, start + _count_bytes(file, first, stop), size)

    def _find_file(self, block: int) -> RemoteStoreFile:
        return self.files.files[bisect_right(self._bases, block) - 1]

    def _store_group(
        self,
        group: Intervals,
        futures: list[Future[bytes]],
        sums: CachedBlocks,
        own: "_FetchedBlocks",
    ) -> None:
        """Check what came of a group, and keep it."""
        expected = self._list_expected(sums, group)
        pieces = [
            self._checked(future, first, stop, one)
            for (first, stop), future, one in zip(group.tolist(), futures, expected, strict=True)
        ]
        extents = merge_intervals(group[:, 0], group[:, 1])
        whole: list[bytes] = []
        for bounds in np.split(np.arange(len(group)), group[:, 0].searchsorted(extents[1:, 0])):
            some = [pieces[at] for at in bounds]
            whole.append(some[0] if len(some) == 1 else b"".join(some))
        numbers = self.files.of(extents)
        rows = np.empty(len(extents), BLOCK_TABLE_DTYPE)
        rows["low"], rows["high"] = self.files.keys[numbers].T
        rows["first"] = extents[:, 0] - self.files.bases[numbers]
        rows["blocks"] = extents[:, 1] - extents[:, 0]
        name, table, data = self._cache.keep(rows, whole)
        blocks = rows["blocks"].astype(np.int64)
        with self._lock:
            own_sound = np.ones(int(blocks.sum()), bool)
            owner = self._segments.add(CacheFile(name, table, data, own_sound))
            places, sound = np.cumsum(blocks) - blocks, np.ones(len(extents), bool)
            self._index = add_to_index(self._index, owner, extents, places, sound)
            own.index = add_to_index(own.index, owner, extents, places, sound)
            own.segments[owner] = data
            self._busy.add(owner)
            self._forget(self._segments.mapped(owner, self._busy))

    def _checked(
        self, coming: Future[bytes], first: int, stop: int, expected: NDArray[np.uint64] | None
    ) -> bytes:
        file = self._find_file(first)
        for _ in range(MAX_FETCH_ATTEMPTS):
            try:
                data = coming.result()
            except RangeError as error:
                self._refuse(error)
            if expected is None or np.array_equal(compute_block_checksums(data), expected):
                return data
            coming = self._ask(first, stop)
        start = BLOCK_BYTES * (first - file.base)
        raise self._changed(file, start, start + _count_bytes(file, first, stop))

    def _refuse(self, error: RangeError) -> NoReturn:
        url = f"{self._ranges.url}/{error.name}"
        if error.fault.what == "missing":
            raise StoreError(
                f"{redact_url(url)} is gone: the manifest of its store names it. Restore it from a copy; the run "
                f"goes on "
                "from its last checkpoint."
            ) from None
        if error.fault.what == "refused":
            raise StoreError(
                f"{redact_url(url)} is not what the manifest of its store says: {error.fault.words}. It was cut "
                f"short or "
                "written anew; restore it from a copy."
            ) from None
        raise make_remote_error(error.fault, url) from None

    def _changed(self, file: RemoteStoreFile, start: int, stop: int) -> StoreError:
        place = redact_url(f"{self._ranges.url}/{file.name}")
        return StoreError(
            f"{place} holds other bytes from {file.at + start:,} to {file.at + stop:,} than the checksums of its "
            f"store say ({MAX_FETCH_ATTEMPTS} tries): it was changed or damaged. Restore it from a copy; the run "
            f"goes on from its "
            "last checkpoint."
        )


def _count_bytes(file: RemoteStoreFile, first: int, stop: int) -> int:
    """Bytes in blocks of a file, whose last is shorter."""
    return min(BLOCK_BYTES * (stop - file.base), file.size) - BLOCK_BYTES * (first - file.base)


def _round_to_units(pieces: Intervals, starts: IntArray, stops: IntArray) -> Intervals:
    """Pieces of extents made whole units of blocks, counted in their extents; they may overlap then."""
    begins = pieces[:, 0] - (pieces[:, 0] - starts) % _CHECK_BLOCKS
    ends = starts - (starts - pieces[:, 1]) // _CHECK_BLOCKS * _CHECK_BLOCKS
    return np.stack([begins, np.minimum(ends, stops)], axis=1)


def _find_unsound(starts: IntArray, bits: list[NDArray[np.bool_]]) -> Intervals:
    """The blocks of stretches, of which each begins at a block and has a bit for each, whose bits are not set."""
    blocks = [
        start + np.flatnonzero(~one) for start, one in zip(starts.tolist(), bits, strict=True)
    ]
    apart = np.concatenate(blocks) if blocks else np.empty(0, np.int64)
    return merge_intervals(apart, apart + 1)
