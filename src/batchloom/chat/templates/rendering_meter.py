"""Meter of what a rendering makes, reads and keeps, and of its time."""

import gc
import time
from collections.abc import Mapping
from typing import Any, final

from batchloom.core.process_state import measure_memory

# CPU time of one rendering. Published templates need milliseconds; those that look at all messages from each need 3 ms
# per message for 2,000 messages.
_MAX_SECONDS = 5.0
_MAX_SECONDS_PER_MESSAGE = 0.01
# Largest value, in characters; more for a larger conversation.
_BASE_BUDGET = 1 << 22
_BUDGET_PER_INPUT_CHARACTER = 1 << 3
# Characters that one operation may read, which takes less than a second.
_MAX_READ = 1 << 29
# Bytes by which the process may grow in one rendering.
_MAX_MEMORY = 1 << 28
# An element of a list counts as so many characters: it is a pointer of eight bytes, and often an object of its own.
ELEMENT_SIZE = 8
# Fixed cost of each operation, and the cost after which the clock is read again.
OPERATION_COST = 1 << 8
_COST_PER_CLOCK_READ = 1 << 15
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(Exception):
    """A template exceeds the limits of a rendering."""


@final
class RenderingMeter:
    """Counter of what the operations of one rendering make and read.

    Attributes:
        left: costs until limits are checked again; below 0 they must be.
    """

    def __init__(self) -> None:
        # Every count fails until a rendering begins: jinja would compute constants when it compiles.
        self._budget = -1
        self._is_budget_extended = True
        self._conversation: tuple[Any, ...] = ()
        self._made = self._first_memory = self.left = 0
        self._max_seconds = self._deadline = float("inf")

    def begin(self, messages: list[Any], tools: list[Any] | None, arguments: Mapping[str, Any]) -> None:
        """Begin a rendering; larger inputs may make more."""
        if self._first_memory:
            # Reference cycles of the last rendering may still hold much memory.
            gc.collect()
        self._conversation = (messages, tools, arguments)
        self._budget = _BASE_BUDGET
        self._is_budget_extended = False
        self._made = self._first_memory = self.left = 0
        self._max_seconds = _MAX_SECONDS + _MAX_SECONDS_PER_MESSAGE * len(messages)
        self._deadline = time.thread_time() + self._max_seconds

    def count(self, size: int, read: int = 0) -> None:
        """Count characters that an operation makes, and those that it reads.

        Raises:
            TemplateLimitError: they are too many, or the time or memory of the rendering is spent.
        """
        self.left -= OPERATION_COST + size + read
        if self.left < 0:
            self.check_limits(size, read)

    def check_limits(self, size: int, read: int = 0) -> None:
        """Check what was counted since the last time.

        Args:
            size: characters that the last operation makes.
            read: characters that it reads.

        Raises:
            TemplateLimitError: as :meth:`count`.
        """
        self._check_size(size)
        if read > _MAX_READ:
            raise TemplateLimitError(f"it reads more than {_MAX_READ:,} characters at once")
        self._made += _COST_PER_CLOCK_READ - self.left
        self.left = _COST_PER_CLOCK_READ
        if self._made > self._budget:
            self._check_memory()
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {self._max_seconds:.3g} seconds for one conversation")

    def _check_size(self, size: int) -> None:
        if size > self._budget and not self._is_budget_extended:
            self._budget += _BUDGET_PER_INPUT_CHARACTER * measure_size(self._conversation, 1 << 40)
            self._is_budget_extended = True
        if size > self._budget:
            raise TemplateLimitError(f"it makes more than {self._budget:,} characters at once")

    def _check_memory(self) -> None:
        """Begin to count anew if what was made is garbage."""
        memory = measure_memory()
        self._first_memory = self._first_memory or memory
        if memory - self._first_memory > _MAX_MEMORY:
            raise TemplateLimitError(f"it takes more than {_MAX_MEMORY >> 20} MiB of memory for one conversation")
        self._made = 0

    def count_reading(self, value: Any) -> int:
        """Count a value that is compared or written; return its size.

        A list may hold a value many times at no cost until then, so each place of a value counts.
        """
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, _CONTAINERS):
            size = measure_size(value, self._budget)
            if size > self._budget:
                self._check_size(size)
                size = measure_size(value, self._budget)
                self._check_size(size)
        else:
            return 1
        self.count(0, size)
        return size


def measure_size(value: Any, enough: int) -> int:
    """Return the characters of a value and the size of its elements, up to ``enough``."""
    size = 0
    pending = [value]
    while pending and size <= enough:
        item = pending.pop()
        size += ELEMENT_SIZE
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, _CONTAINERS):
            pending += item  # type: ignore[arg-type]
        elif isinstance(item, int):
            size += item.bit_length() >> 3
    return size
