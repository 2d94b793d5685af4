"""What one rendering may use up: steps and characters, counted and never timed.

A template comes from whoever made a tokenizer. Whatever it does must end in text or in an error, on
every machine at the same place, so what is counted is the work it asks for, not seconds.
"""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, final

from jinja2 import filters, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

_STEPS = 1 << 20
_STRING = 1 << 20
# Rounds and characters that a conversation buys with each of its own characters.
_SHARE = 32
_CALL = 8
# A number that sets a width, a depth or a count of fillings.
_WIDEST = 10_000


class BoundsError(Exception):
    """A template asks for more than a rendering may use."""


@final
class Bounds:
    """The account of one rendering at a time."""

    def __init__(self) -> None:
        self.open(())

    def open(self, given: object) -> None:
        """Begin a rendering of ``given``, whose size is looked at only when it matters."""
        self._given = given
        self._steps, self._string = _STEPS, _STRING

    def charge(self, steps: int) -> None:
        """Pay for ``steps`` rounds of a loop or characters of a buffer."""
        self._steps -= steps
        if self._steps < 0:
            self._extend()
            if self._steps < 0:
                raise BoundsError(
                    f"it asks for more than {_STEPS + self._string - _STRING - 1:,} rounds of its "
                    "loops and characters of its macros for one conversation"
                )

    def fits(self, characters: int) -> None:
        """Refuse a string or list of more than what a rendering may hold in one."""
        if characters > self._string:
            self._extend()
            if characters > self._string:
                raise BoundsError(
                    f"it makes a text or list of {characters:,} where {self._string:,} is the most "
                    "for this conversation"
                )

    def _extend(self) -> None:
        if self._string == _STRING:
            more = _SHARE * _size(self._given, 1 << 40)
            self._steps += more
            self._string += more + 1

    def charged(self, items: Any, weight: int) -> Any:
        """What a loop goes through, paid for on entry."""
        if not hasattr(items, "__len__"):
            items = list(items)
        self.charge(len(items) * weight)
        return items

    def called(self, value: Any) -> Any:
        """What a call gave back: as dear as it is slow, and no larger than what is kept."""
        self.charge(_CALL)
        return self.sized(value)

    def sized(self, value: Any) -> Any:
        """A value that is kept or handed on, refused where it has grown too large."""
        if isinstance(value, str):
            if len(value) > _STRING:
                self.fits(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.fits(self._measured(value))
        return value

    def _measured(self, value: Any) -> int:
        """The size of a value, or one beyond what fits: what holds itself twice has no end."""
        size = _size(value, _STRING)
        if size > _STRING:
            self._extend()
            size = _size(value, self._string)
        return size

    def emitted(self, value: Any) -> Any:
        """A value written into a buffer, where nobody sees how much there is already."""
        text = value if isinstance(value, str) else str(value)
        self.charge(len(text))
        return value

    def binop(self, operator: str, left: Any, right: Any) -> None:
        """Refuse ``*``, ``**`` and ``%`` whose result would be out of proportion."""
        if operator == "%":
            if isinstance(left, str):
                _checked_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * max(right, 0) if operator == "**" else bits + right.bit_length()) > 4096:
                raise BoundsError(f"it computes a number of more than 4,096 bits with {operator}")
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if hasattr(some, "__len__") and isinstance(times, int):
                    self.fits(self._measured(some) * max(times, 0))

    def replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        """``str.replace``, the result measured before it is made."""
        whole, filling = str(text), str(new)
        self.fits(len(whole) + whole.count(str(old)) * len(filling))
        return whole.replace(str(old), filling, -1 if count is None else count)

    def join(self, separator: str, items: Iterable[Any]) -> str:
        """``str.join``, the result measured before it is made."""
        parts = [item if isinstance(item, str) else str(item) for item in items]
        self.fits(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)


def narrow(value: Any) -> Any:
    """A width, depth or filling that a filter is given, refused where it is out of proportion."""
    size = len(value) if isinstance(value, str) else value
    if isinstance(size, int) and size > _WIDEST:
        raise BoundsError(f"it asks a filter for {size:,} where {_WIDEST:,} is the most")
    return value


def _checked_format(text: str) -> str:
    if re.search(r"%[^%a-zA-Z]*?(\*|\d{5})", text) or re.search(r"\{[^{}]*:[^{}]*(\{|\d{5})", text):
        raise BoundsError(f"it formats with a width that is too large or not fixed: {text[:60]!r}")
    return text


def _size(value: object, enough: int) -> int:
    """Characters of all strings in a value and one for each part, counted up to ``enough``."""
    size, waiting = 0, [value]
    while waiting and size <= enough:
        some = waiting.pop()
        size += 1
        if isinstance(some, str):
            size += len(some)
        elif isinstance(some, dict):
            waiting += some.keys()
            waiting += some.values()
        elif isinstance(some, (list, tuple)):
            waiting += some
    return size


def bounded_filters(bounds: Bounds) -> dict[str, Any]:
    """jinja2's filters that can make much of little, with limits."""

    def join(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = [item[attribute] for item in value]
        return bounds.join(str(d), value)

    def replace(s: Any, old: str, new: str, count: int | None = None) -> str:
        return bounds.replace(s, old, new, count)

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: FBT001, FBT002
        return filters.do_indent(s, narrow(width), first=first, blank=blank)

    def center(value: str, width: int = 80) -> str:
        return filters.do_center(value, narrow(width))

    def batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
        return filters.do_batch(bounds.charged(value, 1), narrow(linecount), fill_with)

    def slices(value: Any, slices: int, fill_with: Any = None) -> Any:
        return filters.sync_do_slice(bounds.charged(value, 1), narrow(slices), fill_with)

    def formatted(value: str, *args: Any) -> str:
        return _checked_format(str(value)) % args

    # They depend on the context, or jinja2 would fold them away where the value is constant.
    @pass_context
    def charged(_: Context, items: Any, weight: int) -> Any:
        return bounds.charged(items, weight)

    @pass_context
    def called(_: Context, value: Any) -> Any:
        return bounds.called(value)

    @pass_context
    def emitted(_: Context, value: Any) -> Any:
        return bounds.emitted(value)

    return {
        "join": join,
        "replace": replace,
        "indent": indent,
        "center": center,
        "batch": batch,
        "slice": slices,
        "format": formatted,
        "_charged": charged,
        "_called": called,
        "_emitted": emitted,
        "_sized": bounds.sized,
    }


# Methods of str that can make much of little.
GROWING = frozenset(
    ("replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map")
)


def bounded_method(bounds: Bounds, text: str, name: str) -> Any:
    """The method ``name`` of ``text`` with limits, None where the text itself is what is checked."""
    if name == "replace":
        return partial(bounds.replace, text)
    if name == "join":
        return partial(bounds.join, text)
    if name in ("format", "format_map"):
        _checked_format(text)
        return None

    def padded(width: int = 8, *fill: str) -> str:
        made: str = getattr(text, name)(narrow(width), *fill)
        return made

    return padded


def refuse_random(*_: Any) -> Any:
    """Stands in for what would make a store depend on chance."""
    raise SecurityError(
        "a template must give the same text always: random and lipsum are not there"
    )
