"""Values that several requests share, each made once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@final
class ValueCache(Generic[K, V]):
    """Values by key. A request waits only for the value that it needs.

    Args:
        most: number of values that stay in memory.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._making: dict[K, threading.Lock] = {}
        self._values: OrderedDict[K, tuple[object, V]] = OrderedDict()

    def get(self, key: K, stamp: object, make: Callable[[], V]) -> V:
        """Return the value of a key, made again if its stamp changed."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                cached = self._values.get(key)
                if cached is not None and cached[0] == stamp:
                    self._values.move_to_end(key)
                    return cached[1]
            value = make()
            with self._lock:
                self._values[key] = stamp, value
                self._values.move_to_end(key)
                while len(self._values) > self._most:
                    oldest, _ = self._values.popitem(last=False)
                    self._making.pop(oldest, None)
            return value
