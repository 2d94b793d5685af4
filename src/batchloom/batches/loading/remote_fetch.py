"""Prefetching of coming steps' tokens from remote stores."""

import atexit
import functools
import logging
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.loading.rank_share import RankShare, RowCosts, select_rank_rows
from batchloom.core.errors import BatchloomError
from batchloom.plan import LanePlan, Plan, PlanSpec
from batchloom.plan.packing import Rows
from batchloom.store import Store
from batchloom.store.read import RemoteSubset

FETCH_LOG = logging.getLogger("batchloom")
# Tokens to look ahead, and tokens to fetch together.
_LOOKAHEAD_TOKENS, _GROUP_TOKENS = 64 << 20, 16 << 20
# Share of the cache for coming data; the rest holds data in use.
_CACHE_SHARE = 4
_JOIN_TIMEOUT_S = 5.0


# Rows of a step, and the position of each in the run.
StepRows = tuple[Rows, NDArray[np.int64]]


class StepSizes(NamedTuple):
    """Tokens of a rank's steps, constant in each step range between two edits.

    Attributes:
        steps: first step of each range, ascending from 0.
        tokens_per_step: tokens of one step of the range.
        tokens_before_range: tokens of all steps before the range.
    """

    steps: tuple[int, ...]
    tokens_per_step: tuple[int, ...]
    tokens_before_range: tuple[int, ...]

    def tokens_at(self, step: int) -> int:
        return self.tokens_per_step[bisect_right(self.steps, step) - 1]

    def tokens_before(self, step: int) -> int:
        """Return the tokens of all steps before ``step``."""
        range_index = bisect_right(self.steps, step) - 1
        return (
            self.tokens_before_range[range_index] + (step - self.steps[range_index]) * self.tokens_per_step[range_index]
        )

    def find_step(self, tokens: int) -> int:
        """Return the first step with at least ``tokens`` tokens before it."""
        range_index = max(bisect_left(self.tokens_before_range, tokens) - 1, 0)
        return (
            self.steps[range_index]
            - (self.tokens_before_range[range_index] - max(tokens, 0)) // self.tokens_per_step[range_index]
        )

    def next_range_start(self, step: int) -> int | None:
        """Return the first step of the next range; None if there is none."""
        range_index = bisect_right(self.steps, step)
        return self.steps[range_index] if range_index < len(self.steps) else None


def compute_step_sizes(plan: Plan, share: Callable[[PlanSpec], RankShare]) -> StepSizes:
    """Compute the tokens of a rank's steps from its share of each step range."""
    steps: list[int] = []
    tokens_per_step: list[int] = []
    tokens_before_range = [0]
    for step_range in plan.orders.run_layout.step_ranges:
        if steps:
            tokens_before_range.append(tokens_before_range[-1] + (step_range.step - steps[-1]) * tokens_per_step[-1])
        steps.append(step_range.step)
        tokens_per_step.append(share(plan.spec_at(step_range.step)).rows * step_range.seq_len)
    return StepSizes(tuple(steps), tuple(tokens_per_step), tuple(tokens_before_range))


@final
class RemotePrefetcher:
    """A thread that fetches coming steps while earlier ones are made.

    A failed fetch is retried as steps continue. A permanent failure is raised when the step is made: the step
    requests the same bytes, and fails before any token of it is served.

    Args:
        stores: store of each source number in rows; some are remote.
        blocks: number of neighbouring documents that the plan keeps together, per store.
        rows: function that returns this rank's rows of a step with their positions, or None after the last step;
            only the thread calls it.
        first: first step.
        sizes: tokens of each step of this rank.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        blocks: Sequence[int],
        rows: Callable[[int], StepRows | None],
        first: int,
        sizes: StepSizes,
    ) -> None:
        self._stores, self._blocks, self._rows, self._sizes = stores, blocks, rows, sizes
        readers = [(store.reader, store.dtype.itemsize) for store in stores if isinstance(store.reader, RemoteSubset)]
        self._limit = min(reader.cache_limit for reader, _ in readers)
        self._itemsize = max(reader.bytes_a_token for reader, _ in readers)
        # Tokens that fit the cache, to look ahead, and to fetch together; fewer if media are fetched, too.
        self._room = self._limit // self._itemsize
        share = max(reader.bytes_a_token // size for reader, size in readers)
        self._ahead = min(_LOOKAHEAD_TOKENS // share, self._room // _CACHE_SHARE)
        self._together = min(_GROUP_TOKENS // share, self._ahead // 2)
        self._at = self._needed = self._waits_for = first
        self._rows_by_step: dict[int, StepRows] = {}
        self._turn = threading.Condition()
        self._ended = self._warned = False
        self._thread = threading.Thread(target=self._run, name="batchloom-fetching", daemon=True)
        _RUNNING_PREFETCHERS.add(self)
        self._thread.start()

    def reach(self, step: int) -> None:
        """Set the step that is being made."""
        if not self._is_cacheable(step):
            _warn_cache_too_small(self._limit, self._sizes.tokens_at(step) * self._itemsize)
        with self._turn:
            self._needed = step
            # Waking the thread at every step would cost a fast consumer much of its time.
            if step >= self._waits_for:
                self._turn.notify()

    def take_rows(self, step: int) -> StepRows | None:
        """Return the rows that were looked up for a step, once; None if there are none.

        A second look-up would cost as much as reading the tokens.
        """
        with self._turn:
            return self._rows_by_step.pop(step, None)

    def end(self) -> None:
        """Tell the thread to end after its current fetch."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def wait(self) -> None:
        """Wait up to a few seconds until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        steps = 1
        while (group := self._next(steps)) is not None:
            try:
                if not self._fetch(group):
                    return
            except BatchloomError as error:
                self._warn_once(error)
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
                # The lookahead begins after the current step; a single step that fits the cache may always come
                # next.
                wake_step = self._sizes.find_step(self._sizes.tokens_before(group.stop) - self._ahead) - 1
                self._waits_for = min(wake_step, group.stop - 2) if len(group) == 1 else wake_step
                if self._needed >= self._waits_for:
                    self._at = group.stop
                    return group
                self._turn.wait()
            return None

    def _group(self, start: int, most: int) -> range | None:
        """Return the steps to fetch together; None if no later step fits the cache."""
        sizes = self._sizes
        at: int | None = start
        while at is not None and not self._is_cacheable(at):
            at = sizes.next_range_start(at)
        if at is None:
            return None
        # Stop at the last step that at most this many tokens precede.
        stop = sizes.find_step(sizes.tokens_before(at) + self._together + 1) - 1
        return range(at, max(at + 1, min(at + most, stop)))

    def _is_cacheable(self, step: int) -> bool:
        """Return whether the cache holds a step and the one being made."""
        return self._room >= 2 * self._sizes.tokens_at(step)

    def _warn_once(self, error: BatchloomError) -> None:
        """Warn once that steps are fetched on demand, not ahead."""
        if not self._warned:
            self._warned = True
            FETCH_LOG.warning(
                "The next steps could not be fetched ahead: %s Each step is fetched when it is needed, which is "
                "slower; fetching ahead is tried again with every step.",
                error,
            )

    def _wait_for_next_step(self, start: int) -> None:
        """Wait for the next step, and retry the failed fetch at ``start``."""
        with self._turn:
            needed, self._at = self._needed, start
            self._waits_for = needed + 1
            while not self._ended and self._needed == needed:
                self._turn.wait()

    def _fetch(self, group: range) -> bool:
        """Fetch the steps of a group; return whether more steps follow."""
        if all(store.reader.is_fully_cached for store in self._stores):
            return True
        group_rows = [(step, self._rows(step)) for step in group]
        rows_by_step = {step: step_rows for step, step_rows in group_rows if step_rows is not None}
        if rows_by_step:
            fetch_rows(self._stores, self._blocks, *(rows for rows, _ in rows_by_step.values()))
        with self._turn:
            later = {step: step_rows for step, step_rows in self._rows_by_step.items() if step >= self._needed}
            self._rows_by_step = {**later, **rows_by_step}
        return len(rows_by_step) == len(group_rows)


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
    """Fetch the documents of rows from the remote stores.

    Args:
        stores: store of each source number in rows.
        blocks: number of neighbouring documents that the plan keeps together, per store.
        rows: rows of the documents.

    Raises:
        StoreError, InputError: as ``Store.read``.
    """
    for source, (store, block) in enumerate(zip(stores, blocks, strict=True)):
        if store.location.is_remote:
            documents = [batch_rows.documents[_is_served(batch_rows, source)] for batch_rows in rows]
            store.reader.fetch(np.unique(np.concatenate(documents)), block)


def _is_served(rows: Rows, source: int) -> NDArray[np.bool_]:
    """Return which spans are read from a source.

    Banned spans are padding, and their documents may be missing.
    """
    in_source: NDArray[np.bool_] = rows.sources == source
    return in_source if rows.banned is None else in_source & ~rows.banned


def get_block_sizes(plan: Plan | LanePlan) -> list[int]:
    """Return the number of neighbouring documents kept together, for each source."""
    if not isinstance(plan, Plan):
        return [1]
    return [max(plan.orders.order(number).pools.blocks) for number in range(len(plan.names))]


# The interpreter stops threads at any point, and inside C++ code that aborts the process.
_RUNNING_PREFETCHERS: "weakref.WeakSet[RemotePrefetcher]" = weakref.WeakSet()


def _stop_all_prefetchers() -> None:
    running = list(_RUNNING_PREFETCHERS)
    for prefetcher in running:
        prefetcher.end()
    for prefetcher in running:
        prefetcher.wait()


atexit.register(_stop_all_prefetchers)


def make_step_rows_function(
    plan: Plan, share: Callable[[PlanSpec], RankShare], balance: RowCosts | None = None
) -> Callable[[int], StepRows | None]:
    """Return a function of a step that selects the rank's rows; None after the last."""

    def select_step_rows(step: int) -> StepRows | None:
        if not plan.has_step(step):
            return None
        return select_rank_rows(plan, step, share(plan.spec_at(step)), balance)

    return select_step_rows
