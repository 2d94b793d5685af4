"""Non-blocking exchange of the latest metrics between ranks.

It uses no collective: a collective that one rank does not join would hang all others. A thread uses the key-value
store of ``torch.distributed`` over its own connection; training only passes metrics to it and takes the latest it
has read. A silent rank is not included, a dead one keeps its last values, and the thread ends if the store fails.
"""

import json
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

_LOG = logging.getLogger("batchloom")
# Silent ranks to check per read, since each check is one request.
_MAX_NEW_RANKS_PER_READ = 64


class KeyValueStore(Protocol):
    """Interface of a ``torch.distributed`` store."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values, without waiting for them."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of existing keys."""


def open_default_store() -> KeyValueStore | None:
    """Open a connection to the default process group's store; None without a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    # torch marks this function private, so newer versions may lack it: access it by name.
    group = getattr(distributed, "distributed_c10d", None)
    store: Any = getattr(group, "_get_default_store", lambda: None)()
    # An older torch has no clone; a call on the shared connection might block one of the group's.
    clone = getattr(store, "clone", None)
    try:
        return None if clone is None else clone()
    except RuntimeError:
        return None


@dataclass(slots=True)
class _ExchangeState:
    """State that the thread and the training share."""

    wake: threading.Event = field(default_factory=threading.Event)
    # Holds the latest message only; an atomic pop loses no concurrent message.
    outgoing: deque[str] = field(default_factory=lambda: deque(maxlen=1))
    rank_metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    read_requested: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False


@final
class MetricsExchange:
    """One rank's view of the metrics exchange; no call blocks.

    Args:
        store: key-value store of the metrics.
        rank: rank of this process.
        world_size: number of ranks.
        name: name of this exchange, the same on all ranks.
    """

    def __init__(self, store: KeyValueStore, rank: int, world_size: int, name: str) -> None:
        self._state = _ExchangeState()
        weakref.finalize(self, _stop_exchange, self._state)
        keys = [f"batchloom/{name}/{n}" for n in range(world_size)]
        threading.Thread(
            target=_run_exchange,
            args=(self._state, store, keys, rank),
            name="batchloom-board",
            daemon=True,
        ).start()

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Replace the published metrics of this rank."""
        self._state.outgoing.append(json.dumps(dict(metrics)))
        self._state.wake.set()

    def get_rank_metrics(self) -> dict[int, dict[str, float]]:
        """Return the last read metrics by rank, and request a read for the next call."""
        self._state.read_requested.set()
        self._state.wake.set()
        return dict(self._state.rank_metrics)


def _stop_exchange(slots: _ExchangeState) -> None:
    slots.is_closed = True
    slots.wake.set()


def _run_exchange(slots: _ExchangeState, store: KeyValueStore, keys: list[str], rank: int) -> None:
    """Run the exchange thread until it is closed or the store fails."""
    active_ranks: list[int] = []
    silent_ranks = list(range(len(keys)))
    while not slots.is_closed:
        slots.wake.wait()
        slots.wake.clear()
        try:
            if slots.outgoing:
                store.set(keys[rank], slots.outgoing.pop())
            if slots.read_requested.is_set() and not slots.is_closed:
                slots.read_requested.clear()
                slots.rank_metrics = _read_rank_metrics(store, keys, active_ranks, silent_ranks)
        except (RuntimeError, OSError, ValueError) as error:
            _LOG.warning(
                "Metrics of other ranks are no longer read: %s. Training and this rank's own metrics continue.",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            # Old values would stay forever and look current.
            slots.rank_metrics = {}
            return


def _read_rank_metrics(
    store: KeyValueStore, keys: list[str], active_ranks: list[int], silent_ranks: list[int]
) -> dict[int, dict[str, float]]:
    """Read the published metrics.

    ``active_ranks`` have published before, ``silent_ranks`` have not; both lists are updated.
    """
    for _ in range(min(_MAX_NEW_RANKS_PER_READ, len(silent_ranks))):
        rank = silent_ranks.pop(0)
        (active_ranks if store.check([keys[rank]]) else silent_ranks).append(rank)
    if not active_ranks:
        return {}
    values = store.multi_get([keys[rank] for rank in active_ranks])
    return dict(zip(active_ranks, map(json.loads, values), strict=True))
