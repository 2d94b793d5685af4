"""What a template can do with values: filters, tests and methods, each with its price.

See ``bounds``. A filter pays for the sizes of what it is given before it runs, and one that can make much of little
for what it will make.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

from jinja2 import filters, pass_environment, pass_eval_context, tests
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import markup_join, str_join

from batchloom.chat.templates.rendering_limits import RenderBudget, limit_width

# Filters that look at no more of a value than its beginning, end or length.
_FREE_FILTERS = frozenset(("attr", "count", "d", "default", "first", "last", "length"))
# Filters that go through the items of a value, and not into them.
_SHALLOW_FILTERS = frozenset(
    ("batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
) | {"slice"}
# Filters that compare the parts of a value with each other, or run some code for each.
_SORTING_FILTERS = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
# No limit is known for what these do, and no chat template needs them.
_REFUSED_FILTERS = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))
_COMPARISON_TESTS = {
    **dict.fromkeys(("eq", "==", "equalto"), "eq"),
    **dict.fromkeys(("ne", "!="), "ne"),
    **dict.fromkeys(("gt", ">", "greaterthan"), "gt"),
    **dict.fromkeys(("ge", ">="), "gteq"),
    **dict.fromkeys(("lt", "<", "lessthan"), "lt"),
    **dict.fromkeys(("le", "<="), "lteq"),
    "in": "in",
}


def make_bounded_filters(bounds: RenderBudget) -> dict[str, Any]:
    """All filters of jinja2 with a price, and those that the accounts of a template call."""
    all_filters = {**filters.FILTERS, **_make_text_filters(bounds), **_make_list_filters(bounds)}
    bounded_filters = {
        name: function if name in _FREE_FILTERS else _charge_filter(bounds, name, function)
        for name, function in all_filters.items()
    }

    @pass_eval_context
    def concat(context: EvalContext, *values: Any) -> str:
        bounds.charge_join(values)
        text: str = (markup_join if context.autoescape else str_join)(values)
        return text

    trim_any = bounded_filters["trim"]

    def trim(value: Any, chars: str | None = None) -> Any:
        """The filter that templates call most, without detour."""
        if chars is not None or type(value) is not str:
            return trim_any(value, chars)
        bounds.charge(len(value) >> 4)
        return value.strip()

    refused = dict.fromkeys((*_REFUSED_FILTERS, "random"), refuse_operation)
    return {
        **bounded_filters,
        **refused,
        "trim": trim,
        "_add": bounds.add,
        "_add_all": bounds.add_all,
        "_charge_items": bounds.charge_items,
        "_compare": bounds.compare_all,
        "_concat": concat,
        "_contains": bounds.contains,
        "_emit": bounds.emit,
        "_keep": bounds.keep,
        "_key": bounds.charge_key,
        "_name": bounds.name,
        "_step": bounds.charge,
    }


def _charge_filter(bounds: RenderBudget, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is paid for by the sizes of what it is given and of what it makes."""
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0
    weight = 4 if name in _SORTING_FILTERS else 1

    @wraps(function)
    def priced(*args: Any, **kwargs: Any) -> Any:
        value = args[value_index]
        if type(value) is str and len(args) == value_index + 1 and not kwargs:
            # The result is at most a few times as long.
            bounds.charge(len(value) * weight >> 2)
            return function(*args)
        if not hasattr(value, "__len__") and hasattr(value, "__iter__"):
            # What it yields was paid for when it was made.
            value = list(value)
            args = (*args[:value_index], value, *args[value_index + 1 :])
        more = bounds.charge_value((args[value_index + 1 :], kwargs)) if len(args) > value_index + 1 or kwargs else 0
        if name in _SHALLOW_FILTERS:
            items = len(value) if hasattr(value, "__len__") else 0
            bounds.charge(items * (4 + more) >> 2)
        else:
            bounds.charge_value(value, weight)
        if name in ("unique", "dictsort"):
            bounds.charge_keys(value)
        return bounds.keep(function(*args, **kwargs))

    return priced


def _make_text_filters(bounds: RenderBudget) -> dict[str, Any]:
    """Filters that make texts, which can make much of little, with limits."""

    def join(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = [item[attribute] for item in value]
        return bounds.join(str(d), value)

    def replace(s: Any, old: str, new: str, count: int | None = None) -> str:
        return bounds.replace(s, old, new, count)

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: FBT001, FBT002
        bounds.fill(s, "\n", width)
        return filters.do_indent(s, width, first=first, blank=blank)

    def center(value: str, width: int = 80) -> str:
        return filters.do_center(value, limit_width(width))

    def formatted(value: str, *args: Any, **kwargs: Any) -> str:
        bounds.charge_format(str(value), (args, kwargs))
        return filters.do_format(value, *args, **kwargs)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the names transformers gives them
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        if indent is not None or separators is not None:
            parts, depth = _measure_parts(x)
            width = len(indent) if isinstance(indent, str) else limit_width(indent) or 0
            between = sum(map(len, separators or ()))
            bounds.check_size(parts * (depth * width + between))
        return json.dumps(
            x,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    return {
        "center": center,
        "format": formatted,
        "indent": indent,
        "join": join,
        "replace": replace,
        "tojson": tojson,
    }


def _make_list_filters(bounds: RenderBudget) -> dict[str, Any]:
    """The same of filters that make lists and numbers."""

    def batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
        bounds.charge(limit_width(linecount))
        return filters.do_batch(value, linecount, fill_with)

    def slices(value: Any, slices: int, fill_with: Any = None) -> Any:
        bounds.charge(limit_width(slices))
        return filters.sync_do_slice(value, slices, fill_with)

    def rounded(value: float, precision: int = 0, method: Any = "common") -> float:
        return filters.do_round(value, limit_width(precision), method)

    @pass_environment
    def summed(environment: Environment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            iterable = map(filters.make_attrgetter(environment, attribute), iterable)
        total = start
        for value in iterable:
            bounds.charge(1)
            total = bounds.add(total, value)
        return total

    @pass_environment
    def attr(environment: Environment, obj: Any, name: str) -> Any:
        if hasattr(obj, str(name)):
            return environment.getattr(obj, str(name))
        return environment.undefined(obj=obj, name=str(name))

    return {
        "attr": attr,
        "batch": batch,
        "round": rounded,
        "slice": slices,
        "sum": summed,
    }


def _measure_parts(value: Any) -> tuple[int, int]:
    """How many parts a value has, and how deep they are nested."""
    parts, depth, level = 0, 0, [value]
    while level:
        parts, depth = parts + len(level), depth + 1
        level = [
            part
            for some in level
            if isinstance(some, (dict, list, tuple))
            for part in (some.values() if isinstance(some, dict) else some)
        ]
    return parts, depth


def make_bounded_tests(bounds: RenderBudget) -> dict[str, Any]:
    """The tests of jinja2 whose work grows with what they are given, with a price."""

    def comparison(name: str) -> Callable[[Any, Any], Any]:
        return lambda value, other: bounds.compare(value, name, other)

    def divided(some: Callable[..., bool]) -> Callable[..., bool]:
        def test(value: Any, *args: Any) -> bool:
            bounds.binop("%", value, args)
            return some(value, *args)

        return test

    def spelled(some: Callable[[str], bool]) -> Callable[[Any], bool]:
        def test(value: Any) -> bool:
            bounds.charge_value(value)
            return some(value)

        return test

    return {
        **{name: comparison(some) for name, some in _COMPARISON_TESTS.items()},
        **{
            name: divided(some)
            for name, some in (
                ("odd", tests.test_odd),
                ("even", tests.test_even),
                ("divisibleby", tests.test_divisibleby),
            )
        },
        "lower": spelled(tests.test_lower),
        "upper": spelled(tests.test_upper),
    }


# Methods that templates may call, by the type of their owner.
SAFE_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        name for name in dir(str) if not name.startswith("_") and name not in ("encode", "maketrans", "translate")
    ),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
}
# Methods of str that can make much of little.
GROWING_METHODS = frozenset(
    ("replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map")
)


def make_bounded_method(bounds: RenderBudget, text: str, name: str, format_: Callable[..., str]) -> Any:
    """The method ``name`` of ``text`` with limits; ``format_``: what the sandbox has in place of formatting."""
    if name == "replace":
        return partial(bounds.replace, text)
    if name == "join":
        return partial(bounds.join, text)
    if name in ("format", "format_map"):

        def formatted(*args: Any, **kwargs: Any) -> str:
            bounds.charge_format(text, (args, kwargs))
            return format_(*args, **kwargs)

        return formatted

    def padded(width: int = 8, *fill: str, tabsize: int | None = None) -> str:
        width = width if tabsize is None else tabsize
        bounds.fill(text, "\t" if name == "expandtabs" else "", width)
        padded_text: str = getattr(text, name)(width, *fill)
        return padded_text

    return padded


def refuse_operation(*_: Any, **__: Any) -> Any:
    """Stands in for filters and functions that depend on chance, or whose work has no known limit."""
    raise SecurityError(
        f"{', '.join(sorted(_REFUSED_FILTERS))}, random and lipsum are not there: a template must give the same "
        f"text always, "
        "with work that is known beforehand"
    )
