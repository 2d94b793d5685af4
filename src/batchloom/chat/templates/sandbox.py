"""Sandbox of chat templates: every operation is bounded before it runs.

A template comes with a tokenizer, so that it may be anybody's. It is rendered in this process, with a limit of
processor time, and a budget of characters and elements for what its operations make:

- An operation whose result may be much larger than its inputs is counted before it runs: repetitions, formats,
  replacements, joins. All others make at most a small multiple of what was counted for their inputs.
- No value may be larger than the budget. If all values together are, most of them are garbage, or the process has
  grown: then the template is stopped.
- A list may hold a value many times at no cost, until it is made into text, or compared. So its size, in which each
  place of a value counts, is measured before that.

Everything else is as in transformers, but for methods and filters of `_REFUSED_ATTRIBUTES` and `_REFUSED_FILTERS`.
"""

import datetime as dt
import functools
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_join
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable, safe_range
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

from batchloom.core.process_state import measure_memory

# Function that gives the marks around a round of a loop, by its item.
MarkRound = Callable[[Any], tuple[str, str]]

# CPU time of one rendering. Published templates need milliseconds; those that look at all messages from each need 3 ms
# per message for 2,000 messages.
_MAX_SECONDS, _MAX_SECONDS_PER_MESSAGE = 5.0, 0.01
# Characters and elements of a value, and of what operations make between two looks at the memory of the process; more
# for a larger conversation.
_BASE_BUDGET = 1 << 22
_BUDGET_PER_INPUT_CHARACTER = 1 << 6
# Bytes by which the process may grow in one rendering.
_MAX_MEMORY = 1 << 28
# An element is a pointer of eight bytes, and often an object of its own.
_ELEMENT_SIZE = 8
# Cost of an operation beside the characters it makes or reads, and costs between two looks at the clock.
_OPERATION_COST, _COST_PER_CLOCK_READ = 1 << 8, 1 << 15
# Below the modulus of Python's hashes, so that not all keys of a dict can be in one place.
_MAX_INTEGER_BITS = 60
_MAX_INDENT = 100
_METHOD_TYPES = (BuiltinMethodType, MethodType)
_SEQUENCES = (str, list, tuple)
_CONTAINERS = (list, tuple, dict)
_PLAIN_TYPES = (str, int, float, bool, type(None), dict)
_COLLECTIONS: tuple[type, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_DICT_ATTRIBUTES = frozenset(dir(dict))
# Methods and filters whose results may be of any size, or take too long, and that no published template uses.
_REFUSED_ATTRIBUTES = {"center", "encode", "expandtabs", "format", "format_map", "from_bytes", "ljust", "maketrans"}
_REFUSED_ATTRIBUTES |= {"rjust", "striptags", "to_bytes", "translate", "zfill"}
_REFUSED_FILTERS = {"batch", "center", "filesizeformat", "pprint", "slice", "striptags", "urlencode", "urlize"}
_REFUSED_FILTERS |= {"wordwrap", "xmlattr"}
# They look neither into elements nor compare them; all others may, and a list may hold one many times.
_SHALLOW_FILTERS = {"list", "length", "count", "first", "last", "map", "select", "selectattr", "reject", "rejectattr"}
_SHALLOW_FILTERS |= {"items", "reverse", "default", "d"}
_COMPARING_TESTS = {"in", "eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">="}
_COMPARING_TESTS |= {"lt", "<", "lessthan", "le", "<="}
# Names of filters that a template cannot write begin so.
_INTERNAL = " "
# Attributes that pass jinja2's checks. Templates look them up in every round, and the checks take microseconds.
_SAFE_ATTRIBUTES = frozenset(
    (kind, name)
    for kind, value in ((str, ""), (list, []), (dict, {}), (LoopContext, None))
    for name in {*dir(kind)} - _REFUSED_ATTRIBUTES
    if not (name.startswith("_") or modifies_known_mutable(value, name))
)
# A % format without a width that is a value, or above 999 characters.
_PERCENT_FORMAT = re.compile(r"(?:[^%]|%(?:\([^)]*\))?[-+ #0]*\d{0,3}(?:\.\d{0,3})?[a-zA-Z%])*")


class TemplateLimitError(Exception):
    """A template exceeds the limits of a rendering."""


@final
class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with limits; it runs one rendering at a time."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self, date: dt.date) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, jinja2.ext.loopcontrols],
            finalize=self._write,
            cache_size=0,
        )
        # Text written so far, and the start and text of each ``{% generation %}`` block.
        self.chunks: list[str] = []
        self.marks: list[tuple[int, str]] = []
        # Function that gives the marks around a round of a loop, and the marks to write after the rounds that began.
        self._mark_round: MarkRound | None = None
        self._round_ends: list[str] = []
        self.asked_for_date = False
        self._date = dt.datetime.combine(date, dt.time())
        self._conversation: tuple[Any, ...] = ()
        # Every count fails until a rendering begins: jinja would compute constants when it compiles.
        self._budget, self._is_budget_extended = -1, True
        self._made = self._first_memory = self._left = 0
        self._max_seconds = self._deadline = float("inf")
        tests: dict[str, Any] = self.tests
        tests.update({name: self._guard_test(tests[name]) for name in _COMPARING_TESTS})
        filters = FILTERS | {"join": self._join, "random": _refuse_chance, "tojson": self._to_json}
        self.filters = {name: self._guard(name, filters[name]) for name in filters.keys() - _REFUSED_FILTERS}
        self.filters |= {name: functools.partial(_refuse_filter, name) for name in _REFUSED_FILTERS} | {
            f"{_INTERNAL}add": self._add,
            f"{_INTERNAL}begin_round": self._begin_round,
            f"{_INTERNAL}compared": self._check_compared,
            f"{_INTERNAL}concatenate": self._concatenate,
            f"{_INTERNAL}copy": self._count_copy,
            f"{_INTERNAL}count": self.count,
            f"{_INTERNAL}end_round": self._end_round,
            f"{_INTERNAL}searched": self._check_searched,
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "lipsum": _refuse_chance,
            "namespace": _TemplateNamespace,
            "range": _make_range,
        }

    def open(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        arguments: Mapping[str, Any],
        mark_round: MarkRound | None,
    ) -> None:
        """Begin a rendering; larger inputs may make more."""
        self._conversation = (messages, tools, arguments)
        self._budget, self._is_budget_extended = _BASE_BUDGET, False
        self._made = self._first_memory = self._left = 0
        self._max_seconds = _MAX_SECONDS + _MAX_SECONDS_PER_MESSAGE * len(messages)
        self._deadline = time.thread_time() + self._max_seconds
        self.chunks, self.marks = [], []
        self._mark_round, self._round_ends = mark_round, []

    def count(self, size: int, read: int = 0) -> None:
        """Count characters or elements that an operation makes, and those that it reads.

        Raises:
            TemplateLimitError: the budget or the time of the rendering is spent.
        """
        self._left -= _OPERATION_COST + size + read
        if self._left < 0:
            self._settle(size)

    def _settle(self, size: int) -> None:
        """Check what was counted since the last time.

        Args:
            size: what the last operation makes.
        """
        self._check_size(size)
        self._made += _COST_PER_CLOCK_READ - self._left
        self._left = _COST_PER_CLOCK_READ
        if self._made > self._budget:
            self._check_memory()
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {self._max_seconds:.3g} seconds for one conversation")

    def _check_size(self, size: int) -> None:
        if size > self._budget and not self._is_budget_extended:
            self._budget += _BUDGET_PER_INPUT_CHARACTER * _measure_size(self._conversation, 1 << 40)
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

    def _check_places(self, value: Any) -> None:
        """Check the size of a value, in which each place of a shared one counts."""
        if isinstance(value, _CONTAINERS):
            size = _measure_size(value, self._budget)
            if size > self._budget:
                self._check_size(size)
                size = _measure_size(value, self._budget)
                self._check_size(size)
            self.count(0, size)

    def _measure_size(self, value: Any) -> int:
        return _measure_size(value, self._budget)

    def _add(self, value: Any) -> Any:
        """Count a value that an operation made."""
        if isinstance(value, str):
            self.count(len(value))
        elif isinstance(value, _CONTAINERS):
            self.count(_ELEMENT_SIZE * len(value))
            if isinstance(value, tuple):
                # A key of a dict is read to its leaves.
                self._check_places(value)
        elif isinstance(value, int):
            if value.bit_length() > _MAX_INTEGER_BITS:
                _refuse_bits(value.bit_length())
        elif isinstance(value, Generator):
            return self._count_items(value)
        return value

    def _count_items(self, items: Generator[Any, None, None]) -> Generator[Any, None, None]:
        for item in items:
            self.count(0 if isinstance(item, _PLAIN_TYPES) else _ELEMENT_SIZE * _ELEMENT_SIZE)
            yield item

    def _write(self, value: Any) -> str:
        """Count a value that is written."""
        if not isinstance(value, str):
            self._check_places(value)
            value = str(value)
        # As ``count``, whose call would take as long as the rest.
        self._left -= _OPERATION_COST + len(value)
        if self._left < 0:
            self._settle(len(value))
        return value  # type: ignore[no-any-return]

    def _check_compared(self, value: Any) -> Any:
        """Check a value that is compared with another, or searched."""
        if isinstance(value, str):
            self.count(0, len(value))
        else:
            self._check_places(value)
        return value

    def _check_searched(self, value: Any) -> Any:
        """Check a value that is searched for a constant: no element is looked into."""
        if isinstance(value, (str, list, tuple)):
            self.count(0, len(value))
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an item of a message or a safe attribute directly: the usual lookup."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in _SAFE_ATTRIBUTES:
            return getattr(obj, attribute)
        if kind is _TemplateNamespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Give no safe form of ``str.format``, which is refused."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method or function; the sandbox only hands out safe ones."""
        kind = type(function)
        name = function.__name__ if kind in _METHOD_TYPES else ""
        if name == "replace":
            self.count(_bound_replacement(function.__self__, *args, **kwargs))
        elif name == "join":
            args = ([*args[0]],)
            self._check_places(args[0])
            self.count(self._measure_size(args) + len(function.__self__) * len(args[0]))
        elif name in ("count", "index"):
            for value in (function.__self__, *args):
                self._check_compared(value)
        if kind is not BuiltinMethodType:
            if kind is not Macro or function.catch_varargs or function.catch_kwargs:
                # It may keep its arguments together as a value.
                self._add((*args, *kwargs.values()))
            return self._add(super().call(context, function, *args, **kwargs))
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        result = function(*args, **kwargs)
        return self._add(result)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the filter that another one names."""
        if name.startswith(_INTERNAL):
            raise SecurityError(f"there is no filter {name!r}")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002 - jinja2's form
        """Count what an operation makes, and compute it."""
        if operator == "+":
            # The sum is at most twice as large as what was counted before.
            result = left + right
            if type(result) is str:
                self.count(len(result))
                return result
            return self._add(result)
        if operator == "%" and isinstance(left, str):
            self.count(_bound_percent(left, right))
        elif operator == "*":
            for sequence, number in ((left, right), (right, left)):
                if isinstance(sequence, _SEQUENCES) and isinstance(number, int):
                    self.count(max(len(sequence) * number * (1 if isinstance(sequence, str) else _ELEMENT_SIZE), 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_bits(left.bit_length() * right)
        return self._add(self.binop_table[operator](left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _SandboxTransformer().visit(super()._parse(source, name, filename))
        return tree

    def _guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts what it makes."""
        bound, is_deep = _FILTER_BOUNDS.get(name), name not in _SHALLOW_FILTERS
        # jinja passes such a function its own context first.
        start = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if is_deep:
                for value in (*args[start:], *kwargs.values()):
                    self._check_compared(value)
            if bound is not None:
                self.count(bound(*args[start:], **kwargs))
            return self._add(function(*args, **kwargs))

        return guarded

    def _guard_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test that counts what it compares."""

        def guarded(left: Any, right: Any) -> Any:
            self._check_compared(left)
            self._check_compared(right)
            return function(left, right)

        return guarded

    @pass_eval_context
    def _concatenate(self, context: EvalContext, values: list[Any]) -> str:
        for value in values:
            self._check_places(value)
        self.count(sum(len(value) if isinstance(value, str) else self._measure_size(value) for value in values))
        return markup_join(values) if context.autoescape else str_join(values)

    @pass_eval_context
    def _join(self, context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        values = [*value]
        self._check_places(values)
        self.count(self._measure_size(values) + len(values) * self._measure_size(d))
        text: str = do_join(context, values, d, attribute)
        return text

    def _to_json(
        self,
        x: Any,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature is that of transformers
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        if isinstance(indent, int) and indent > _MAX_INDENT:
            raise TemplateLimitError(f"it indents JSON by more than {_MAX_INDENT:,} spaces")
        # JSON has no NaN, so that no parser would read such a call.
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, allow_nan=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None and separators is None:
            return encoder.encode(x)
        chunks = []
        for chunk in encoder.iterencode(x):
            self.count(len(chunk))
            chunks.append(chunk)
        return "".join(chunks)

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        return self._date.strftime(form[:256])

    def _count_copy(self, value: Any) -> Any:
        if isinstance(value, _SEQUENCES):
            self.count(len(value) * (1 if isinstance(value, str) else _ELEMENT_SIZE))
        return value

    def _begin_round(self, item: Any) -> str:
        """Return the mark before the round of a loop over ``item``."""
        if self._mark_round is None:
            return ""
        begin, end = self._mark_round(item)
        self._round_ends.append(end)
        return begin

    def _end_round(self, _: Any) -> str:
        """Return the mark after the round that began last.

        It ignores the item: the template may have given its name another value.
        """
        return self._round_ends.pop() if self._mark_round else ""


@final
class _TemplateNamespace(Namespace):
    """A ``namespace`` that is never written: its values may hold each other."""

    def __repr__(self) -> str:
        raise SecurityError("a namespace cannot be written as text")


def _measure_size(value: Any, enough: int) -> int:
    """Return the string characters plus elements of a value, up to ``enough``."""
    size, pending = 0, [value]
    while pending and size <= enough:
        item = pending.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, _COLLECTIONS):
            pending += item  # type: ignore[arg-type]
        elif isinstance(item, int):
            size += item.bit_length() >> 3
    return size


def _check_bits(*numbers: Any) -> None:
    for number in numbers:
        if isinstance(number, int):
            _refuse_bits(number.bit_length())


def _refuse_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it computes an integer of more than {_MAX_INTEGER_BITS} bits")


def _make_range(*bounds: Any) -> range:
    _check_bits(*bounds)
    return safe_range(*bounds)


def _bound_replacement(text: object, old: object, new: object, count: int | None = None) -> int:
    replaced = str(text).count(str(old))
    if count is not None and count >= 0:
        replaced = min(replaced, count)
    return len(str(text)) + replaced * len(str(new))


def _bound_indent(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> int:  # noqa: ARG001, FBT001, FBT002
    lines = str(text).splitlines()
    return len(str(text)) + (len(lines) + 1) * (width if isinstance(width, int) else len(width))


def _bound_list(value: object) -> int:
    """Return an upper bound of a list; characters become objects of many bytes."""
    return _ELEMENT_SIZE * len(value) if isinstance(value, str) else 0


def _bound_percent(text: object, *arguments: object, **named: object) -> int:
    """Return an upper bound of the characters that the filter ``format`` makes."""
    if not _PERCENT_FORMAT.fullmatch(str(text)):
        raise TemplateLimitError("it formats a value wider than 999 characters")
    widths = sum(map(int, re.findall(r"\d{1,3}", str(text))))
    return len(str(text)) + widths + str(text).count("%") * _measure_size((arguments, named), 1 << 40)


def _bound_rounding(_value: object, precision: int = 0, *_: object) -> int:
    _refuse_bits(3 * abs(precision))
    return 1


def _bound_sum(_value: object, _attribute: object = None, start: object = 0) -> int:
    if not isinstance(start, int | float):
        # Python copies the list in every step.
        raise TemplateLimitError("it sums what is no number")
    return 1


# Upper bounds of what filters make, by their arguments. All others make a small multiple of them.
_FILTER_BOUNDS: dict[str, Callable[..., int]] = {
    "format": _bound_percent,
    "indent": _bound_indent,
    "list": _bound_list,
    "replace": _bound_replacement,
    "round": _bound_rounding,
    "sum": _bound_sum,
}


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:500])


def _refuse_filter(name: str, *_: Any, **__: Any) -> NoReturn:
    raise SecurityError(f"the filter {name!r} is not supported: its result may be of any size")


def _refuse_chance(*_: Any, **__: Any) -> NoReturn:
    raise SecurityError("random and lipsum are not supported: a template must always give the same text")


@final
class GenerationExtension(jinja2.ext.Extension):
    """``{% generation %}`` blocks, whose text a model is trained to write."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> nodes.Node:
        """Parse a block as a call block that records its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        written: str = caller()
        sandbox = self.environment
        assert isinstance(sandbox, TemplateSandbox)  # noqa: S101 - this extension is loaded by it alone
        sandbox.marks.append((sum(map(len, sandbox.chunks)), written))
        return written


@final
class _SandboxTransformer(NodeTransformer):
    """Adds what the sandbox counts, and the marks of rounds, to a template."""

    def __init__(self) -> None:
        # Names of the loops around a node; None for one over several names.
        self._loops: list[nodes.Name | None] = []

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's form
        """Mark where the rounds of a loop begin and end."""
        # What follows the loop is outside of it.
        following, node.else_ = node.else_, []
        self._loops.append(node.target if isinstance(node.target, nodes.Name) else None)
        self.visit_Macro(node)
        item = self._loops.pop()
        node.else_ = [child for part in following for child in self.visit_list(part)]
        if item is not None:
            node.body = [_mark_round("begin_round", item), *node.body, _mark_round("end_round", item)]
        return node

    def visit_Continue(self, node: nodes.Stmt) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        if not self._loops:
            raise jinja2.TemplateSyntaxError(f"{type(node).__name__.lower()} is outside of a loop", node.lineno)
        item = self._loops[-1]
        return node if item is None else [_mark_round("end_round", item), node]

    visit_Break = visit_Continue  # noqa: N815

    def visit_Macro(self, node: Any) -> nodes.Node:  # noqa: N802
        """Count literals in every round of a loop and every call of a macro or block."""
        loops, self._loops = self._loops, self._loops if isinstance(node, nodes.For) else []
        self.generic_visit(node)
        self._loops = loops
        literals = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        counted = _apply_filter("count", nodes.Const(literals).set_lineno(node.lineno))
        node.body.insert(0, nodes.ExprStmt(counted).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _apply_filter("concatenate", nodes.List(node.nodes).set_lineno(node.lineno))  # type: ignore[no-any-return]

    def visit_List(self, node: Any) -> Any:  # noqa: N802
        """Count a list, tuple or dict that is no constant, and no target of an assignment."""
        self.generic_visit(node)
        try:
            node.as_const()
        except nodes.Impossible:
            return _apply_filter("add", node) if getattr(node, "ctx", "load") == "load" else node
        return node

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Check what is searched, and what is compared with a value that is no constant."""
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        is_constant = len(operands) == 2 and any(isinstance(operand, nodes.Const) for operand in operands)
        for operand in node.ops:
            if isinstance(operand.expr, nodes.Const):
                continue
            if not is_constant:
                operand.expr = _apply_filter("compared", operand.expr)
            elif operand.op in ("in", "notin"):
                operand.expr = _apply_filter("searched", operand.expr)
        if not is_constant:
            node.expr = _apply_filter("compared", node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Count a slice, which is a copy."""
        self.generic_visit(node)
        return _apply_filter("copy", node) if isinstance(node.arg, nodes.Slice) else node


def _mark_round(name: str, item: nodes.Name) -> nodes.Node:
    loaded = nodes.Name(item.name, "load").set_lineno(item.lineno)
    return nodes.Output([_apply_filter(name, loaded)]).set_lineno(item.lineno)


def _apply_filter(name: str, value: Any) -> Any:
    return nodes.Filter(value, f"{_INTERNAL}{name}", [], [], None, None).set_lineno(value.lineno)
