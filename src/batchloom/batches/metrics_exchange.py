"""Where ranks leave their latest figures for the others, who read what is there and wait for nobody.

No collective: one that a rank does not join would hang all others. A thread talks to the key-value store that
``torch.distributed`` has anyway, over a connection of its own; training only hands it figures and takes what it has
read. A rank that never says anything is not heard, one that died stays at its last word, and where the store is gone
the thread ends.
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
# Ranks not heard so far that are asked for at a time, since each is a question of its own.
_MAX_NEW_RANKS_PER_READ = 64


class KeyValueStore(Protocol):
    """What is used of a store of ``torch.distributed``."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether there are values of all keys; does not wait for them."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there."""


def open_default_store() -> KeyValueStore | None:
    """A connection of our own to the store of the default process group; None where there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    # torch names it so that it is not taken for stable: what else has it is asked for by its name, too.
    group = getattr(distributed, "distributed_c10d", None)
    store: Any = getattr(group, "_get_default_store", lambda: None)()
    # Of an older torch, without clone, a call of ours might hold up one of the group's.
    clone = getattr(store, "clone", None)
    try:
        return None if clone is None else clone()
    except RuntimeError:
        return None


@dataclass(slots=True)
class _ExchangeState:
    """What the thread and the training hand to each other."""

    wake: threading.Event = field(default_factory=threading.Event)
    # The latest only; taken out in one move, so that none left meanwhile is lost.
    outgoing: deque[str] = field(default_factory=lambda: deque(maxlen=1))
    rank_metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    read_requested: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False


@final
class MetricsExchange:
    """The board as one rank sees it; no call waits.

    Args:
        store: where values are left.
        rank: of this process.
        world_size: of so many.
        name: tells this board from others; the same on all ranks.
    """

    def __init__(self, store: KeyValueStore, rank: int, world_size: int, name: str) -> None:
        self._slots = _ExchangeState()
        weakref.finalize(self, _stop_exchange, self._slots)
        keys = [f"batchloom/{name}/{n}" for n in range(world_size)]
        threading.Thread(
            target=_run_exchange,
            args=(self._slots, store, keys, rank),
            name="batchloom-board",
            daemon=True,
        ).start()

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Leave the figures of this rank in place of those before."""
        self._slots.outgoing.append(json.dumps(dict(metrics)))
        self._slots.wake.set()

    def get_rank_metrics(self) -> dict[int, dict[str, float]]:
        """What ranks had left when the board was read last, by rank; it is read again now, for the next time."""
        self._slots.read_requested.set()
        self._slots.wake.set()
        return dict(self._slots.rank_metrics)


def _stop_exchange(slots: _ExchangeState) -> None:
    slots.is_closed = True
    slots.wake.set()


def _run_exchange(slots: _ExchangeState, store: KeyValueStore, keys: list[str], rank: int) -> None:
    """What the thread does until the board is dropped or the store is gone."""
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
                "Figures of other ranks are not read any more: %s. Training and this rank's own figures go on.",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            # What is known of them would stay for ever, and look like news.
            slots.rank_metrics = {}
            return


def _read_rank_metrics(
    store: KeyValueStore, keys: list[str], active_ranks: list[int], silent_ranks: list[int]
) -> dict[int, dict[str, float]]:
    """What ranks have left; ``active_ranks`` are those that ever left anything, ``silent_ranks`` the rest."""
    for _ in range(min(_MAX_NEW_RANKS_PER_READ, len(silent_ranks))):
        rank = silent_ranks.pop(0)
        (active_ranks if store.check([keys[rank]]) else silent_ranks).append(rank)
    if not active_ranks:
        return {}
    values = store.multi_get([keys[rank] for rank in active_ranks])
    return dict(zip(active_ranks, map(json.loads, values), strict=True))
