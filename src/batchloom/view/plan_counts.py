"""Counts of a plan's sequences, computed in the background for large stores."""

from typing import TYPE_CHECKING, final

from batchloom.analysis import adopt_tables, ensure_tables
from batchloom.batches.loading import MAX_INLINE_POOLS, start_counting_process
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
    """Processes that count the sequences of plans, one per plan."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def has_counts(self, plan: Plan) -> bool:
        """Return whether the counts of a plan are known; start to count them otherwise.

        Raises:
            StoreError, InputError: the counts cannot be made.
        """
        if is_small(plan) or adopt_tables(plan):
            return True
        process = self._processes.get(plan.fingerprint)
        if process is None:
            self._processes[plan.fingerprint] = start_counting_process(plan)
            return False
        if process.poll() is None:
            return False
        # The process ended without a table. Counting here meets its error.
        ensure_tables(plan)
        return True


def is_small(plan: Plan) -> bool:
    """Return whether counting the sequences of a plan takes little time."""
    return all(order.pools.count <= MAX_INLINE_POOLS for order in plan.orders.latest())


def is_near(plan: Plan, step: int) -> bool:
    """Return whether packing a few pools reaches a step, without counts."""
    orders = plan.orders.latest()
    tokens = sum(order.store.tokens for order in orders)
    pools = sum(order.pools.count for order in orders)
    return plan.positions_of(step)[1] * plan.spec_at(step).seq_len * pools <= MAX_INLINE_POOLS * tokens
