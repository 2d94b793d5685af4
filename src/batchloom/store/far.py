"""Blocks of a subset that lies elsewhere: fetched once a node, checked as they come, read where they are kept."""

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import shown
from batchloom.core.errors import StoreError
from batchloom.core.ranges import RangeError, Ranges
from batchloom.core.remote_faults import told
from batchloom.store.extents import Extents, bridged, cut, grouped, joined, minus, touching
from batchloom.store.far_files import FarFile, FarFiles
from batchloom.store.format import checksum
from batchloom.store.held import EMPTY, Index, Segment, Segments, added, without
from batchloom.store.segments import TABLE, BlockCache
from batchloom.store.sums import BLOCK, block_sums, roots_of

# A request asks for at most so many blocks, a file of the cache holds about so many: 1 MiB and 8 MiB.
_MOST_ASKED, _MOST_TOGETHER = 256, 2048
# Groups on their way at the same time: what of them has come waits in memory.
_GROUPS = 8
# Blocks that nobody asked for may be so much of what comes, where that saves requests.
_BRIDGED = 0.05
# Of lengths and checksums, all of which an epoch uses, gaps of up to 64 KiB come with the rest: a request costs more.
_SMALL_GAP = 16
# What comes wrong is asked for so often.
_TIMES = 3
# Before a call relies on what it fetches itself alone: rounds in which others deleted what it found, and waits.
_ROUNDS, _NAP, _LONGEST_NAPS = 8, 0.01, 120.0

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that are there and stay while this is: an index, and the bytes of the segments that were wanted."""

    index: Index
    segments: dict[int, NDArray[np.uint8]]


@final
class _Own:
    """What one call has fetched itself, and holds."""

    def __init__(self) -> None:
        self.index, self.segments = EMPTY, dict[int, NDArray[np.uint8]]()


@final
class FarBlocks:
    """The blocks of the files of one subset. Safe to share between threads and to use after a fork.

    Args:
        ranges: asks for stretches of the store's files.
        files: the files of the subset.
        cache: where blocks are kept.
        verify: ``first-read``: blocks that another process fetched are checked when this one first reads
            them; ``full``: and every time they are read; ``off``: only as they come.
    """

    def __init__(self, ranges: Ranges, files: FarFiles, cache: BlockCache, verify: str) -> None:
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
        self._index, self._segments = EMPTY, Segments(self._cache.limit)
        self._busy: set[int] = set()
        self._lock = threading.RLock()

    @property
    def received(self) -> int:
        """Bytes that this process fetched."""
        return self._ranges.received

    def read(
        self, begins: Places, sizes: Places, dtype: np.dtype[np.generic]
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
        first, last = begins // BLOCK, (begins + np.maximum(sizes, 1) - 1) // BLOCK
        held = self._at_once(first, last)
        if held is None:
            held = self.obtain(joined(first, np.where(sizes > 0, last + 1, first)))
        return views_of(held, begins, sizes, dtype)

    def whole(self, numbers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """The content of files that are checked as one, or by blocks, each copied together.

        Raises:
            StoreError, InputError: as :meth:`read`.
        """
        wanted = list(numbers)
        for tries in range(1, _TIMES + 1):
            held = self.obtain(self.files.extents(wanted))
            files = [self.files.files[number] for number in wanted]
            begins = np.array([BLOCK * file.base for file in files])
            sizes = np.array([file.size for file in files])
            found = views_of(held, begins, sizes, np.dtype(np.uint8))
            wrong = [
                number
                for number, data in zip(wanted, found, strict=True)
                if self.files.files[number].checked == "whole"
                and checksum(data.data) != self.files.files[number].checksum
            ]
            if not wrong:
                return found
            if tries == _TIMES:
                break
            self._give_up(self.files.extents(wrong))
        raise self._changed(self.files.files[wrong[0]], 0, self.files.files[wrong[0]].size)

    def obtain(self, wanted: Extents) -> Held:
        """Have blocks here: those that no process of the node has are fetched, once.

        Raises:
            StoreError, InputError: as :meth:`read`.
        """
        own = _Own()
        try:
            return self._obtain(wanted, own)
        finally:
            with self._lock:
                self._busy -= own.segments.keys()

    def _obtain(self, wanted: Extents, own: "_Own") -> Held:
        looked, napped, rounds = False, 0.0, 0
        while rounds < _ROUNDS and napped < _LONGEST_NAPS:
            missing = minus(wanted, self._index.extents)
            if not missing.size:
                if (held := self._ready(wanted)) is not None:
                    return held
                looked, rounds = False, rounds + 1
                continue
            if not looked:
                self._look()
                looked = True
                continue
            with self._cache.claiming() as claims:
                mine = claims.take(cut(missing, _MOST_ASKED))
                if mine.size:
                    # Somebody may have fetched them between the look and the claim.
                    self._look()
                    asked = joined(mine[:, 0], mine[:, 1])
                    self._fetch(minus(asked, self._index.extents), own)
                    rounds += 1
                    continue
            time.sleep(_NAP)
            looked, napped = False, napped + _NAP
        # What others keep is deleted as fast as it is found: all of it is fetched, and nothing else relied on.
        self._fetch(minus(wanted, own.index.extents), own)
        return Held(own.index, own.segments)

    def _at_once(self, first: Places, last: Places) -> Held | None:
        """What is wanted where all of it is mapped and known to be right, as nearly always; else None."""
        index = self._index
        at = index.starts.searchsorted(first, side="right") - 1
        if self._verify == "full" or not len(index.owners) or not at.size or at.min() < 0:
            return None
        if not ((index.stops[at] > last) & index.sound[at]).all():
            return None
        known, segments = self._segments.known, {}
        for owner in set(index.owners[at].tolist()):
            segment = known.get(owner)
            data = segment.data if segment is not None else None
            if data is None:
                return None
            segments[owner] = data
        return Held(index, segments)

    def _ready(self, wanted: Extents) -> Held | None:
        """The blocks that the index has, mapped and checked; None where some turned out to be gone or wrong."""
        with self._lock:
            index = self._index
            extents = index.extents
            # Another thread may have given some of it up meanwhile.
            if minus(wanted, extents).size:
                return None
            at = np.flatnonzero(touching(extents, wanted))
            segments = self._mapped(set(index.owners[at].tolist()))
            if segments is None:
                return None
        held = Held(index, segments)
        doubted = at if self._verify == "full" else at[~index.sound[at]]
        extents = extents[doubted]
        wrong = self._wrong(held, extents)
        if wrong.size:
            self._give_up(extents[wrong])
            return None
        index.sound[doubted] = True
        return held

    def _wrong(self, held: Held, extents: Extents) -> NDArray[np.int64]:
        """Which of these extents hold other blocks than their checksums say."""
        expected = self._expected(self._sums_for(extents), extents)
        begins, sizes = BLOCK * extents[:, 0], self._sizes(extents)
        found = views_of(held, begins, sizes, np.dtype(np.uint8))
        trusted = self._verify == "off"
        wrong = [
            at
            for at, (data, sums) in enumerate(zip(found, expected, strict=True))
            if sums is not None
            and not (trusted and self._file_at(int(extents[at, 0])).checked == "blocks")
            and not np.array_equal(block_sums(data.data), sums)
        ]
        return np.array(wrong, np.int64)

    def _sizes(self, extents: Extents) -> NDArray[np.int64]:
        """Bytes of extents; the last block of a file is shorter."""
        numbers = self.files.of(extents)
        ends = BLOCK * self.files.bases[numbers] + self.files.sizes[numbers]
        found: NDArray[np.int64] = np.minimum(BLOCK * extents[:, 1], ends) - BLOCK * extents[:, 0]
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
            self._index = without(self._index, owners)

    def _give_up(self, extents: Extents) -> None:
        """Delete what is kept of some blocks: their bytes are wrong."""
        with self._lock:
            at = touching(self._index.extents, extents)
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
                    self._learn(Segment(name, table, None))

    def _learn(self, segment: Segment) -> None:
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
        owner = self._segments.add(segment)
        self._index = added(self._index, owner, extents, places[ours], sound=False)

    def _sums_for(self, extents: Extents) -> Held:
        """What some blocks are checked by, all of it checked itself."""
        files = self.files.files
        starts, stops, heads = [], [], set()
        for number, (first, stop) in zip(
            self.files.of(extents).tolist(), extents.tolist(), strict=True
        ):
            file = files[number]
            if file.checked == "blocks":
                begin = BLOCK * files[file.beside].base
                starts.append((begin + (first - file.base) * file.width) // BLOCK)
                stops.append(-(-(begin + (stop - file.base) * file.width) // BLOCK))
            elif file.checked == "entries" and file.beside not in self._roots:
                heads.add(file.beside)
        for number, head in zip(heads, self.whole(heads) if heads else [], strict=True):
            file = files[number]
            roots = roots_of(head.data, file.checksum, file.covers, file.width)
            if roots is None:
                raise self._changed(file, 0, file.size)
            self._roots[number] = roots
        return self.obtain(joined(starts, stops)) if starts else Held(EMPTY, {})

    def _expected(self, sums: Held, extents: Extents) -> list[NDArray[np.uint64] | None]:
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
                begins.append(BLOCK * self.files.files[file.beside].base + first * file.width)
                sizes.append((stop - first) * file.width)
        views = views_of(
            sums, np.array(begins, np.int64), np.array(sizes, np.int64), np.dtype("<u8")
        )
        for at, width, view in zip(places, widths, views, strict=True):
            found[at] = view[::width]
        return found

    def _fetch(self, extents: Extents, own: "_Own") -> None:
        """Fetch blocks, check them and keep them, a bounded number at a time."""
        if not extents.size:
            return
        numbers = self.files.of(extents)
        wide = bridged(extents, numbers, _BRIDGED, _SMALL_GAP * self.files.dense[numbers])
        asked = cut(wide, _MOST_ASKED)
        sums = self._sums_for(asked)
        waiting: deque[tuple[Extents, list[Future[bytes]]]] = deque()
        try:
            for group in grouped(asked, _MOST_TOGETHER):
                waiting.append((group, [self._ask(*extent) for extent in group.tolist()]))
                if len(waiting) == _GROUPS:
                    self._arrive(*waiting[0], sums, own)
                    waiting.popleft()
            while waiting:
                self._arrive(*waiting[0], sums, own)
                waiting.popleft()
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()

    def _ask(self, first: int, stop: int) -> Future[bytes]:
        file = self._file_at(first)
        start = file.at + BLOCK * (first - file.base)
        size = file.at + file.size
        return self._ranges.ask(file.name, start, start + _bytes_of(file, first, stop), size)

    def _file_at(self, block: int) -> FarFile:
        return self.files.files[bisect_right(self._bases, block) - 1]

    def _arrive(
        self, group: Extents, futures: list[Future[bytes]], sums: Held, own: "_Own"
    ) -> None:
        """Check what came of a group, and keep it."""
        expected = self._expected(sums, group)
        pieces = [
            self._checked(future, first, stop, one)
            for (first, stop), future, one in zip(group.tolist(), futures, expected, strict=True)
        ]
        extents = joined(group[:, 0], group[:, 1])
        whole: list[bytes] = []
        for bounds in np.split(np.arange(len(group)), group[:, 0].searchsorted(extents[1:, 0])):
            some = [pieces[at] for at in bounds]
            whole.append(some[0] if len(some) == 1 else b"".join(some))
        numbers = self.files.of(extents)
        rows = np.empty(len(extents), TABLE)
        rows["low"], rows["high"] = self.files.keys[numbers].T
        rows["first"] = extents[:, 0] - self.files.bases[numbers]
        rows["blocks"] = extents[:, 1] - extents[:, 0]
        name, table, data = self._cache.keep(rows, whole)
        blocks = rows["blocks"].astype(np.int64)
        with self._lock:
            owner = self._segments.add(Segment(name, table, data))
            places = np.cumsum(blocks) - blocks
            self._index = added(self._index, owner, extents, places, sound=True)
            own.index = added(own.index, owner, extents, places, sound=True)
            own.segments[owner] = data
            self._busy.add(owner)
            self._forget(self._segments.mapped(owner, self._busy))

    def _checked(
        self, coming: Future[bytes], first: int, stop: int, expected: NDArray[np.uint64] | None
    ) -> bytes:
        file = self._file_at(first)
        for _ in range(_TIMES):
            try:
                data = coming.result()
            except RangeError as error:
                self._refuse(error)
            if expected is None or np.array_equal(block_sums(data), expected):
                return data
            coming = self._ask(first, stop)
        start = BLOCK * (first - file.base)
        raise self._changed(file, start, start + _bytes_of(file, first, stop))

    def _refuse(self, error: RangeError) -> NoReturn:
        url = f"{self._ranges.url}/{error.name}"
        if error.fault.what == "missing":
            raise StoreError(
                f"{shown(url)} is gone: the manifest of its store names it. Restore it from a copy; the run goes on "
                "from its last checkpoint."
            ) from None
        if error.fault.what == "refused":
            raise StoreError(
                f"{shown(url)} is not what the manifest of its store says: {error.fault.words}. It was cut short or "
                "written anew; restore it from a copy."
            ) from None
        raise told(error.fault, url) from None

    def _changed(self, file: FarFile, start: int, stop: int) -> StoreError:
        place = shown(f"{self._ranges.url}/{file.name}")
        return StoreError(
            f"{place} holds other bytes from {file.at + start:,} to {file.at + stop:,} than the checksums of its "
            f"store say ({_TIMES} tries): it was changed or damaged. Restore it from a copy; the run goes on from its "
            "last checkpoint."
        )


def _bytes_of(file: FarFile, first: int, stop: int) -> int:
    """Bytes in blocks of a file, whose last is shorter."""
    return min(BLOCK * (stop - file.base), file.size) - BLOCK * (first - file.base)


def views_of(
    held: Held, begins: Places, sizes: Places, dtype: np.dtype[np.generic]
) -> list[NDArray[Any]]:
    """Stretches of bytes that are held, as items: views, or copies where they lie in several extents.

    Args:
        held: what is there.
        begins: where each begins: 4096 times the number of its file's first block, and its place in the file [N].
        sizes: bytes of each [N].
        dtype: of the items; begins and sizes are multiples of its.
    """
    index, last = held.index, (begins + np.maximum(sizes, 1) - 1) // BLOCK
    if not begins.size or not index.starts.size:
        return [np.empty(0, dtype) for _ in range(begins.size)]
    at = index.starts.searchsorted(begins // BLOCK, side="right") - 1
    inside = (at >= 0) & (index.stops[at] > last)
    owners = np.where(inside, index.owners[at], -1)
    offsets = (index.places[at] - index.starts[at]) * BLOCK + begins
    shift = dtype.itemsize.bit_length() - 1
    typed = {owner: data.view(dtype) for owner, data in held.segments.items()}
    views: list[NDArray[Any]] = []
    columns = (owners, offsets >> shift, sizes >> shift)
    for owner, begin, count in zip(*(column.tolist() for column in columns), strict=True):
        data = typed.get(owner)
        if data is None:
            number = len(views)
            views.append(_joint(held, int(begins[number]), int(sizes[number])).view(dtype))
        else:
            views.append(data[begin : begin + count])
    return views


def _joint(held: Held, begin: int, size: int) -> NDArray[np.uint8]:
    """Bytes that are held, copied together where they lie in several extents."""
    pieces, end, index = [], begin + size, held.index
    while begin < end:
        at = int(index.starts.searchsorted(begin // BLOCK, side="right")) - 1
        first, stop = int(index.starts[at]), int(index.stops[at])
        if at < 0 or begin >= BLOCK * stop:
            raise AssertionError("what is held covers what was wanted")
        offset = BLOCK * (int(index.places[at]) - first) + begin
        some = min(BLOCK * stop, end) - begin
        pieces.append(held.segments[int(index.owners[at])][offset : offset + some])
        begin += some
    return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint8)])
