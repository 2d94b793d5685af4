"""The sandbox chat templates run in: set up as transformers does, and bounded."""

import datetime as dt
import json
from typing import Any, ClassVar, NoReturn, final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from batchloom.chat.bounds import (
    GROWING,
    Bounds,
    bounded_filters,
    bounded_method,
    narrow,
    refuse_random,
)

_DICT_ATTRIBUTES = frozenset(dir(dict))
# What the sandbox lets through after a long look, and templates ask for all the time.
_SAFE = frozenset(
    (kind, name)
    for kind in (str, LoopContext)
    for name in dir(kind)
    if not name.startswith("_") and name not in GROWING
)
_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


@final
class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with an account of what a rendering uses.

    One rendering at a time: the account and the generation marks belong to it.

    Attributes:
        bounds: what a rendering may use up.
        pieces: what the rendering has written so far.
        marks: where ``{% generation %}`` blocks stood: start in the text, and what they hold.
        asked_for_date: whether ``strftime_now`` was called.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, date: dt.date) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
            cache_size=0,
        )
        self.bounds = Bounds()
        self.pieces: list[str] = []
        self.marks: list[tuple[int, str]] = []
        self.asked_for_date = False
        self._date = dt.datetime.combine(date, dt.time())
        self.filters |= {**bounded_filters(self.bounds), "tojson": _tojson, "random": refuse_random}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "dict": _Dict(),
            "namespace": self._namespace_type(),
            "lipsum": refuse_random,
        }

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        return self._date.strftime(form[:256])

    def _namespace_type(self) -> type[Namespace]:
        sized = self.bounds.sized

        class BoundedNamespace(Namespace):
            def __setitem__(self, name: str, value: Any) -> None:
                if name.startswith("_"):
                    raise jinja2.exceptions.SecurityError(
                        f"{name!r} is no name for an attribute of a namespace"
                    )
                super().__setitem__(name, sized(value))

        return BoundedNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Accounts().visit(super()._parse(source, name, filename))
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, else an item; most are items of a message and found without detour."""
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if (kind, attribute) in _SAFE:
            return getattr(obj, attribute)
        if attribute in GROWING and isinstance(obj, str):
            method = bounded_method(self.bounds, obj, attribute)
            if method is not None:
                return method
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, else an attribute."""
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(obj, str) and argument in GROWING:
                return self.getattr(obj, argument)
            return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``*``, ``**`` and ``%``, refused where the result would be out of proportion."""
        self.bounds.binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


@final
class _Dict:
    """``dict`` without the attributes of a type."""

    __slots__ = ()
    __call__: ClassVar[Any] = staticmethod(dict)
    fromkeys = staticmethod(dict.fromkeys)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:500])


def _tojson(
    x: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the names transformers gives them
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        x,
        ensure_ascii=ensure_ascii,
        indent=narrow(indent),
        separators=separators,
        sort_keys=sort_keys,
    )


@final
class Generation(jinja2.ext.Extension):
    """``{% generation %}``: what is inside is what a model is trained to write."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> nodes.Node:
        """A call block around what is inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        written: str = caller()
        sandbox = self.environment
        assert isinstance(sandbox, Sandbox)  # noqa: S101 - this extension is loaded by it alone
        sandbox.marks.append((sum(map(len, sandbox.pieces)), written))
        return written


@final
class _Accounts(NodeTransformer):
    """Puts the accounts of loops, kept values and buffers into a template."""

    def __init__(self) -> None:
        self._buffers = 0

    def generic_visit(self, node: nodes.Node, *args: Any) -> nodes.Node:
        """Visit what is inside first, and know whether that is written into a buffer."""
        buffered = isinstance(node, _BUFFERED)
        self._buffers += buffered
        super().generic_visit(node, *args)
        self._buffers -= buffered
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        """Its call stays a call; what comes back of it was paid for when it was written."""
        call = node.call
        self.generic_visit(call)
        node.call = nodes.Call(call.node, [], [], None, None)
        self.generic_visit(node)
        node.call = call
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's form
        """A loop pays for its rounds, each as dear as the text that stands in it."""
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        weight = nodes.Const(1 + text // 16)
        node.iter = _through("_charged", node.iter, weight)
        if node.recursive:  # loop(...) goes through what it is given without passing here
            round_ = _through("_called", nodes.Const(0))
            node.body.insert(0, nodes.ExprStmt(round_).set_lineno(node.lineno))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        """What is kept is measured, so that nothing can double in every round."""
        self.generic_visit(node)
        node.node = _through("_sized", node.node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        """What a macro is given and what it gives back is measured."""
        self.generic_visit(node)
        node.args = [_through("_sized", value) for value in node.args]
        for keyword in node.kwargs:
            keyword.value = _through("_sized", keyword.value)
        called: nodes.Node = _through("_called", node)
        return called

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        """What goes into a buffer is paid for; what goes out is seen by who renders."""
        self.generic_visit(node)
        if self._buffers:
            node.nodes = [
                part if isinstance(part, nodes.TemplateData) else _through("_emitted", part)
                for part in node.nodes
            ]  # literal text was weighed with the loop it stands in
        return node


def _through(name: str, value: Any, *args: nodes.Expr) -> Any:
    """``value`` passed through one of our filters."""
    filtered = nodes.Filter(value, name, list(args), [], None, None)
    return filtered.set_lineno(value.lineno)
