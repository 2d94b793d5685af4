"""Sandbox of chat templates: every operation is bounded before it runs.

A template comes with a tokenizer, so that it may be anybody's. It is rendered in this process:

- Attributes, methods and filters are those that have a cost in ``operation_costs``; all others are refused.
- An operation is counted before it runs if it may make much more than its inputs, or read them many times: repetitions,
  formats, replacements, joins, searches. All others make a small multiple of what was counted for their inputs.
- No value may be larger than the budget of ``RenderingMeter``. If all values together are, most of them are garbage, or
  the process has grown: then the template is stopped.
- A list may hold a value many times at no cost, until it is made into text, or compared. So its size, in which each
  place of a value counts, is measured before that.
- No tuple is a key: its hash would read all that is in it, however deep.

Everything else is as in transformers.
"""

import datetime as dt
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_join
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

from batchloom.chat.templates import operation_costs as costs
from batchloom.chat.templates.rendering_meter import (
    ELEMENT_SIZE,
    OPERATION_COST,
    RenderingMeter,
    TemplateLimitError,
)

# Function that gives the marks around a round of a loop, by its item.
MarkRound = Callable[[Any], tuple[str, str]]

_MAX_INDENT = 100
_METHOD_TYPES = (BuiltinMethodType, MethodType)
_SEQUENCES = (str, list, tuple)
_PLAIN_TYPES = (str, int, float, bool, type(None), dict)
_DICT_ATTRIBUTES = frozenset(dir(dict))
# Names of filters that a template cannot write begin so.
_INTERNAL = " "


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
        self._meter = RenderingMeter()
        tests: dict[str, Any] = self.tests
        tests.update({name: self._guard_test(name, tests[name]) for name in costs.DEEP_TESTS})
        filters = FILTERS | {"join": self._join, "tojson": self._to_json}
        self.filters = {name: functools.partial(_refuse_filter, name) for name in filters.keys() - costs.FILTERS.keys()}
        self.filters |= {name: self._guard(name, filters[name]) for name in costs.FILTERS} | {
            f"{_INTERNAL}begin_round": self._begin_round,
            f"{_INTERNAL}compared": self._check_compared,
            f"{_INTERNAL}concatenate": self._concatenate,
            f"{_INTERNAL}copy": self._count_copy,
            f"{_INTERNAL}count": self._meter.count,
            f"{_INTERNAL}end_round": self._end_round,
            f"{_INTERNAL}key": costs.refuse_tuple,
            f"{_INTERNAL}result": self._count_result,
            f"{_INTERNAL}searched": self._check_searched,
            f"{_INTERNAL}sought": self._check_sought,
        }
        self.globals |= {
            "dict": _make_dict,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "lipsum": _refuse_lipsum,
            "namespace": _make_namespace,
            "range": _make_range,
        }

    def open(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        arguments: Mapping[str, Any],
        mark_round: MarkRound | None,
    ) -> None:
        """Begin a rendering."""
        self._meter.begin(messages, tools, arguments)
        self.chunks = []
        self.marks = []
        self._mark_round = mark_round
        self._round_ends = []

    def _count_result(self, value: Any) -> Any:
        """Count a value that an operation made."""
        if isinstance(value, str):
            self._meter.count(len(value))
        elif isinstance(value, (list, dict)):
            self._meter.count(ELEMENT_SIZE * len(value))
        elif isinstance(value, tuple):
            self._meter.count(ELEMENT_SIZE * len(value))
            self._meter.count_reading(value)
        elif isinstance(value, int):
            if value.bit_length() > costs.MAX_INTEGER_BITS:
                costs.check_bits(value.bit_length())
        elif _is_lazy(value):
            return self._count_items(value)
        return value

    def _count_items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._meter.count(0 if isinstance(item, _PLAIN_TYPES) else ELEMENT_SIZE * ELEMENT_SIZE)
            yield item

    def _write(self, value: Any) -> str:
        """Count a value that is written."""
        if not isinstance(value, str):
            self._meter.count_reading(value)
            value = str(value)
        # As ``count``, whose call would take as long as the rest.
        meter = self._meter
        meter.left -= OPERATION_COST + len(value)
        if meter.left < 0:
            meter.check_limits(len(value))
        return value  # type: ignore[no-any-return]

    def _check_compared(self, value: Any) -> Any:
        """Check a value that is compared with another, or searched."""
        self._meter.count_reading(value)
        return value

    def _check_sought(self, value: Any) -> Any:
        """Check a value that is sought in another: as an element, a part or a key."""
        self._meter.count_reading(costs.refuse_tuple(value))
        return value

    def _check_searched(self, value: Any) -> Any:
        """Check a value that is searched for a constant: no element is looked into."""
        if isinstance(value, _SEQUENCES):
            self._meter.count(0, len(value))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item, else an attribute."""
        meter = self._meter
        meter.left -= OPERATION_COST
        if meter.left < 0:
            meter.check_limits(0)
        if type(argument) is str and type(obj) is dict and argument in obj:
            return obj[argument]
        return super().getitem(obj, costs.refuse_tuple(argument))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an item of a message or an attribute directly: the usual lookup."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if kind is _TemplateNamespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        if attribute in costs.ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _TemplateNamespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in costs.ATTRIBUTES.items())

    def wrap_str_format(self, value: Any) -> None:
        """Give no safe form of ``str.format``, which is refused."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method or function; the sandbox only hands out safe ones."""
        kind = type(function)
        if kind in _METHOD_TYPES:
            args = self._count_method(function.__self__, function.__name__, args, kwargs)
        if kind is not BuiltinMethodType:
            if kind is not Macro or function.catch_varargs or function.catch_kwargs:
                # It may keep its arguments together as a value.
                self._count_result((*args, *kwargs.values()))
            return self._count_result(super().call(context, function, *args, **kwargs))
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return self._count_result(function(*args, **kwargs))

    def _count_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Count a method before it is called; return its arguments."""
        if name == "join" and isinstance(owner, str):
            args = ([*args[0]],)
            self._meter.count(self._meter.count_reading(args[0]) + len(owner) * len(args[0]))
        elif isinstance(owner, str):
            named = {key: value for key, value in kwargs.items() if not key.startswith("_")}
            for value in args:
                if not isinstance(value, str):
                    self._meter.count_reading(value)
            self._meter.count(*costs.TEXT_METHODS[name](owner, *args, **named))
        elif isinstance(owner, (list, tuple)):
            for value in (owner, *args):
                self._meter.count_reading(value)
        elif isinstance(owner, dict) and args:
            costs.refuse_tuple(args[0])
        return args

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the filter that another one names."""
        if name.startswith(_INTERNAL):
            raise SecurityError(f"there is no filter {name!r}")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Count what an operation makes, and compute it."""
        if operator == "+":
            # The sum is at most twice as large as what was counted before.
            result = left + right
            if type(result) is str:
                self._meter.count(len(result))
                return result
            return self._count_result(result)
        if operator == "%" and isinstance(left, str):
            self._meter.count_reading(right)
            self._meter.count(*costs.FILTERS["format"](left, right))
        elif operator == "*":
            for sequence, number in ((left, right), (right, left)):
                if isinstance(sequence, _SEQUENCES) and isinstance(number, int):
                    element_size = 1 if isinstance(sequence, str) else ELEMENT_SIZE
                    self._meter.count(max(len(sequence) * number * element_size, 0))
        elif operator == "**":
            costs.check_power(left, right)
        return self._count_result(self.binop_table[operator](left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _SandboxTransformer().visit(super()._parse(source, name, filename))
        return tree

    def _guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts what it makes and reads."""
        cost = costs.FILTERS[name]
        is_deep = name not in costs.SHALLOW_FILTERS
        # jinja passes such a function its own context first.
        start = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if is_deep:
                args = tuple([[*value] if _is_lazy(value) else value for value in args])
                for value in (*args[start:], *kwargs.values()):
                    self._meter.count_reading(value)
            self._meter.count(*cost(*args[start:], **kwargs))
            return self._count_result(function(*args, **kwargs))

        return guarded

    def _guard_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test that counts what it compares."""

        def guarded(*values: Any) -> Any:
            if name == "in":
                costs.refuse_tuple(values[0])
            for value in values:
                self._meter.count_reading(value)
            return function(*values)

        return guarded

    @pass_eval_context
    def _concatenate(self, context: EvalContext, values: list[Any]) -> str:
        self._meter.count(sum(map(self._meter.count_reading, values)))
        return markup_join(values) if context.autoescape else str_join(values)

    @pass_eval_context
    def _join(self, context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        values = [*value]
        self._meter.count(self._meter.count_reading(values) + len(values) * len(str(d)))
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
            self._meter.count(len(chunk))
            chunks.append(chunk)
        return "".join(chunks)

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        return self._date.strftime(form[:256])

    def _count_copy(self, value: Any) -> Any:
        if isinstance(value, _SEQUENCES):
            self._meter.count(len(value) * (1 if isinstance(value, str) else ELEMENT_SIZE))
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


def _is_lazy(value: object) -> bool:
    # A cycler can be asked for its next value, and cannot be iterated over.
    return hasattr(type(value), "__next__") and hasattr(type(value), "__iter__")


def _make_dict(*items: Any, **named: Any) -> dict[Any, Any]:
    if items and not isinstance(items[0], Mapping):
        items = ([(costs.refuse_tuple(key), value) for key, value in items[0]], *items[1:])
    return dict(*items, **named)


def _make_namespace(*items: Any, **named: Any) -> _TemplateNamespace:
    return _TemplateNamespace(_make_dict(*items, **named))


def _make_range(*bounds: Any) -> range:
    for bound in bounds:
        if isinstance(bound, int):
            costs.check_bits(bound.bit_length())
    return safe_range(*bounds)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:500])


def _refuse_filter(name: str, *_: Any, **__: Any) -> NoReturn:
    raise SecurityError(f"the filter {name!r} is not supported: no chat template is known to need it")


def _refuse_lipsum(*_: Any, **__: Any) -> NoReturn:
    raise SecurityError("lipsum is not supported: a template must always give the same text")


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

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Mark where the rounds of a loop begin and end."""
        # What follows the loop is outside of it.
        following = node.else_
        node.else_ = []
        self._loops.append(node.target if isinstance(node.target, nodes.Name) else None)
        self.visit_Macro(node)
        item = self._loops.pop()
        node.else_ = [child for part in following for child in self.visit_list(part)]
        if item is not None:
            node.body = [_mark_round("begin_round", item), *node.body, _mark_round("end_round", item)]
        return node

    def visit_Continue(self, node: nodes.Stmt) -> nodes.Node | list[nodes.Node]:
        if not self._loops:
            raise jinja2.TemplateSyntaxError(f"{type(node).__name__.lower()} is outside of a loop", node.lineno)
        item = self._loops[-1]
        return node if item is None else [_mark_round("end_round", item), node]

    visit_Break = visit_Continue

    def visit_Macro(self, node: Any) -> nodes.Node:
        """Count literals in every round of a loop and every call of a macro or block."""
        loops = self._loops
        self._loops = self._loops if isinstance(node, nodes.For) else []
        self.generic_visit(node)
        self._loops = loops
        literals = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        counted = _apply_filter("count", nodes.Const(literals).set_lineno(node.lineno))
        node.body.insert(0, nodes.ExprStmt(counted).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _apply_filter("concatenate", nodes.List(node.nodes).set_lineno(node.lineno))  # type: ignore[no-any-return]

    def visit_List(self, node: Any) -> Any:
        """Count a list, tuple or dict that is no constant, and no target of an assignment."""
        self.generic_visit(node)
        for pair in node.items if isinstance(node, nodes.Dict) else ():
            if not isinstance(pair.key, nodes.Const):
                pair.key = _apply_filter("key", pair.key)
        try:
            node.as_const()
        except nodes.Impossible:
            return _apply_filter("result", node) if getattr(node, "ctx", "load") == "load" else node
        return node

    visit_Tuple = visit_Dict = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Check what is searched, and what is compared with a value that is no constant."""
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        is_constant = len(operands) == 2 and any(isinstance(operand, nodes.Const) for operand in operands)
        is_search = any(operand.op in ("in", "notin") for operand in node.ops)
        for operand in node.ops:
            if isinstance(operand.expr, nodes.Const):
                continue
            if not is_constant:
                operand.expr = _apply_filter("sought" if len(operands) > 2 else "compared", operand.expr)
            elif is_search:
                operand.expr = _apply_filter("searched", operand.expr)
        if not (is_constant or isinstance(node.expr, nodes.Const)):
            node.expr = _apply_filter("sought" if is_search else "compared", node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Count a slice, which is a copy."""
        self.generic_visit(node)
        return _apply_filter("copy", node) if isinstance(node.arg, nodes.Slice) else node


def _mark_round(name: str, item: nodes.Name) -> nodes.Node:
    loaded = nodes.Name(item.name, "load").set_lineno(item.lineno)
    return nodes.Output([_apply_filter(name, loaded)]).set_lineno(item.lineno)


def _apply_filter(name: str, value: Any) -> Any:
    return nodes.Filter(value, f"{_INTERNAL}{name}", [], [], None, None).set_lineno(value.lineno)
