"""Counts of a plan's sequences, computed in the background for large stores."""

import atexit
from typing import TYPE_CHECKING, final

from batchloom.analysis import adopt_tables
from batchloom.batches.loading import MAX_INLINE_POOLS, start_counting_process
from batchloom.core.errors import InputError
from batchloom.plan import Plan

if TYPE_CHECKING:
    import subprocess

COUNTING_NOTE = (
    "The sequences of the data are being counted, once for this plan. This page loads again until it is done."
)
# Seconds until a page that waits for the counts loads again.
RELOAD_HEADERS = {"Refresh": "2"}


@final
class PlanCounting:
    """Process that counts the sequences of a plan, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._fingerprint = ""
        atexit.register(self._stop)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def has_counts(self, plan: Plan) -> bool:
        """Return whether the counts of a plan are known; start to count them otherwise.

        Raises:
            InputError: counting failed.
        """
        if is_small(plan) or adopt_tables(plan):
            return True
        if self._process is None or self._fingerprint != plan.fingerprint:
            self._stop()
            self._process, self._fingerprint = start_counting_process(plan), plan.fingerprint
            return False
        if (code := self._process.poll()) is None:
            return False
        raise InputError(
            f"Counting the sequences of the data ended with code {code}. To see why, run batchloom plan on them."
        )


def is_small(plan: Plan) -> bool:
    """Return whether counting the sequences of a plan takes little time."""
    return all(order.pools.count <= MAX_INLINE_POOLS for order in plan.orders.latest())


def is_near(plan: Plan, step: int) -> bool:
    """Return whether packing a few pools reaches a step, without counts."""
    orders = plan.orders.latest()
    tokens = sum(order.store.tokens for order in orders)
    pools = sum(order.pools.count for order in orders)
    return plan.positions_of(step)[1] * plan.spec_at(step).seq_len * pools <= MAX_INLINE_POOLS * tokens
