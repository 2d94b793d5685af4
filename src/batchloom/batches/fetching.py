"""Having the tokens of coming steps here before they are assembled, where a store lies elsewhere."""

import atexit
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.share import Share, rank_rows
from batchloom.core.errors import BatchloomError
from batchloom.plan.lane_plan import LanePlan
from batchloom.plan.plan import Plan
from batchloom.plan.rows import Rows
from batchloom.store.reader import Store

LOG = logging.getLogger("batchloom")
# Tokens of the steps that are looked ahead, and of those that are fetched together.
_AHEAD, _TOGETHER = 64 << 20, 16 << 20
# The cache holds what is coming beside what was used.
_CACHE_SHARE = 4
_SECONDS = 5.0


# Rows of a step, and the position of each in the run.
Found = tuple[Rows, NDArray[np.int64]]


@final
class Fetching:
    """A thread that has coming steps fetched while earlier ones are made.

    What fails is asked for again as steps go on. What fails for good is told by whoever makes the step that
    needs it: that step asks for the same bytes, and fails before a token of it is served.

    Args:
        stores: of each source that rows name, of which some lie elsewhere.
        blocks: of each store, how many neighbouring documents the plan keeps together.
        rows: the rows of a step of this rank and their positions, None behind the last; called by the thread alone.
        first: the first step.
        tokens: tokens of a step of this rank.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        blocks: Sequence[int],
        rows: Callable[[int], Found | None],
        first: int,
        tokens: int,
    ) -> None:
        self._stores, self._blocks, self._rows = stores, blocks, rows
        far = [store for store in stores if store.is_far]
        room = min(store.cache_limit // store.dtype.itemsize for store in far)
        self._ahead = min(_AHEAD, room // _CACHE_SHARE) // tokens
        if not self._ahead and room >= 2 * tokens:
            # The step that is made and the next one fit.
            self._ahead = 1
        if not self._ahead:
            _tell_of_room(
                min(store.cache_limit for store in far),
                tokens * max(store.dtype.itemsize for store in far),
            )
        self._together = max(1, min(_TOGETHER // tokens, self._ahead // 2))
        self._at = self._needed = self._waits_for = first
        self._found: dict[int, Found] = {}
        self._turn = threading.Condition()
        self._ended = self._told = False
        self._thread = threading.Thread(target=self._run, name="batchloom-fetching", daemon=True)
        if self._ahead:
            _RUNNING.add(self)
            self._thread.start()

    def reach(self, step: int) -> None:
        """Say which step is made now."""
        with self._turn:
            self._needed = step
            # To wake it with every step costs a consumer that takes all it can much of its time.
            if step >= self._waits_for:
                self._turn.notify()

    def found(self, step: int) -> Found | None:
        """What was looked up of a step, once; None where it was not: to do it again costs as much as its tokens."""
        with self._turn:
            return self._found.pop(step, None)

    def end(self) -> None:
        """Let the thread end, behind what it is at."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def wait(self) -> None:
        """Wait a little until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(_SECONDS)

    def _run(self) -> None:
        steps = 1
        while (start := self._next(steps)) is not None:
            try:
                if not self._fetch(start, start + steps):
                    return
            except BatchloomError as error:
                self._tell(error)
                self._wait_behind(start)
                steps = 1
                continue
            except RuntimeError:
                # What threads meet at the end of the interpreter.
                return
            # The first step is waited for, so it comes alone; the others in ever larger groups.
            steps = min(2 * steps, self._together)

    def _next(self, steps: int) -> int | None:
        """The step to go on with, once it is near enough; None where nobody wants more."""
        with self._turn:
            self._waits_for = self._at + steps - 1 - self._ahead
            while not self._ended and self._needed < self._waits_for:
                self._turn.wait()
            start = max(self._at, self._needed)
            self._at = start + steps
            return None if self._ended else start

    def _tell(self, error: BatchloomError) -> None:
        """Say once that steps are not fetched ahead; they are fetched as they are made."""
        if not self._told:
            self._told = True
            LOG.warning(
                "Coming steps could not be fetched ahead: %s Each is fetched as it is made, more slowly, and "
                "fetching ahead is tried again with every step.",
                error,
            )

    def _wait_behind(self, start: int) -> None:
        """Wait until another step is made, and go on at ``start``, which could not be had."""
        with self._turn:
            needed, self._at = self._needed, start
            self._waits_for = needed + 1
            while not self._ended and self._needed == needed:
                self._turn.wait()

    def _fetch(self, start: int, stop: int) -> bool:
        """Have steps fetched; whether there are more behind them."""
        if all(store.is_here for store in self._stores):
            return True
        found = [(step, self._rows(step)) for step in range(start, stop)]
        kept = {step: one for step, one in found if one is not None}
        if kept:
            fetch_rows(self._stores, self._blocks, *(rows for rows, _ in kept.values()))
        with self._turn:
            later = {step: one for step, one in self._found.items() if step >= self._needed}
            self._found = {**later, **kept}
        return len(kept) == len(found)


@functools.cache
def _tell_of_room(limit: int, needed: int) -> None:
    """Say once that steps are too large to be fetched ahead."""
    LOG.warning(
        "Coming steps are not fetched ahead: a step of this rank has %s bytes of tokens, and the cache holds %s "
        "(cache_limit). Each is fetched as it is made, which is slow; give the cache at least twice a step.",
        f"{needed:,}",
        f"{limit:,}",
    )


def fetch_rows(stores: Sequence[Store], blocks: Sequence[int], *rows: Rows) -> None:
    """Have the documents of rows here, of those stores that lie elsewhere.

    Args:
        stores: of each source that rows name.
        blocks: of each store, how many neighbouring documents the plan keeps together.
        rows: whose documents.

    Raises:
        StoreError, InputError: as ``Store.read``.
    """
    for source, (store, block) in enumerate(zip(stores, blocks, strict=True)):
        if store.is_far:
            held = [one.documents[one.sources == source] for one in rows]
            store.fetch(np.unique(np.concatenate(held)), block)


def blocks_of(plan: Plan | LanePlan) -> list[int]:
    """Of each source, how many neighbouring documents the plan keeps together."""
    if not isinstance(plan, Plan):
        return [1]
    return [max(plan.order(number).pools.blocks) for number in range(len(plan.names))]


# The interpreter ends a thread that runs on where it stands, and where that is C++ the process aborts.
_RUNNING: "weakref.WeakSet[Fetching]" = weakref.WeakSet()


def _end_all() -> None:
    running = list(_RUNNING)
    for one in running:
        one.end()
    for one in running:
        one.wait()


atexit.register(_end_all)


def rows_of(
    plan: Plan, share_of: Callable[[int], Share], *, balance: bool
) -> Callable[[int], Found | None]:
    """What tells the rows of a rank in each step and their positions, None behind the last."""

    def found(step: int) -> Found | None:
        return (
            rank_rows(plan, step, share_of(step), balance=balance) if plan.has_step(step) else None
        )

    return found
