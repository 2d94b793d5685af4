"""Limits of one rendering: every operation has a price, paid from an account of steps.

A template comes from whoever made a tokenizer. All that it can do is listed in ``operations`` and ``environment``; what
is on no list is refused. A price depends on the sizes of values alone and never on a clock, so that a template is
stopped at the same place on every machine. A step takes about a microsecond or less.
"""

import operator
import re
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, final

from jinja2.utils import Namespace

_BASE_STEPS = 1 << 20
_MAX_STRING_CHARACTERS = 1 << 20
# Steps and characters that a conversation buys with each of its own characters.
_STEPS_PER_CHARACTER = 32
# Steps that it buys with each pair of its messages: some templates look at all messages from each of them.
_STEPS_PER_MESSAGE_PAIR = 8
_STEPS_PER_CALL = 8
# A number that sets a width, a depth or a count of fillings.
_MAX_WIDTH = 10_000
_MAX_BITS = 4096
# To add or compare texts of less has no price of its own.
_FREE_CHARACTERS = 4096
_DICT_VIEW_TYPES: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SCALAR_TYPES = (int, float, bool, NoneType)
# Where a namespace keeps what it holds.
_NAMESPACE_ATTRIBUTE = "_Namespace__attrs"


class BoundsError(Exception):
    """A template asks for more than a rendering may use."""


@final
class RenderBudget:
    """The account of one rendering at a time.

    It is closed until it is opened, so that no filter is computed when a template is compiled.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._tools: list[Any] | None = None
        self._bought = 0
        self._steps, self._string = -1, _MAX_STRING_CHARACTERS + 1

    def open(self, messages: list[Any], tools: list[Any] | None) -> None:
        """Begin a rendering of a conversation, whose size is looked at only when it matters."""
        self._messages, self._tools = messages, tools
        self._bought = 0
        self._steps, self._string = _BASE_STEPS, _MAX_STRING_CHARACTERS

    def charge(self, steps: int) -> None:
        """Pay for ``steps``."""
        self._steps -= steps
        if self._steps < 0:
            self._extend()
            if self._steps < 0:
                raise BoundsError(
                    f"it asks for more than {_BASE_STEPS + self._bought:,} steps (rounds of loops, items and "
                    f"characters "
                    "that it works on) for one conversation"
                )

    def check_size(self, characters: int) -> None:
        """Refuse a string or list of more than a rendering may hold in one."""
        if characters > self._string:
            self._extend()
            if characters > self._string:
                raise BoundsError(
                    f"it makes a text or list of {characters:,} where {self._string:,} is the most "
                    "for this conversation"
                )

    def _extend(self) -> None:
        if self._string == _MAX_STRING_CHARACTERS:
            more = _STEPS_PER_CHARACTER * _measure_size((self._messages, self._tools), 1 << 40)
            self._string += more + 1
            self._bought = more + _STEPS_PER_MESSAGE_PAIR * len(self._messages) ** 2
            self._steps += self._bought

    def charge_value(self, value: Any, weight: int = 1) -> int:
        """Pay for going through all of a value ``weight`` times; its size."""
        if type(value) is str:
            size = len(value)
        else:
            size = _measure_size(value, self._string)
            if size > self._string:
                self._extend()
                size = _measure_size(value, self._string)
                self.check_size(size)
        self.charge((size * weight) >> 2)
        return size

    def charge_items(self, items: Any, weight: int) -> Any:
        """Pay for a loop over items on entry; the items, listed where they have no length."""
        if not hasattr(items, "__len__"):
            items = list(items)
        self.charge(len(items) * weight)
        return items

    def keep(self, value: Any) -> Any:
        """Pay for a value that an operation made; the value, refused where it is too large."""
        kind = type(value)
        if kind is str or isinstance(value, str):
            self.charge(len(value) >> 4)
            if len(value) > _FREE_CHARACTERS:
                self.check_size(len(value))
        elif kind in (list, tuple, dict):
            self.charge(len(value) >> 2)
        elif kind is int and value.bit_length() > _MAX_BITS:
            raise BoundsError(f"it computes a number of more than {_MAX_BITS:,} bits")
        return value

    def name(self, value: Any) -> Any:
        """Pay for a value that gets a name; refused where it is too large or would double in every round."""
        kind = type(value)
        if kind is str:
            if len(value) > _FREE_CHARACTERS:
                self.keep(value)
        elif isinstance(value, (str, _SCALAR_TYPES)):
            self.keep(value)
        else:
            self.charge_value(value)
        return value

    def emit(self, value: Any) -> Any:
        """Pay for a value written into a buffer, whose length is not known here."""
        text = value if isinstance(value, str) else str(value)
        self.charge(len(text))
        return value

    def charge_keys(self, keys: Iterable[Any]) -> list[Any]:
        """Pay for keys of a dict or set: those that are no strings may all have one hash."""
        key_list = list(keys)
        non_string_count = sum(not isinstance(key, str) for key in key_list)
        self.charge(len(key_list) + (non_string_count * non_string_count >> 6))
        return key_list

    def charge_method(self, owner: Any, name: str, args: tuple[Any, ...]) -> None:
        """Pay for a call of a method that is built in, and for what it makes."""
        size = 0
        for value in args:
            size += len(value) if type(value) is str else self.charge_value(value)
        if isinstance(owner, str):
            # Methods that search from the right, or strip, compare each place with all of their argument.
            self.charge(len(owner) * (size + 16) >> 8)
        elif isinstance(owner, (list, tuple)):
            self.charge(_STEPS_PER_CALL + size)
            if args:
                self.charge_search(args[0], owner)
        else:
            self.charge(_STEPS_PER_CALL + size + (len(owner) if name == "copy" else 0))

    def charge_search(self, value: Any, container: Any) -> None:
        """Pay for looking a value up in a container."""
        if isinstance(container, str):
            least = min(len(value), 64) if isinstance(value, str) else 0
            self.charge(len(container) * (least + 16) >> 8)
        elif isinstance(container, dict):
            if type(value) not in (str, int):
                self.charge_value(value)
        elif isinstance(value, str):
            self.charge(len(container) * (len(value) + 256) >> 8)
        elif isinstance(value, _SCALAR_TYPES):
            self.charge(len(container))
        else:
            self.charge_value(value)
            self.charge_value(container)

    def compare(self, left: Any, name: str, right: Any) -> Any:
        """Compare two values."""
        if name in ("in", "notin"):
            if not hasattr(right, "__len__") and hasattr(right, "__iter__"):
                right = list(right)
            if hasattr(right, "__len__"):
                self.charge_search(left, right)
        elif not isinstance(left, _SCALAR_TYPES) and not isinstance(right, _SCALAR_TYPES):
            if isinstance(left, str) and isinstance(right, str):
                if len(right) > _FREE_CHARACTERS:
                    self.charge(min(len(left), len(right)) >> 4)
            else:
                self.charge_value(left)
                self.charge_value(right)
        return _COMPARISONS[name](left, right)

    def add(self, first: Any, second: Any) -> Any:
        """The sum of two values."""
        total = first + second
        if type(total) is not str or len(total) > _FREE_CHARACTERS:
            self.keep(total)
        return total

    def add_all(self, first: Any, second: Any, *values: Any) -> Any:
        """The sum of values, from left to right."""
        total = first + second
        for value in values:
            if type(total) is not str or len(total) > _FREE_CHARACTERS:
                self.keep(total)
            total = total + value
        if type(total) is not str or len(total) > _FREE_CHARACTERS:
            self.keep(total)
        return total

    def charge_join(self, parts: tuple[Any, ...]) -> None:
        """Pay for ``~``, before the text is made."""
        size = 0
        for value in parts:
            if isinstance(value, str):
                size += len(value)
            elif not isinstance(value, _SCALAR_TYPES):
                size += self.charge_value(value)
        self.charge(size >> 4)
        if size > _FREE_CHARACTERS:
            self.check_size(size)

    def charge_key(self, key: Any) -> Any:
        """Pay for a key that a value is looked up by: the hash of a tuple is not kept; the key."""
        if type(key) is tuple:
            self.charge_value(key)
        return key

    def contains(self, value: Any, container: Any) -> Any:
        """Compare by ``in``, most often of a key with a message."""
        if type(container) is dict and type(value) is str:
            return value in container
        return self.compare(value, "in", container)

    def compare_all(self, left: Any, *comparisons: Any) -> Any:
        """Compare values; ``comparisons`` is a name of a comparison and a value, again and again."""
        if len(comparisons) == 2:
            return self.compare(left, *comparisons)
        result: Any = True
        for name, right in zip(comparisons[::2], comparisons[1::2], strict=True):
            result = self.compare(left, name, right)
            if not result:
                break
            left = right
        return result

    def binop(self, name: str, left: Any, right: Any) -> None:
        """Refuse ``*``, ``**`` and ``%`` whose result would be out of proportion, and pay for ``-``."""
        if name == "%":
            if isinstance(left, str):
                self.charge_format(left, right)
        elif name == "-":
            if not isinstance(left, _SCALAR_TYPES) and hasattr(left, "__len__"):
                self.charge(len(self.charge_keys(left)) + len(self.charge_keys(right)))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            result_bits = bits * max(right, 0) if name == "**" else bits + right.bit_length()
            if result_bits > _MAX_BITS:
                raise BoundsError(f"it computes a number of more than {_MAX_BITS:,} bits with {name}")
        elif name == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    self.check_size(self.charge_value(sequence) * max(times, 0))

    def charge_format(self, text: str, values: Any) -> None:
        """Pay for ``%`` and ``format``, each place taken for one of all values."""
        field_count = text.count("%") + text.count("{")
        self.charge(len(text) * field_count >> 8)
        if _WIDE_FORMAT.search(text):
            raise BoundsError(f"it formats with a width that is too large or not fixed: {text[:60]!r}")
        widths = sum(map(int, re.findall(r"\d{2,4}", text)))
        self.check_size(len(text) + widths + field_count * self.charge_value(values))
        self.charge(field_count)

    def replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        """``str.replace``, the result measured before it is made."""
        source_text, filling = str(text), str(new)
        self.charge_method(source_text, "replace", (str(old),))
        self.check_size(len(source_text) + source_text.count(str(old)) * len(filling))
        return source_text.replace(str(old), filling, -1 if count is None else count)

    def join(self, separator: str, items: Iterable[Any]) -> str:
        """``str.join``, the result measured before it is made."""
        items = list(items)
        self.charge_value(items)
        parts = [item if isinstance(item, str) else str(item) for item in items]
        self.check_size(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)

    def fill(self, text: str, marks: str, width: Any) -> None:
        """Refuse a width that is put at each of the marks in a text, where it makes too much of it."""
        size = limit_width(width)
        size = len(size) if isinstance(size, str) else int(size)
        self.check_size(len(text) + (1 + sum(map(text.count, marks))) * size)


# A width or precision of five digits, or one that is a value itself; names in parentheses come before it.
_WIDE_FORMAT = re.compile(r"%(?:\([^)%]*\))?[^%a-zA-Z(]*?(\*|\d{5})|\{[^{}:]*:[^{}]*?(\{|\d{5})")
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def limit_width(value: Any) -> Any:
    """A width, depth or filling that a filter is given, refused where it is out of proportion."""
    size = len(value) if isinstance(value, str) else value
    if isinstance(size, int) and size > _MAX_WIDTH:
        raise BoundsError(f"it asks a filter for {size:,} where {_MAX_WIDTH:,} is the most")
    return value


def _measure_size(value: Any, limit: int) -> int:
    """Characters of all strings in a value and one for each part, counted up to ``limit``."""
    size, pending = 0, [value]

    while pending and size <= limit:
        item = pending.pop()
        kind = type(item)
        size += 1
        if kind is str:
            size += len(item)
        elif kind is dict:
            pending += item.keys()
            pending += item.values()
        elif kind is list or kind is tuple or kind is set or kind in _DICT_VIEW_TYPES:
            pending += item
        elif kind is range:
            size += len(item)
        elif kind is int:
            size += item.bit_length() >> 6
        elif isinstance(item, str):
            size += len(item)
        elif isinstance(item, Namespace):
            size += _STEPS_PER_CALL
            pending.append(getattr(item, _NAMESPACE_ATTRIBUTE))
        elif isinstance(item, (dict, list, tuple)):
            pending += item.values() if isinstance(item, dict) else item
    return size
