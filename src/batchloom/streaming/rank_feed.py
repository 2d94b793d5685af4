"""Steps of a rank's share of a stream, made from the pools of its lanes."""

import logging
import queue
import shutil
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, TooManyBadRecordsError, WorkerError
from batchloom.core.loss_weights import LossFlags
from batchloom.plan import PlanSpec
from batchloom.plan.packing import Rows, join_rows, reorder_rows, slice_rows
from batchloom.preparation.settings import count_allowed_bad
from batchloom.preparation.workers import ProcessPool, TaskLoss, TaskResult, count_cores
from batchloom.store.format import StoredMedium
from batchloom.streaming.keep import explain_keep_in_errors
from batchloom.streaming.lane import LanePosition, PoolMaker, PoolMedia, PoolTask, StreamPool, StreamSetup
from batchloom.streaming.lane_order import (
    describe_all_too_long,
    list_rank_lanes,
    make_no_sequence_error,
    pack_lane_pool,
)

_LOG = logging.getLogger("batchloom")
# Maximum number of batches that a loader makes ahead; a state needs no older steps.
_MAX_CACHED_STEPS = 1024 + 8
_MAX_EMPTY_EPOCHS = 2

# Resume position of each lane, and its number of sequences before that.
LaneCursors = Mapping[int, tuple[LanePosition, int]]


class PoolSource(Protocol):
    """Source of lane pools, which may make requested pools ahead."""

    def ask(self, lane: int, position: LanePosition) -> None:
        """Announce that the pool at this position is taken next from its lane."""

    def take(self, lane: int, position: LanePosition) -> StreamPool: ...

    def close(self) -> None: ...


_MAX_WORKER_DEATHS = 3
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 0.2


def choose_worker_count(workers: int | Literal["auto"], lanes: int, local_ranks: int) -> int:
    """Return the number of worker processes for a rank's lanes; 0 means no workers."""
    worker_count = count_cores() // max(local_ranks, 1) if workers == "auto" else workers
    return min(max(worker_count, 1 if workers == "auto" else 0), lanes)


@final
class InlinePools:
    """Maker of pools in this process, on demand."""

    def __init__(self, setup: StreamSetup) -> None:
        self._setup = setup
        self._make_pool: PoolMaker | None = None
        self._turn = threading.Lock()
        self._closed = False

    def ask(self, lane: int, position: LanePosition) -> None:
        """Do nothing: pools are made on demand."""

    def take(self, lane: int, position: LanePosition) -> StreamPool:
        with self._turn:
            if self._make_pool is None:
                self._make_pool = self._setup()
            pool = self._make_pool((lane, position), lambda _: None)
        if self._closed:
            self._close_lanes()
        return pool

    def close(self) -> None:
        self._closed = True
        self._close_lanes()

    def _close_lanes(self) -> None:
        # A producer thread may still make a pool, or a garbage collection inside it may call this: it closes them then.
        if self._turn.acquire(blocking=False):
            try:
                if self._make_pool is not None:
                    self._make_pool.close()
            finally:
                self._turn.release()


@final
class WorkerPools:
    """Maker of pools ahead in worker processes, one pool per lane at a time.

    A lane belongs to one worker, which keeps its files open. A separate thread submits tasks, since
    Linux ends a process with the thread that started it.
    """

    def __init__(self, setup: StreamSetup, workers: int, lanes: range, stream: object) -> None:
        self._setup = setup
        self._workers = workers
        # Its folder must not be deleted before the workers have ended: they would make it again.
        self._stream: object | None = stream
        self._worker_by_lane = {lane: number % workers for number, lane in enumerate(lanes)}
        self._tasks: queue.SimpleQueue[PoolTask | None] = queue.SimpleQueue()
        self._ready_pools: dict[int, StreamPool] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batchloom-stream", daemon=True)
        self._thread.start()

    def ask(self, lane: int, position: LanePosition) -> None:
        self._tasks.put((lane, position))

    def take(self, lane: int, position: LanePosition) -> StreamPool:
        with self._changed:
            while lane not in self._ready_pools:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise WorkerError("The stream was closed while a batch was being made.")
                self._changed.wait(_WAIT_SECONDS)
            return self._ready_pools.pop(lane)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tasks.put(None)

    def _run(self) -> None:
        executors: list[ProcessPool] = []
        try:
            for worker in range(self._workers):
                worker_lanes = [lane for lane, owner in self._worker_by_lane.items() if owner == worker]
                executors.append(ProcessPool(self._setup.for_lanes(worker_lanes), 1))
            self._run_executors(executors)
        except BaseException as error:  # noqa: BLE001 - take() raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for executor in executors:
                executor.close()
            self._stream = None

    def _run_executors(self, executors: list[ProcessPool]) -> None:
        pending_tasks: dict[int, PoolTask] = {}
        deaths: Counter[int] = Counter()
        number = 0
        while not self._closed:
            while True:
                try:
                    task = self._tasks.get(block=not pending_tasks)
                except queue.Empty:
                    break
                if task is None:
                    return
                pending_tasks[number] = task
                executors[self._worker_by_lane[task[0]]].submit(number, task)
                number += 1
            for executor in executors:
                if not executor.unfinished:
                    continue
                event = executor.next(_POLL_SECONDS / len(executors))
                if isinstance(event, TaskLoss):
                    # The input of a dead worker's pool is read again.
                    task = pending_tasks[event.number]
                    deaths[event.number] += 1
                    _check_deaths(event.reason, deaths[event.number], task[0])
                    executor.submit(event.number, task)
                elif isinstance(event, TaskResult):
                    lane, _ = pending_tasks.pop(event.number)
                    with self._changed:
                        self._ready_pools[lane] = event.result
                        self._changed.notify_all()


def _check_deaths(reason: str, deaths: int, lane: int) -> None:
    if deaths > _MAX_WORKER_DEATHS:
        raise WorkerError(
            f"A worker of the stream {reason}, {deaths} times at the same pool (lane {lane}). Give it more memory "
            "(fewer workers, smaller pool_size), or workers=0 to see the cause; batchloom prepare finds the record."
        )


@final
class _ActivePool:
    __slots__ = ("before", "rows", "starts", "stream_pool")

    def __init__(self, stream_pool: StreamPool, rows: Rows, before: int) -> None:
        self.stream_pool = stream_pool
        self.rows = rows
        self.before = before
        self.starts = np.cumsum(stream_pool.lengths, dtype=np.int64) - stream_pool.lengths

    @property
    def end(self) -> int:
        """Number of sequences of the lane up to the end of the pool."""
        return self.before + len(self.rows)


@final
class StreamStepReader:
    """Tokens of one step; documents are numbered across its pools."""

    def __init__(self, pools: Sequence[_ActivePool], end_id: int) -> None:
        self._pools = pools
        self.end_id = end_id
        sizes = [len(pool.stream_pool.lengths) for pool in pools]
        self.bases = np.cumsum([0, *sizes[:-1]])
        self.masked = any(not pool.stream_pool.flags.is_plain for pool in pools)
        self.weighted = any(pool.stream_pool.flags.has_weights for pool in pools)

    def _spans(self, documents: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Return the pool index of each span, and the offset of its first token there."""
        pools = self.bases.searchsorted(documents, side="right") - 1
        begins = starts.copy()
        for number in np.unique(pools).tolist():
            pool_spans = pools == number
            begins[pool_spans] += self._pools[number].starts[documents[pool_spans] - self.bases[number]]
        return pools.tolist(), begins.tolist()

    def media(self, documents: NDArray[np.int64]) -> list[tuple[PoolMedia, tuple[StoredMedium, ...]]]:
        """Return the source and the media of each document, in token order."""
        pools = self.bases.searchsorted(documents, side="right") - 1
        document_media = []
        for pool, document in zip(pools.tolist(), documents.tolist(), strict=True):
            pool_media = self._pools[pool].stream_pool.media
            if pool_media is None:
                raise AssertionError("a stream with a processor reads media")
            document_media.append((pool_media, pool_media.of(document - int(self.bases[pool]))))
        return document_media

    def locate(self, documents: NDArray[np.int64]) -> None:
        """Return None: the tokens of a stream are in memory, and not in mapped shards."""

    def read(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.generic]]:
        pools, begins = self._spans(documents, starts)
        tokens = [pool.stream_pool.tokens for pool in self._pools]
        spans = zip(pools, begins, lengths.tolist(), strict=True)
        return [tokens[pool][at : at + size] for pool, at, size in spans]

    def flags(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[LossFlags]:
        """Return the loss flags of each span."""
        pools, begins = self._spans(documents, starts)
        flags = [pool.stream_pool.flags for pool in self._pools]
        spans = zip(pools, begins, lengths.tolist(), strict=True)
        return [flags[pool][at : at + size] for pool, at, size in spans]


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """Settings of a feed."""

    spec: PlanSpec  # settings of the data order
    lanes: int  # number of lanes
    rank: int  # rank whose lanes are served
    world_size: int  # number of ranks
    end_id: int  # the id that fills padding
    max_bad: int | str  # limit of bad records, as in a recipe


@final
class _LaneFeed:
    def __init__(self, lane: int, position: LanePosition, before: int) -> None:
        self.lane = lane
        self.position = position
        self.before = before
        self.open: deque[_ActivePool] = deque()
        self.pool_starts: deque[tuple[int, LanePosition]] = deque([(before, position)])
        self._barren: int | None = None
        self._long: list[tuple[int, int]] = []

    def add(self, pool: StreamPool, rows: Rows, share: FeedSettings) -> None:
        # Also queue pools without sequences, so that pools are released in order: they may share a spill file.
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
        """Record a pool without sequences; full epochs of such pools end the stream."""
        if self._barren is None:
            self._barren = pool.epoch
            self._long = []
        if pool.epoch == self._barren + 1:
            self._long.append((len(pool.lengths), int(pool.lengths.min())))
        if pool.epoch >= self._barren + _MAX_EMPTY_EPOCHS:
            counts, shortest = zip(*self._long, strict=True)
            why = describe_all_too_long(sum(counts), min(shortest), share.spec)
            raise make_no_sequence_error(self.lane, share.lanes, *why)

    def release_pools(self, sequence: int) -> None:
        while self.open and self.open[0].end <= sequence:
            media = self.open.popleft().stream_pool.media
            if media is not None:
                media.forget()

    def cursor(self, sequence: int) -> tuple[int, LanePosition]:
        """Return the start of the last pool that begins at or before a sequence."""
        at = bisect_right(self.pool_starts, sequence, key=lambda pool_start: pool_start[0]) - 1
        return self.pool_starts[max(at, 0)]

    def forget(self, sequence: int) -> None:
        """Remove the start positions of pools that end before a sequence."""
        while len(self.pool_starts) > 1 and self.pool_starts[1][0] <= sequence:
            self.pool_starts.popleft()


@final
class RankFeed:
    """Steps of one rank, in order.

    One thread takes steps; any thread may call :meth:`tokens` and :meth:`cursors` meanwhile.

    Args:
        share: settings of the feed.
        pools: source of pools.
        cursors: start position of each lane of the rank.
        media: spill folder of media bytes, deleted on close; None without media.
    """

    def __init__(
        self,
        share: FeedSettings,
        pools: PoolSource,
        cursors: LaneCursors,
        media: Path | None = None,
    ) -> None:
        self._media = media
        self._share = share
        self._pools = pools
        rank_lanes = list_rank_lanes(share.lanes, share.rank, share.world_size)
        self._lanes = [_LaneFeed(lane, *cursors[lane]) for lane in rank_lanes]
        self._round = share.spec.global_batch_size // share.lanes
        # Records and bad records of each lane epoch.
        self._counts: dict[int, tuple[int, int]] = {}
        self._noted_changes: set[str] = set()
        self._tokens: dict[int, int] = {}
        # Guards pool starts and step tokens; never held while waiting for a pool.
        self._lock = threading.Lock()
        # First sequence of a lane that a batch may still read.
        self._needed = 0
        for lane in self._lanes:
            pools.ask(lane.lane, lane.position)

    def take(self, step: int) -> tuple[StreamStepReader, Rows]:
        """Return the reader and the rows of a step; steps are taken in order.

        Raises:
            InputError: a source cannot be read, or too many records are bad.
            PlanError: a lane has no sequence.
            WorkerError: workers die repeatedly.
        """
        first = step * self._round
        pools: list[_ActivePool] = []
        lane_rows = []
        row_positions = []
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
            replace(rows, documents=rows.documents + base)
            for rows, base in zip(lane_rows, reader.bases.tolist(), strict=True)
        ]
        step_rows = join_rows(numbered, self._round * len(self._lanes))
        with self._lock:
            self._tokens[step] = int(step_rows.lengths.sum())
            self._tokens.pop(step - _MAX_CACHED_STEPS, None)
        return reader, reorder_rows(step_rows, np.argsort(np.concatenate(row_positions)))

    def done(self, step: int) -> None:
        """Mark the batch of a step as made, and release pools that no later step needs.

        The media of its documents are read until then. The thread that takes steps calls this in step order.
        """
        self._needed = (step + 1) * self._round
        for lane in self._lanes:
            lane.release_pools(self._needed)

    def _iter_sequences(self, lane: _LaneFeed, first: int, stop: int) -> list[tuple[int, Rows, _ActivePool]]:
        """Return the sequences of a lane from ``first`` to ``stop``, by pool."""
        sequences = []
        while lane.before < stop:
            self._start_pool(lane)
            lane.release_pools(self._needed)
        for pool in lane.open:
            a = max(first, pool.before)
            b = min(stop, pool.end)
            if a < b:
                sequences.append((a, slice_rows(pool.rows, a - pool.before, b - pool.before), pool))
        return sequences

    def _start_pool(self, lane: _LaneFeed) -> None:
        """Take the next pool of a lane, and request the one after it."""
        with explain_keep_in_errors():
            pool = self._pools.take(lane.lane, lane.position)
        self._pools.ask(lane.lane, pool.next)
        self._count(pool)
        rows = pack_lane_pool(pool.lengths, self._share.spec, lane.lane, pool.epoch, pool.pool)
        with self._lock:
            lane.add(pool, rows, self._share)

    def _count(self, pool: StreamPool) -> None:
        """Log bad records, and raise if there are too many."""
        records, bad = self._counts.get(pool.epoch, (0, 0))
        records = records + pool.records
        bad = bad + pool.bad
        self._counts[pool.epoch] = records, bad
        for message in pool.bad_messages:
            _LOG.warning("Left out: %s", message)
        for change, source in pool.changes:
            if change not in self._noted_changes:
                self._noted_changes.add(change)
                _LOG.warning("%s, as in %s. batchloom doctor counts and shows such conversations.", change, source)
        most = count_allowed_bad(self._share.max_bad, records)
        if bad > most:
            last = f"; the last one: {pool.bad_messages[-1]}" if pool.bad_messages else ""
            epoch = f" in epoch {pool.epoch}" if pool.epoch else ""
            raise TooManyBadRecordsError(
                f"{bad:,} of the first {records:,} records of this rank's lanes are bad{epoch}, and max_bad "
                f"{self._share.max_bad} allows {most:,}{last}. Fix the input, or allow more (max_bad=)."
            )

    def tokens(self, step: int) -> int:
        """Return the tokens of the rank's rows of a taken step."""
        with self._lock:
            return self._tokens[step]

    def cursors(self, step: int) -> dict[int, tuple[LanePosition, int]]:
        """Return the resume position of each lane at a step; at most one pool is replayed.

        Raises:
            PlanError: the positions of the step are no longer stored.
        """
        cursors = {}
        for lane in self._lanes:
            with self._lock:
                before, position = lane.cursor(step * self._round)
            if before > step * self._round:
                raise PlanError(
                    f"Step {step} precedes the current position of this stream, and a stream cannot go back."
                )
            cursors[lane.lane] = (position, before)
        return cursors

    def close(self) -> None:
        """Stop making pools and delete spilled media."""
        self._pools.close()
        if self._media is not None:
            # A running worker may still write a file there; it is deleted with the stream's folder.
            shutil.rmtree(self._media, ignore_errors=True)
