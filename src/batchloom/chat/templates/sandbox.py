"""The sandbox chat templates run in: set up as transformers does, and bounded."""

import datetime as dt
from types import BuiltinMethodType
from typing import Any, NoReturn, final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from batchloom.chat.templates.rendering_limits import BoundsError, RenderBudget
from batchloom.chat.templates.sandbox_operations import (
    GROWING_METHODS,
    SAFE_METHODS,
    make_bounded_filters,
    make_bounded_method,
    make_bounded_tests,
    refuse_operation,
)

_DICT_ATTRIBUTES = frozenset(dir(dict))
# What the sandbox lets through after a long look, and templates ask for all the time.
_SAFE_METHODS = frozenset(
    (kind, name)
    for kind in (str, list, dict, LoopContext)
    for name in SAFE_METHODS.get(kind, dir(kind))
    if not name.startswith("_") and name not in GROWING_METHODS
)
_NO_METHODS: frozenset[str] = frozenset()
_BUFFERED_NODES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
# More keys of a dict that are no strings may all have one hash.
_MAX_KEYS = 64
# Operands of a chain of + that is written at once.
_MAX_PARTS = 16


@final
class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with an account of what a rendering uses.

    One rendering at a time: the account and the generation marks belong to it.

    Attributes:
        bounds: what a rendering may use up.
        chunks: what the rendering has written so far.
        marks: where ``{% generation %}`` blocks stood: start in the text, and what they hold.
        asked_for_date: whether ``strftime_now`` was called.
    """

    intercepted_binops = frozenset(("*", "**", "%", "-"))

    def __init__(self, date: dt.date) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, jinja2.ext.loopcontrols],
            cache_size=0,
        )
        self.bounds = RenderBudget()
        self.chunks: list[str] = []
        self.marks: list[tuple[int, str]] = []
        self.asked_for_date = False
        self._date = dt.datetime.combine(date, dt.time())
        self.filters = make_bounded_filters(self.bounds)
        self.tests |= make_bounded_tests(self.bounds)
        self._namespace = self._namespace_type()
        self._make_dict = _SafeDict(self.bounds)
        # All objects with attributes that a template can get hold of, besides the values that it is given.
        self._open = (
            *(self._namespace, LoopContext, Macro, Cycler, Joiner),
            *(TemplateReference, BlockReference, Undefined, _SafeDict),
        )
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "dict": self._make_dict,
            "namespace": self._namespace,
            "lipsum": refuse_operation,
        }

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        return self._date.strftime(form[:256])

    def _namespace_type(self) -> type[Namespace]:
        name_value = self.bounds.name

        class BoundedNamespace(Namespace):
            def __setitem__(self, name: str, value: Any) -> None:
                if name.startswith("_"):
                    raise jinja2.exceptions.SecurityError(f"{name!r} is no name for an attribute of a namespace")
                super().__setitem__(name, name_value(value))

        return BoundedNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _BudgetTransformer().visit(super()._parse(source, name, filename))
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, else an item; most are items of a message and found without detour."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in _SAFE_METHODS:
            return getattr(obj, attribute)
        if kind is self._namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        methods = SAFE_METHODS.get(str if kind is Markup else kind, _NO_METHODS)
        if attribute not in methods and not isinstance(obj, self._open) and hasattr(obj, attribute):
            return self.unsafe_undefined(obj, attribute)
        value = super().getattr(obj, attribute)
        if attribute in GROWING_METHODS and isinstance(obj, str):
            return make_bounded_method(self.bounds, obj, attribute, value)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, else an attribute."""
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str):
                return self.getattr(obj, argument)
            return self.undefined(obj=obj, name=argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What a call gives back; paid for, with what it is given."""
        if type(function) is not BuiltinMethodType:
            return self._call_other(context, function, args, kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if kwargs:
            self.bounds.charge_method(function.__self__, function.__name__, (*args, kwargs))
            return function(*args, **kwargs)
        self.bounds.charge_method(function.__self__, function.__name__, args)
        return function(*args)

    def _call_other(self, context: Context, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name_value = self.bounds.name
        for value in args:
            name_value(value)
        for name, value in kwargs.items():
            if name not in ("_loop_vars", "_block_vars"):
                name_value(value)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, Markup):
            self.bounds.charge_method(owner, function.__name__, args)
        if function is self._namespace:
            args = (self._make_dict(*args),) if args else ()
            return super().call(context, function, *args, **kwargs)
        return name_value(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation, refused where the result would be out of proportion."""
        if type(left) is type(right) is int:
            if operator == "-":
                return left - right
            if operator == "%":
                return left % right
        self.bounds.binop(operator, left, right)
        return self.bounds.keep(super().call_binop(context, operator, left, right))


@final
class _SafeDict:
    """``dict`` without the attributes of a type."""

    def __init__(self, bounds: RenderBudget) -> None:
        self._bounds = bounds

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        pairs = [dict(source) if isinstance(source, dict) else self._pairs(source) for source in args]
        return dict(*pairs, **kwargs)

    def _pairs(self, items: Any) -> list[tuple[Any, Any]]:
        pairs = [(key, value) for key, value in items]
        self._bounds.charge_keys(key for key, _ in pairs)
        return pairs

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """``dict.fromkeys``."""
        return dict.fromkeys(self._bounds.charge_keys(keys), value)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:500])


@final
class GenerationExtension(jinja2.ext.Extension):
    """``{% generation %}``: what is inside is what a model is trained to write."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> nodes.Node:
        """A call block around what is inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        block_text: str = caller()
        sandbox = self.environment
        assert isinstance(sandbox, TemplateSandbox)  # noqa: S101 - this extension is loaded by it alone
        sandbox.marks.append((sum(map(len, sandbox.chunks)), block_text))
        return block_text


@final
class _BudgetTransformer(NodeTransformer):
    """Puts the accounts of loops, operators, named values and buffers into a template."""

    def __init__(self) -> None:
        self._buffers = 0
        self._output_node: nodes.Node | None = None

    def generic_visit(self, node: nodes.Node, *args: Any) -> nodes.Node:
        """Visit what is inside first, and know whether that is written into a buffer."""
        buffered = isinstance(node, _BUFFERED_NODES)
        self._buffers += buffered
        super().generic_visit(node, *args)
        self._buffers -= buffered
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's form
        """A loop pays for its rounds on entry."""
        weight = _estimate_steps(node)
        self.generic_visit(node)
        node.iter = _apply_filter("_charge_items", node.iter, nodes.Const(weight))
        if node.recursive:  # loop(...) goes through what it is given without passing here
            _charge_on_entry(node, weight)
        return node

    def visit_Macro(self, node: Any) -> nodes.Node:  # noqa: N802
        """What can be called again and again pays whenever it is."""
        weight = _estimate_steps(node)
        self.generic_visit(node)
        _charge_on_entry(node, weight)
        return node  # type: ignore[no-any-return]

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        """What is kept is measured, so that nothing can double in every round."""
        self.generic_visit(node)
        node.node = _apply_filter("_name", node.node)
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:  # noqa: N802
        """The same."""
        self.generic_visit(node)
        node.values = [_apply_filter("_name", value) for value in node.values]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        """A chain of + is one operation; what stands in the template alone is added when it is compiled."""
        is_output = node is self._output_node
        parts, spine = _flatten_addition(node)
        if all(isinstance(part, nodes.Const) for part in parts):
            return node
        if is_output and len(parts) <= _MAX_PARTS:
            # It takes as long as the text that is written, whose length is limited.
            for operation in spine:
                operation.right = self.visit(operation.right)
            spine[-1].left = self.visit(spine[-1].left)
            return node
        first, *other_parts = [self.visit(part) for part in parts]
        addition: nodes.Node = _apply_filter("_add" if len(other_parts) == 1 else "_add_all", first, *other_parts)
        return addition

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The same with ~."""
        self.generic_visit(node)
        first, *other_nodes = node.nodes
        concatenation: nodes.Node = _apply_filter("_concat", first, *other_nodes)
        return concatenation

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Comparisons are paid for, but those with what stands in the template itself."""
        self.generic_visit(node)
        left, free = node.expr, True
        for operand in node.ops:
            free &= _is_bounded_comparison(left, operand)
            left = operand.expr
        if free:
            return node
        if len(node.ops) == 1 and node.ops[0].op == "in":
            contains: nodes.Node = _apply_filter("_contains", node.expr, node.ops[0].expr)
            return contains
        arguments = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        comparison: nodes.Node = _apply_filter("_compare", node.expr, *arguments)
        return comparison

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """A slice is a copy, and a key may be long."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            filter_node: nodes.Node = _apply_filter("_keep", node)
            return filter_node
        if not isinstance(node.arg, (nodes.Const, nodes.Sub)):  # no tuple is the result of -
            node.arg = _apply_filter("_key", node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """Keys are strings, most of them."""
        keys = [pair.key for pair in node.items]
        texts = (isinstance(key, nodes.Const) and isinstance(key.value, str) for key in keys)
        if len(keys) - sum(texts) > _MAX_KEYS:
            raise BoundsError(f"it has a dict of more than {_MAX_KEYS} keys that are no strings")
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        """What goes into a buffer is paid for; what goes out is seen by who renders."""
        for at, part in enumerate(node.nodes):
            self._output_node = part
            node.nodes[at] = self.visit(part)
        if self._buffers:
            node.nodes = [
                part if isinstance(part, nodes.TemplateData) else _apply_filter("_emit", part) for part in node.nodes
            ]  # literal text was weighed with the loop it stands in
        return node


def _flatten_addition(node: nodes.Add) -> tuple[list[nodes.Expr], list[nodes.Add]]:
    """The operands of a chain of + from left to right, and its operations from right to left."""
    parts: list[nodes.Expr] = []
    spine: list[nodes.Add] = []
    operand: nodes.Expr = node
    while isinstance(operand, nodes.Add):
        spine.append(operand)
        parts.append(operand.right)
        operand = operand.left
    parts.append(operand)
    return parts[::-1], spine


def _estimate_steps(node: nodes.Node) -> int:
    """Steps that a body takes at most: of its parts, and of the text that stands in it."""
    parts = text = 0
    for child in node.find_all(nodes.Node):
        parts += 1
        if isinstance(child, nodes.TemplateData):
            text += len(child.data)
    return 1 + parts // 4 + text // 16


def _charge_on_entry(node: Any, weight: int) -> None:
    paid = _apply_filter("_step", nodes.Const(weight).set_lineno(node.lineno))
    node.body.insert(0, nodes.ExprStmt(paid).set_lineno(node.lineno))


def _is_bounded_comparison(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether one side bounds the work of a comparison, as it stands in the template."""
    if operand.op in ("in", "notin"):
        return _is_literal(operand.expr)
    return _is_literal(left) or _is_literal(operand.expr)


def _is_literal(node: nodes.Expr) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _apply_filter(name: str, value: Any, *args: nodes.Expr) -> Any:
    """``value`` passed through one of our filters."""
    filtered = nodes.Filter(value, name, list(args), [], None, None)
    return filtered.set_lineno(value.lineno)
