"""A rank's share of a stream: pools come in lane by lane, the sequences of steps go out."""

import logging
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, TooManyBadRecordsError
from batchloom.plan import PlanSpec
from batchloom.plan.order import (
    describe_all_too_long,
    list_rank_lanes,
    make_no_sequence_error,
    pack_lane_pool,
)
from batchloom.plan.packing import Rows, join_rows, reorder_rows, slice_rows
from batchloom.preparation.settings import count_allowed_bad
from batchloom.store.format import StoredMedium
from batchloom.streaming.keep import rename_out_in_errors
from batchloom.streaming.lane import LanePosition, StreamPool
from batchloom.streaming.stream_media import PoolMedia

_LOG = logging.getLogger("batchloom")
# Batches that a loader may have ahead of the one it gave last; beyond it a state is not asked for.
_MAX_CACHED_STEPS = 1024 + 8
_MAX_EMPTY_EPOCHS = 2

# Where each lane goes on, and its sequences before that.
LaneCursors = Mapping[int, tuple[LanePosition, int]]


class PoolSource(Protocol):
    """Gives the pools of lanes; what is asked for ahead is made meanwhile."""

    def ask(self, lane: int, position: LanePosition) -> None:
        """The pool at this place will be taken next of its lane."""

    def take(self, lane: int, position: LanePosition) -> StreamPool:
        """The pool at this place."""

    def close(self) -> None:
        """End whatever makes pools."""


@final
class _ActivePool:
    """A pool that is being served."""

    __slots__ = ("before", "rows", "starts", "stream_pool")

    def __init__(self, stream_pool: StreamPool, rows: Rows, before: int) -> None:
        self.stream_pool, self.rows, self.before = stream_pool, rows, before
        self.starts = np.cumsum(stream_pool.lengths, dtype=np.int64) - stream_pool.lengths

    @property
    def end(self) -> int:
        """Sequences of the lane up to the end of the pool."""
        return self.before + len(self.rows)


@final
class StreamStepReader:
    """The tokens of one step; documents are numbered through the pools it was made of."""

    def __init__(self, pools: Sequence[_ActivePool], end_id: int) -> None:
        self._pools, self.end_id = pools, end_id
        sizes = [len(pool.stream_pool.lengths) for pool in pools]
        self.bases = np.cumsum([0, *sizes[:-1]])
        self.masked = any(pool.stream_pool.trained is not None for pool in pools)

    def _spans(self, documents: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Number of the pool of each span, and the place of its first token there."""
        pools = self.bases.searchsorted(documents, side="right") - 1
        begins = starts.copy()
        for number in np.unique(pools).tolist():
            pool_spans = pools == number
            begins[pool_spans] += self._pools[number].starts[documents[pool_spans] - self.bases[number]]
        return pools.tolist(), begins.tolist()

    def media(self, documents: NDArray[np.int64]) -> list[tuple[PoolMedia, tuple[StoredMedium, ...]]]:
        """Where the media of documents lie, and which they are, in the order of their tokens."""
        pools = self.bases.searchsorted(documents, side="right") - 1
        document_media = []
        for pool, document in zip(pools.tolist(), documents.tolist(), strict=True):
            pool_media = self._pools[pool].stream_pool.media
            if pool_media is None:
                raise AssertionError("a stream with a processor reads media")
            document_media.append((pool_media, pool_media.of(document - int(self.bases[pool]))))
        return document_media

    def read(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.generic]]:
        """The ids of spans, as views."""
        pools, begins = self._spans(documents, starts)
        tokens = [pool.stream_pool.tokens for pool in self._pools]
        spans = zip(pools, begins, lengths.tolist(), strict=True)
        return [tokens[pool][at : at + size] for pool, at, size in spans]

    def mask(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.bool_]]:
        """For the tokens of spans whether each is trained."""
        pools, begins = self._spans(documents, starts)
        flags = [pool.stream_pool.trained for pool in self._pools]
        span_masks = []
        for pool, at, size in zip(pools, begins, lengths.tolist(), strict=True):
            trained = flags[pool]
            span_masks.append(np.ones(size, bool) if trained is None else trained[at : at + size])
        return span_masks


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """What a feed serves.

    Attributes:
        spec: of the order.
        lanes: how many there are.
        rank: which of them are served: those of this rank.
        world_size: of so many.
        end_id: the id that fills padding.
        max_bad: how many records may be bad, as a recipe says it.
    """

    spec: PlanSpec
    lanes: int
    rank: int
    world_size: int
    end_id: int
    max_bad: int | str


@final
class _LaneFeed:
    """One lane of a rank."""

    def __init__(self, lane: int, position: LanePosition, before: int) -> None:
        self.lane, self.position, self.before = lane, position, before
        self.open: deque[_ActivePool] = deque()
        self.pool_starts: deque[tuple[int, LanePosition]] = deque([(before, position)])
        self._barren: int | None = None
        self._long: list[tuple[int, int]] = []

    def add(self, pool: StreamPool, rows: Rows, share: FeedSettings) -> None:
        """Take the next pool."""
        # One without sequences, too, so that it is let go of after those before it: they may share a file.
        self.open.append(_ActivePool(pool, rows, self.before))
        if len(rows):
            self._barren = None
        else:
            self._record_empty_pool(pool, share)
        self.before += len(rows)
        self.position = pool.next
        if self.pool_starts[-1][0] == self.before:
            self.pool_starts.pop()
        self.pool_starts.append((self.before, self.position))

    def _record_empty_pool(self, pool: StreamPool, share: FeedSettings) -> None:
        """Note that a pool gave no sequence; whole epochs of such pools end the stream."""
        if self._barren is None:
            self._barren, self._long = pool.epoch, []
        if pool.epoch == self._barren + 1:
            self._long.append((len(pool.lengths), int(pool.lengths.min())))
        if pool.epoch >= self._barren + _MAX_EMPTY_EPOCHS:
            counts, shortest = zip(*self._long, strict=True)
            why = describe_all_too_long(sum(counts), min(shortest), share.spec)
            raise make_no_sequence_error(self.lane, share.lanes, *why)

    def release_pools(self, sequence: int) -> None:
        """Let go of pools that end before a sequence."""
        while self.open and self.open[0].end <= sequence:
            _release_media(self.open.popleft().stream_pool)

    def cursor(self, sequence: int) -> tuple[int, LanePosition]:
        """The last pool that begins at or before a sequence."""
        at = bisect_right(self.pool_starts, sequence, key=lambda pool_start: pool_start[0]) - 1
        return self.pool_starts[max(at, 0)]

    def forget(self, sequence: int) -> None:
        """Forget where pools began that end before a sequence."""
        while len(self.pool_starts) > 1 and self.pool_starts[1][0] <= sequence:
            self.pool_starts.popleft()


def _release_media(pool: StreamPool) -> None:
    if pool.media is not None:
        pool.media.forget()


@final
class RankFeed:
    """The steps of one rank, one after the other.

    One thread takes them; any may ask for tokens and cursors meanwhile.

    Args:
        share: what is served.
        pools: makes pools.
        cursors: where each lane of the rank begins.
        progress: is told of each pool that came in.
        media: the folder in which bytes of media are laid aside, which goes with the feed; None where none are.
    """

    def __init__(
        self,
        share: FeedSettings,
        pools: PoolSource,
        cursors: LaneCursors,
        progress: Callable[[StreamPool], object] = lambda _: None,
        media: Path | None = None,
    ) -> None:
        self._media = media
        self._share, self._pools, self._progress = share, pools, progress
        rank_lanes = list_rank_lanes(share.lanes, share.rank, share.world_size)
        self._lanes = [_LaneFeed(lane, *cursors[lane]) for lane in rank_lanes]
        self._round = share.spec.global_batch_size // share.lanes
        # Records and bad ones of each epoch of lanes.
        self._counts: dict[int, tuple[int, int]] = {}
        self._tokens: dict[int, int] = {}
        # Around where pools began and the tokens of steps; never held while a pool is waited for.
        self._lock = Lock()
        # The first sequence of a lane that a batch may still read.
        self._needed = 0
        for lane in self._lanes:
            pools.ask(lane.lane, lane.position)

    def take(self, step: int) -> tuple[StreamStepReader, Rows]:
        """The rows of a step and what reads their tokens; steps are taken in order.

        Raises:
            InputError: a source cannot be read, or too many records are bad.
            PlanError: a lane has no sequence.
            WorkerError: workers die for ever.
        """
        first = step * self._round
        pools: list[_ActivePool] = []
        lane_rows, row_positions = [], []
        for number, lane in enumerate(self._lanes):
            for begin, rows, pool in self._iter_sequences(lane, first, first + self._round):
                lane_rows.append(rows)
                pools.append(pool)
                turns = np.arange(begin - first, begin - first + len(rows))
                row_positions.append(turns * len(self._lanes) + number)
            with self._lock:
                lane.forget((step - _MAX_CACHED_STEPS) * self._round)
        reader = StreamStepReader(pools, self._share.end_id)
        numbered = [
            Rows(
                *(rows.pointers, rows.sources, rows.documents + base),
                *(rows.starts, rows.lengths, rows.row_offsets),
            )
            for rows, base in zip(lane_rows, reader.bases.tolist(), strict=True)
        ]
        step_rows = join_rows(numbered, self._round * len(self._lanes))
        with self._lock:
            self._tokens[step] = int(step_rows.lengths.sum())
            self._tokens.pop(step - _MAX_CACHED_STEPS, None)
        return reader, reorder_rows(step_rows, np.argsort(np.concatenate(row_positions)))

    def done(self, step: int) -> None:
        """Say that the batch of a step that was taken is made: what no later step needs is let go of.

        Until then the media of its documents are read. Steps are done in order, by the thread that takes them.
        """
        self._needed = (step + 1) * self._round
        for lane in self._lanes:
            lane.release_pools(self._needed)

    def _iter_sequences(self, lane: _LaneFeed, first: int, stop: int) -> list[tuple[int, Rows, _ActivePool]]:
        """The sequences of a lane from ``first`` on, pool by pool."""
        sequences = []
        while lane.before < stop:
            self._start_pool(lane)
            lane.release_pools(self._needed)
        for pool in lane.open:
            a, b = max(first, pool.before), min(stop, pool.end)
            if a < b:
                sequences.append((a, slice_rows(pool.rows, a - pool.before, b - pool.before), pool))
        return sequences

    def _start_pool(self, lane: _LaneFeed) -> None:
        """Take the next pool of a lane, and have the one after it made."""
        with rename_out_in_errors():
            pool = self._pools.take(lane.lane, lane.position)
        self._pools.ask(lane.lane, pool.next)
        self._count(pool)
        rows = pack_lane_pool(pool.lengths, self._share.spec, lane.lane, pool.epoch, pool.pool)
        with self._lock:
            lane.add(pool, rows, self._share)
        self._progress(pool)

    def _count(self, pool: StreamPool) -> None:
        """Tell of bad records, and stop where there are too many."""
        records, bad = self._counts.get(pool.epoch, (0, 0))
        records, bad = records + pool.records, bad + pool.bad
        self._counts[pool.epoch] = records, bad
        for message in pool.bad_messages:
            _LOG.warning("Left out: %s", message)
        most = count_allowed_bad(self._share.max_bad, records)
        if bad > most:
            last = f"; the last one: {pool.bad_messages[-1]}" if pool.bad_messages else ""
            epoch = f" in epoch {pool.epoch}" if pool.epoch else ""
            raise TooManyBadRecordsError(
                f"{bad:,} of the first {records:,} records of this rank's lanes are bad{epoch}, and max_bad "
                f"{self._share.max_bad} allows {most:,}{last}. Mend the input, or allow more (max_bad=)."
            )

    def tokens(self, step: int) -> int:
        """Tokens of the rank's rows of a step that was taken."""
        with self._lock:
            return self._tokens[step]

    def cursors(self, step: int) -> dict[int, tuple[LanePosition, int]]:
        """Where each lane of the rank goes on at a step; replay is at most a pool.

        Raises:
            PlanError: the step lies before those that are remembered.
        """
        cursors = {}
        for lane in self._lanes:
            with self._lock:
                before, position = lane.cursor(step * self._round)
            if before > step * self._round:
                raise PlanError(f"Step {step} lies behind this stream, which does not go back.")
            cursors[lane.lane] = (position, before)
        return cursors

    def close(self) -> None:
        """End whatever makes pools."""
        self._pools.close()
        if self._media is not None:
            # A worker that is not done yet may put a file there meanwhile: it goes with the stream.
            shutil.rmtree(self._media, ignore_errors=True)
