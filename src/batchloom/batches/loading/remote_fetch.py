"""Prefetching of coming steps' tokens from remote stores."""

import functools
import logging
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.background import BackgroundThread
from batchloom.batches.loading.rank_share import RankShare, RowCosts, select_rank_rows
from batchloom.core.errors import BatchloomError
from batchloom.plan import Plan, PlanSpec
from batchloom.plan.packing import Rows
from batchloom.store import Store
from batchloom.store.read import RemoteSubset

FETCH_LOG = logging.getLogger("batchloom")
# Tokens to look ahead, and tokens to fetch together.
_LOOKAHEAD_TOKENS = 64 << 20
_GROUP_TOKENS = 16 << 20
# Share of the cache for coming data; the rest holds data in use.
_CACHE_SHARE = 4

# Rows of a step, and the position of each in the run.
StepRows = tuple[Rows, NDArray[np.int64]]


@final
class RemotePrefetcher:
    """A thread that fetches coming steps while earlier ones are made.

    A failed fetch is retried as steps continue. A permanent failure is raised when the step is made: the step
    requests the same bytes, and fails before any token of it is served.

    Args:
        stores: store of each source number in rows; some are remote.
        plan: plan of the steps.
        first: first step.
        select_rows: function that returns this rank's rows of a step with their positions, or None after the last
            step; only the thread calls it.
        count_tokens: function that returns the tokens of this rank's rows of a step.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        plan: Plan,
        first: int,
        select_rows: Callable[[int], StepRows | None],
        count_tokens: Callable[[int], int],
    ) -> None:
        self._stores = stores
        self._blocks = get_block_sizes(plan)
        self._select_rows = select_rows
        self._count_tokens = count_tokens
        # Steps between two of these have an equal size.
        self._range_starts = [segment.step for segment in plan.segments]
        readers = [(store.reader, store.dtype.itemsize) for store in stores if isinstance(store.reader, RemoteSubset)]
        self._limit = min(reader.cache_limit for reader, _ in readers)
        self._itemsize = max(reader.bytes_a_token for reader, _ in readers)
        # Tokens that fit the cache, to look ahead, and to fetch together; fewer if media are fetched, too.
        self._room = self._limit // self._itemsize
        share = max(reader.bytes_a_token // size for reader, size in readers)
        self._ahead = min(_LOOKAHEAD_TOKENS // share, self._room // _CACHE_SHARE)
        self._together = min(_GROUP_TOKENS // share, self._ahead // 2)
        self._at = self._needed = self._waits_for = first
        # Step that was being made when the current fetch began.
        self._needed_at_fetch = first
        self._rows_by_step: dict[int, StepRows] = {}
        self._turn = threading.Condition()
        self._ended = self._warned = False
        BackgroundThread("batchloom-fetching", self._run, self.end).start()

    def reach(self, step: int) -> None:
        """Set the step that is being made."""
        if not self._is_cacheable(step):
            _warn_cache_too_small(self._limit, self._count_tokens(step) * self._itemsize)
        with self._turn:
            self._needed = step
            # Waking the thread at every step would cost a fast consumer much of its time.
            if step >= self._waits_for:
                self._turn.notify()

    def take_rows(self, step: int) -> StepRows | None:
        """Return the rows that were looked up for a step, once; None if there are none."""
        with self._turn:
            return self._rows_by_step.pop(step, None)

    def end(self) -> None:
        """Tell the thread to end after its current fetch."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def _run(self) -> None:
        steps = 1
        while (group := self._next(steps)) is not None:
            try:
                if not self._fetch(group):
                    return
            except BatchloomError as error:
                if self._ended:
                    return
                if not self._warned:
                    self._warned = True
                    FETCH_LOG.warning(
                        "The next steps could not be fetched ahead: %s Each step is fetched when it is needed, which "
                        "is slower; fetching ahead is tried again with every step.",
                        # The traceback of the error holds the loader, and handlers may keep the record.
                        str(error),
                    )
                self._wait_for_next_step(group.start)
                steps = 1
                continue
            except RuntimeError:
                # Threads get this error at interpreter shutdown.
                return
            # The consumer waits for the first step, so fetch it alone; fetch the others in growing groups.
            steps = 2 * len(group)

    def _next(self, steps: int) -> range | None:
        """Wait until the next steps, at most ``steps``, are near; return None to end."""
        with self._turn:
            while not self._ended:
                group = self._group(max(self._at, self._needed), steps)
                if group is None:
                    return None
                # The lookahead begins after the current step.
                excess = max(self._count_between(self._needed + 1, group.stop) - self._ahead, 0)
                step_tokens = max(self._count_tokens(self._needed), self._count_tokens(group.start))
                self._waits_for = self._needed + -(-excess // step_tokens)
                if len(group) == 1:
                    # A single step that fits the cache may always come next.
                    self._waits_for = min(self._waits_for, group.stop - 2)
                if self._needed >= self._waits_for:
                    self._at = group.stop
                    self._needed_at_fetch = self._needed
                    return group
                self._turn.wait()
            return None

    def _group(self, start: int, most: int) -> range | None:
        """Return the steps to fetch together; None if no later step fits the cache."""
        while not self._is_cacheable(start):
            start = self._find_range_end(start)
            if start == sys.maxsize:
                return None
        steps = max(min(most, self._together // self._count_tokens(start)), 1)
        return range(start, min(start + steps, self._find_range_end(start)))

    def _find_range_end(self, step: int) -> int:
        """Return the first later step of another size; ``sys.maxsize`` if there is none."""
        following = bisect_right(self._range_starts, step)
        return self._range_starts[following] if following < len(self._range_starts) else sys.maxsize

    def _count_between(self, start: int, stop: int) -> int:
        tokens = 0
        while start < stop:
            end = min(self._find_range_end(start), stop)
            tokens += (end - start) * self._count_tokens(start)
            start = end
        return tokens

    def _is_cacheable(self, step: int) -> bool:
        """Return whether the cache holds a step and the one being made."""
        return self._room >= 2 * self._count_tokens(step)

    def _wait_for_next_step(self, start: int) -> None:
        with self._turn:
            self._at = start
            self._waits_for = self._needed_at_fetch + 1
            while not self._ended and self._needed < self._waits_for:
                self._turn.wait()

    def _fetch(self, group: range) -> bool:
        """Fetch the steps of a group; return whether more steps follow."""
        if all(store.reader.is_fully_cached for store in self._stores):
            return True
        group_rows = [(step, self._select_rows(step)) for step in group]
        rows_by_step = {step: step_rows for step, step_rows in group_rows if step_rows is not None}
        if rows_by_step:
            fetch_rows(self._stores, self._blocks, *(rows for rows, _ in rows_by_step.values()))
        with self._turn:
            later = {step: step_rows for step, step_rows in self._rows_by_step.items() if step >= self._needed}
            self._rows_by_step = {**later, **rows_by_step}
        return len(rows_by_step) == len(group_rows)


@final
class FetchedSteps:
    """Rows of coming steps whose tokens are fetched ahead, by the latest plan.

    Args:
        stores: store of each source number in rows; some are remote.
        plan: plan of the steps.
        first: first step.
        get_share: function that returns this process's share by the settings of a step.
        balance: row costs to distribute rows by; None for contiguous ranges.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        plan: Plan,
        first: int,
        *,
        get_share: Callable[[PlanSpec], RankShare],
        balance: RowCosts | None,
    ) -> None:
        self._stores = stores
        self._plan = plan
        self._get_share = get_share
        self._balance = balance
        self._is_closed = False
        self._prefetcher = self._start(plan, first)

    def _start(self, plan: Plan, first: int) -> RemotePrefetcher:
        def select_rows(step: int) -> StepRows | None:
            if not plan.has_step(step):
                return None
            return select_rank_rows(plan, step, self._get_share(plan.spec_at(step)), self._balance)

        def count_tokens(step: int) -> int:
            spec = plan.spec_at(step)
            return self._get_share(spec).rows * spec.seq_len

        return RemotePrefetcher(self._stores, plan, first, select_rows, count_tokens)

    def take_rows(self, plan: Plan, step: int) -> StepRows | None:
        """Return the rows that were looked up for a step, once; None if there are none."""
        if plan is not self._plan:
            # What was looked up belongs to the order before an edit.
            self._prefetcher.end()
            self._plan = plan
            self._prefetcher = self._start(plan, step)
            if self._is_closed:
                self._prefetcher.end()
        self._prefetcher.reach(step)
        return self._prefetcher.take_rows(step)

    def close(self) -> None:
        """End fetching; the thread that makes batches may still take rows."""
        self._is_closed = True
        self._prefetcher.end()


@functools.cache
def _warn_cache_too_small(limit: int, needed: int) -> None:
    """Warn once that steps are too large for fetching ahead."""
    FETCH_LOG.warning(
        "The next steps are not fetched ahead: a step of this rank has %s bytes, and the cache holds %s "
        "(cache_limit). Each step is fetched when it is needed, which is slow; give the cache at least twice the "
        "size of a step.",
        f"{needed:,}",
        f"{limit:,}",
    )


def fetch_rows(stores: Sequence[Store], blocks: Sequence[int], *rows: Rows) -> None:
    for source, (store, block) in enumerate(zip(stores, blocks, strict=True)):
        if store.location.is_remote:
            documents = []
            for span_rows in rows:
                spans = span_rows.sources == source
                if span_rows.banned is not None:
                    # Banned spans are padding, and their documents may be missing.
                    spans &= ~span_rows.banned
                documents.append(span_rows.documents[spans])
            store.reader.fetch(np.unique(np.concatenate(documents)), block)


def get_block_sizes(plan: Plan) -> list[int]:
    """Return the number of neighbouring documents kept together, for each source."""
    return [max(plan.orders.order(number).pools.blocks) for number in range(len(plan.names))]
