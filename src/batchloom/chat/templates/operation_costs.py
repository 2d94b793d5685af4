"""Costs of the methods and filters of templates, by their arguments.

A cost has two numbers: how many characters an operation may make, not counting a small multiple of its inputs, and how
many it may read. Methods and filters without a cost are refused.
"""

import math
import re
from collections.abc import Callable, Sized
from typing import Any, TypeAlias

from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Cycler, Joiner

from batchloom.chat.templates.rendering_meter import ELEMENT_SIZE, TemplateLimitError, measure_size

Cost: TypeAlias = tuple[int, int]

# Below the modulus of Python's hashes, so that not all keys of a dict can be in one place.
MAX_INTEGER_BITS = 60
# Characters of a float, which format writes in full.
_MAX_FLOAT_CHARACTERS = 320
# A key has neither parentheses nor percent signs: each would be looked up to the end of the text.
_CONVERSION = re.compile(r"%(?:\([^()%]*\))?[-+ #0]*(\d*)(?:\.(\d*))?(.?)", re.DOTALL)
_CONVERSIONS = frozenset("diouxXeEfFgGcrsa%")
_MAX_WIDTH_DIGITS = 3


def _cost_reading(text: str, *_: object, **__: object) -> Cost:
    return 0, len(text)


def _cost_product(text: object, characters: str | None = None, *_: object, **__: object) -> Cost:
    """Return the cost of comparing each character with each of another text."""
    return 0, len(str(text)) * len(characters or "")


def _cost_split(text: str, sep: str | None = None, maxsplit: int = -1) -> Cost:
    pieces = len(text) // 2 + 1 if sep is None else text.count(sep) + 1
    return ELEMENT_SIZE * (pieces if maxsplit < 0 else min(pieces, maxsplit + 1)), len(text) * len(sep or "")


def _cost_lines(text: str, *_: object, **__: object) -> Cost:
    return ELEMENT_SIZE * len(text), 0


def _cost_replacement(text: object, old: object, new: object, count: int | None = None) -> Cost:
    replaced = str(text).count(str(old))
    if count is not None and count >= 0:
        replaced = min(replaced, count)
    return len(str(text)) + replaced * len(str(new)), 0


_READING = "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
_READING += (
    "isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase title upper"
)
TEXT_METHODS: dict[str, Callable[..., Cost]] = {
    **dict.fromkeys(_READING.split(), _cost_reading),
    # Python searches backwards, and strips, without an index of the other text.
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _cost_product),
    **dict.fromkeys(("rsplit", "split"), _cost_split),
    "join": lambda *_: (0, 0),  # counted where its argument is made a list
    "replace": _cost_replacement,
    "splitlines": _cost_lines,
}

# Attributes that templates may look up, by type; those of all other types are refused.
ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(TEXT_METHODS),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    LoopContext: frozenset(("depth0", *(name for name in dir(LoopContext) if not name.startswith("_")))),
    Macro: frozenset(("arguments", "caller", "catch_kwargs", "catch_varargs", "name")),
    Cycler: frozenset(("current", "next", "reset")),
    Joiner: frozenset(),
}


def check_bits(bits: float) -> None:
    """Refuse an integer that is too large."""
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it computes an integer of more than {MAX_INTEGER_BITS} bits")


def check_power(base: object, exponent: object) -> None:
    """Refuse a power of integers that is too large."""
    if isinstance(base, int) and isinstance(exponent, int):
        check_bits(exponent * math.log2(abs(base) or 1))


def refuse_tuple(key: Any) -> Any:
    """Return a key of a dict, but for a tuple, whose hash reads all that is in it."""
    if isinstance(key, tuple):
        raise TemplateLimitError("it uses a tuple as a key")
    return key


def _cost_format(text: object, *arguments: object, **named: object) -> Cost:
    """Return the cost of a ``%`` format."""
    size = len(str(text))
    argument_size = measure_size((arguments, named), 1 << 40) + _MAX_FLOAT_CHARACTERS
    for width, precision, conversion in _CONVERSION.findall(str(text)):
        if conversion not in _CONVERSIONS or max(len(width), len(precision)) > _MAX_WIDTH_DIGITS:
            raise TemplateLimitError("it formats a value in an unknown form, or wider than 999 characters")
        size += argument_size + int(width or 0) + int(precision or 0)
    return size, 0


def _cost_indent(text: object, width: int | str = 4, *_: object, **__: object) -> Cost:
    lines = len(str(text).splitlines()) + 1
    return len(str(text)) + lines * (width if isinstance(width, int) else len(width)), 0


def _cost_round(value: object, precision: int = 0, method: str = "common") -> Cost:  # noqa: ARG001 - jinja2's signature
    check_power(10, abs(precision))
    return 0, 0


def _cost_sum(iterable: object, attribute: object = None, start: object = 0) -> Cost:  # noqa: ARG001 - jinja2's signature
    if not isinstance(start, int | float):
        # Python copies the list in every step.
        raise TemplateLimitError("it sums what is no number")
    return _cost_elements(iterable)


def _cost_elements(value: object, *_: object, **__: object) -> Cost:
    """Return the cost of a filter that takes each element; characters become objects."""
    if isinstance(value, str):
        return ELEMENT_SIZE * len(value), 0
    return 0, ELEMENT_SIZE * len(value) if isinstance(value, Sized) else 0


def _cost_nothing(*_: object, **__: object) -> Cost:
    return 0, 0


_ELEMENTS = "dictsort groupby join list max min reverse sort title wordcount"
_NOTHING = (
    "abs attr capitalize count d default e escape first float forceescape int items last length lower map reject "
)
_NOTHING += "rejectattr safe select selectattr string tojson truncate upper"
FILTERS: dict[str, Callable[..., Cost]] = {
    **dict.fromkeys(_ELEMENTS.split(), _cost_elements),
    **dict.fromkeys(_NOTHING.split(), _cost_nothing),
    "format": _cost_format,
    "indent": _cost_indent,
    "replace": _cost_replacement,
    "round": _cost_round,
    "sum": _cost_sum,
    "trim": _cost_product,
}
# They look neither into elements nor compare them; all others may.
_SHALLOW = "count d default first items last length list map reject rejectattr reverse select selectattr"
SHALLOW_FILTERS = frozenset(_SHALLOW.split())
# They compare or write their arguments.
_DEEP = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper"
DEEP_TESTS = frozenset(_DEEP.split())
