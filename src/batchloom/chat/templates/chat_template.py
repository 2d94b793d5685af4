"""Chat templates: choice, compilation in a sandbox, and rendering to text.

The sandbox is set up as in transformers, and limits time and output.
"""

import copy
import datetime as dt
import functools
import json
import os
import re
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import BuiltinMethodType, CodeType
from typing import Any, NamedTuple, NoReturn, final

import jinja2
import jinja2.ext
import jinja2.meta
import orjson
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from batchloom.chat.templates.template_arguments import TemplateArguments
from batchloom.core.errors import InputMissingError, TemplateError
from batchloom.core.files import describe_os_error, read_regular_file, refuse_url
from batchloom.core.settings import suggest

# Built-in templates and the control tokens that each writes.
BUILT_IN_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "alpaca": (),
    "plain": (),
}
# Name that joins the texts of a prompt and its completion without a template, for base models.
NO_TEMPLATE = "none"
# Names of the reasoning of a message, and the tags of reasoning in a content.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
THOUGHT_TAGS = "<think>", "</think>"
# What follows a thought: line ends, or spaces in the same line; the first line of an answer keeps its indentation.
_GAP = r"(?:(?:[^\S\n]*\n)+|[^\S\n]*)"
# A thought at the beginning of a content. A prompt may have written its first tag; then the second one ends a line, as
# an answer may mention it.
_THOUGHT = re.compile(rf"\s*<think>.*?</think>{_GAP}|(?:(?!<think>).)*?</think>(?=[^\S\n]*(?:\n|\Z)){_GAP}", re.DOTALL)
Messages = list[dict[str, Any]]
# Names that are never files.
TEMPLATE_NAMES = (*BUILT_IN_TEMPLATES, NO_TEMPLATE)
_MAX_TEMPLATE_BYTES = 1 << 20
# CPU time of one rendering. Published templates need milliseconds.
_MAX_SECONDS = 5.0
# Characters one rendering may write, and one named value may hold; more for a larger conversation.
_BASE_CHARACTERS = 1 << 20
_OUTPUT_PER_INPUT_CHARACTER = 32
_MAX_EXPONENT = 1 << 12
_MAX_INDENT = 100
_TICKS_PER_CLOCK_READ = 8
_DICT_ATTRIBUTES = frozenset(dir(dict))
_BUFFERED_NODES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
_SCALAR_TYPES = (bool, int, float, type(None))
# jinja2 replaces these methods by ones that respect the sandbox.
_FORMAT_METHODS = ("format", "format_map")
# Attributes that pass jinja2's checks. Templates look them up in every round, and the checks take microseconds.
_SAFE_ATTRIBUTES = frozenset(
    (kind, name)
    for kind, value in ((str, ""), (list, []), (dict, {}), (LoopContext, None))
    for name in dir(kind)
    if not (name.startswith("_") or name in _FORMAT_METHODS or modifies_known_mutable(value, name))
)
# Default date of `strftime_now`, fixed so that a store does not depend on the day it is prepared.
# Llama 3's own template falls back to the same day.
DEFAULT_DATE = dt.date(2024, 7, 26)

# Function that gives the marks around a round of a loop, by its item.
MarkRound = Callable[[Any], tuple[str, str]]

_MAX_SOURCE_SIZE = 1 << 16
# Errors that template code may raise; any other is a bug of batchloom.
_UNDEFINED_TOKEN = re.compile(r"'(\w+_token)' is undefined")
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """A chosen template, not yet compiled."""

    # A built-in name, "own" for the tokenizer's, else the name of the file.
    name: str
    text: str
    # Text for conversations with tools; None if it is the same.
    tools_text: str | None = None
    # Note on the choice for the user.
    note: str = ""
    # Whether messages that are only a role and a text that is not blank are written in one way: the text unchanged or
    # stripped, between texts that depend on the roles alone. Known of the built-in templates.
    inserts_contents: bool = False


def choose_template(
    spec: str | None, own: Mapping[str, str], control: Mapping[str, int], tokenizer: str
) -> ChosenTemplate:
    """Return the template that ``spec`` selects for a tokenizer.

    Args:
        spec: ``chatml``, ``llama3``, ``alpaca`` or ``plain``; ``none`` to join texts; the name of one of the
            tokenizer's own templates; the path of a file; None for the tokenizer's own, else ``plain``.
        own: the tokenizer's own templates by name, usually one called ``default``.
        control: control tokens of the tokenizer.
        tokenizer: name of the tokenizer for error messages.

    Raises:
        TemplateError: no such template, or one whose control tokens the tokenizer lacks.
        InputMissingError: no such file.
    """
    if spec is None:
        return _choose_own_template(own, tokenizer)
    if spec == NO_TEMPLATE:
        return ChosenTemplate(NO_TEMPLATE, "")
    if spec in BUILT_IN_TEMPLATES:
        missing = [token for token in BUILT_IN_TEMPLATES[spec] if token not in control]
        if missing:
            raise TemplateError(
                f"template {spec} writes {', '.join(missing)}, which tokenizer {tokenizer!r} does not have as "
                "control tokens: use plain or alpaca, which need none, or a tokenizer that has them"
            )
        return ChosenTemplate(spec, read_built_in(spec), inserts_contents=True)
    if spec in own:
        return ChosenTemplate(spec, own[spec])
    refuse_url(spec, "The template")
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    template_names = [*TEMPLATE_NAMES, *own]
    if not path.suffix and path.name == spec and not os.path.exists(path):  # noqa: PTH110 - Path.exists may raise
        raise TemplateError(
            f"there is no template {spec!r}{suggest(spec, template_names)}; choose {', '.join(template_names)}, or "
            "give the path of a .jinja file"
        )
    return ChosenTemplate(path.name, _read_template_file(path))


def read_built_in(name: str) -> str:
    return (files("batchloom.chat") / "templates" / f"{name}.jinja").read_text("utf-8").strip()


def _choose_own_template(own: Mapping[str, str], tokenizer: str) -> ChosenTemplate:
    if not own:
        note = f"tokenizer {tokenizer!r} has no chat template: plain is used, which needs no control tokens"
        return ChosenTemplate("plain", read_built_in("plain"), note=note, inserts_contents=True)
    if "default" in own:
        return ChosenTemplate("own", own["default"], own.get("tool_use"))
    if len(own) == 1:
        return ChosenTemplate("own", next(iter(own.values())))
    raise TemplateError(
        f"tokenizer {tokenizer!r} has the chat templates {', '.join(sorted(own))} but none called default: name one "
        "of them"
    )


def _read_template_file(path: Path) -> str:
    try:
        text = read_regular_file(path, _MAX_TEMPLATE_BYTES).decode()
        if path.suffix == ".json":
            text = orjson.loads(text)["chat_template"]
    except FileNotFoundError as error:
        raise InputMissingError(
            f"there is no template file {path}; give {', '.join(TEMPLATE_NAMES)}, or the path of a .jinja file"
        ) from error
    except OSError as error:
        raise TemplateError(f"template {path} cannot be read: {describe_os_error(error)}") from error
    except UnicodeDecodeError as error:
        raise TemplateError(f"template {path} is not UTF-8: {error}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise TemplateError(
            f"{path} is not a chat template: a .json file must be an object with chat_template"
        ) from error
    if not isinstance(text, str):
        raise TemplateError(f"{path}: chat_template is not a string")
    return text


class TemplateLimitError(Exception):
    """A template exceeds the limits of a rendering."""


@final
class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with limits; it runs one rendering at a time."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, date: dt.date) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, jinja2.ext.loopcontrols],
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
        # Every check fails until a rendering begins: jinja2 would run them once, as constants, at compile time.
        self._limit, self._is_limit_extended = -1, True
        self._written = self._ticks = 0
        self._deadline = float("inf")
        self.filters |= {
            "tojson": _to_json,
            "random": _refuse_chance,
            "_limit": self._check_value,
            "_write": self._write,
            "_tick": self._tick,
            "_begin_round": self._begin_round,
            "_end_round": self._end_round,
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "lipsum": _refuse_chance,
        }

    def open(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        arguments: TemplateArguments,
        mark_round: MarkRound | None,
    ) -> None:
        """Begin a rendering; larger inputs may write more."""
        self._conversation = (messages, tools, arguments)
        self._limit, self._is_limit_extended = _BASE_CHARACTERS, False
        self._written = self._ticks = 0
        self._deadline = time.thread_time() + _MAX_SECONDS
        self.chunks, self.marks = [], []
        self._mark_round, self._round_ends = mark_round, []

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an item of a message or a safe attribute directly: the usual lookup."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in _SAFE_ATTRIBUTES:
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a built-in method directly: the sandbox only hands out safe ones."""
        if type(function) is BuiltinMethodType and function.__name__ not in _FORMAT_METHODS:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse powers and repetitions that jinja2 would compute in one long step."""
        if operator == "**" and isinstance(right, int | float) and abs(right) > _MAX_EXPONENT:
            raise TemplateLimitError(f"it computes a power with an exponent above {_MAX_EXPONENT:,}")
        for sequence, count in ((left, right), (right, left)):
            if operator == "*" and hasattr(sequence, "__len__") and isinstance(count, int):
                self._check_size(len(sequence) * count)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _LimitTransformer().visit(super()._parse(source, name, filename))
        return tree

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        return self._date.strftime(form[:256])

    def _tick(self, characters: int) -> str:
        """Count literal characters of a loop body or macro, and check the time limit."""
        self._ticks += 1
        if not self._ticks % _TICKS_PER_CLOCK_READ and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {_MAX_SECONDS:g} seconds for one conversation")
        self.count(characters)
        return ""

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

    def _write(self, value: Any) -> Any:
        """Count the characters of a value that is written."""
        if not isinstance(value, str):
            self._check_value(value)
            value = str(value)
        self.count(len(value))
        return value

    def count(self, characters: int) -> None:
        """Count characters that are written, up to the limit of the conversation."""
        self._written += characters
        if self._written > self._limit:
            self._check_size(self._written)

    def _check_value(self, value: Any) -> Any:
        """Refuse a value that is too large: it could double in every round of a loop."""
        kind = type(value)
        if kind is str:
            self._check_size(len(value))
        elif kind not in _SCALAR_TYPES:
            self._check_size(_measure_size(value, self._limit))
        return value

    def _check_size(self, size: int) -> None:
        if size > self._limit and not self._is_limit_extended:
            self._limit += _OUTPUT_PER_INPUT_CHARACTER * _measure_size(self._conversation, 1 << 40)
            self._is_limit_extended = True
        if size > self._limit:
            raise TemplateLimitError(f"it makes more than {self._limit:,} characters for one conversation")


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
        elif isinstance(item, (list, tuple, set, KeysView, ValuesView, ItemsView)):
            pending += item
        elif isinstance(item, Namespace):
            pending.append(item._Namespace__attrs)  # noqa: SLF001 - its values have no other name
    return size


def _to_json(
    x: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature is that of transformers
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    if indent is not None and indent > _MAX_INDENT:
        raise TemplateLimitError(f"it indents JSON by more than {_MAX_INDENT:,} spaces")
    # JSON has no NaN, so that no parser would read such a call.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, allow_nan=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:500])


def _refuse_chance(*_: Any, **__: Any) -> Any:
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
class _LimitTransformer(NodeTransformer):
    """Adds the sandbox's checks to loops, macros, assignments and buffered output."""

    def __init__(self) -> None:
        self._buffers = 0
        # Names of the loops around a node; None for one over several names.
        self._loops: list[nodes.Name | None] = []

    def generic_visit(self, node: nodes.Node, *args: Any) -> nodes.Node:
        """Visit the children of a node, and track whether their output is buffered."""
        is_buffer = isinstance(node, _BUFFERED_NODES)
        self._buffers += is_buffer
        super().generic_visit(node, *args)
        self._buffers -= is_buffer
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's form
        """Mark where the rounds of a loop begin and end."""
        self._loops.append(node.target if isinstance(node.target, nodes.Name) else None)
        self.visit_Macro(node)
        item = self._loops.pop()
        if item is not None:
            node.body = [_mark_round("_begin_round", item), *node.body, _mark_round("_end_round", item)]
        return node

    def visit_Continue(self, node: nodes.Stmt) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        if not self._loops:
            raise jinja2.TemplateSyntaxError(f"{type(node).__name__.lower()} is outside of a loop", node.lineno)
        item = self._loops[-1]
        return node if item is None else [_mark_round("_end_round", item), node]

    visit_Break = visit_Continue  # noqa: N815

    def visit_Macro(self, node: Any) -> nodes.Node:  # noqa: N802
        """Tick in every round of a loop and every call of a macro or block."""
        loops, self._loops = self._loops, self._loops if isinstance(node, nodes.For) else []
        self.generic_visit(node)
        self._loops = loops
        literals = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        tick = _apply_filter("_tick", nodes.Const(literals).set_lineno(node.lineno))
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        """Count text that goes into a buffer; :meth:`ChatTemplate.render` counts the rest."""
        self.generic_visit(node)
        if not self._buffers:
            return node
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _apply_filter("_write", part) for part in node.nodes
        ]
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.node = _apply_filter("_limit", node.node)
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.values = [_apply_filter("_limit", value) for value in node.values]
        return node


def _mark_round(name: str, item: nodes.Name) -> nodes.Node:
    loaded = nodes.Name(item.name, "load").set_lineno(item.lineno)
    return nodes.Output([_apply_filter(name, loaded)]).set_lineno(item.lineno)


def _apply_filter(name: str, value: Any) -> Any:
    return nodes.Filter(value, name, [], [], None, None).set_lineno(value.lineno)


class RenderError(Exception):
    """A template rejects a conversation; the message says why."""


class TemplateOutput(NamedTuple):
    """Text that a template wrote, and its ``{% generation %}`` blocks."""

    text: str
    # (start, stop) of each block, in characters; None if the template has none.
    generation: tuple[tuple[int, int], ...] | None


class _CompiledTemplate(NamedTuple):
    code: CodeType
    marks_generation: bool
    variables: frozenset[str]
    has_fixed_prompt: bool


# A command compiles the same template for its notes, its checks and its work, 20 ms each.
@functools.lru_cache(maxsize=64)
def _compile(text: str) -> _CompiledTemplate:
    sandbox = TemplateSandbox(DEFAULT_DATE)
    tree = sandbox.parse(text)
    code = sandbox.compile(tree)
    marks_generation = any(call.name == "_marked" for call in tree.find_all(nodes.ExtensionAttribute))
    variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
    return _CompiledTemplate(code, marks_generation, variables, _has_fixed_prompt(tree, variables))


_PROMPT = "add_generation_prompt"


def _has_fixed_prompt(tree: nodes.Template, variables: frozenset[str]) -> bool:
    """Return whether the generation prompt is the same after all messages.

    That is if what decides on it, and what it writes, are arguments of the template alone.
    """
    fixed = (variables | {"loop"}) - {"messages", "tools"}

    def list_names(node: nodes.Node) -> set[str]:
        names = {name.name for name in node.find_all(nodes.Name)}
        return names | {node.name} if isinstance(node, nodes.Name) else names

    def is_fixed(node: nodes.Node, conditions: set[str]) -> bool:
        is_prompt = isinstance(node, nodes.Output) and _PROMPT in list_names(node)
        if isinstance(node, nodes.If):
            is_prompt |= _PROMPT in list_names(node.test)
            conditions = conditions | list_names(node.test)
        if is_prompt:
            return conditions | list_names(node) <= fixed
        if isinstance(node, nodes.Stmt) and not isinstance(node, (nodes.If, nodes.For)):
            return _PROMPT not in list_names(node)
        return all(is_fixed(child, conditions) for child in node.iter_child_nodes())

    return is_fixed(tree, set())


@final
class ChatTemplate:
    """A compiled Jinja template."""

    def __init__(self, name: str, text: str, tokens: Mapping[str, str], date: dt.date = DEFAULT_DATE) -> None:
        """Compile a template.

        Args:
            name: name for error messages.
            text: the Jinja text.
            tokens: named special tokens, such as ``bos_token``, that the template may write.
            date: date that ``strftime_now`` returns.

        Raises:
            TemplateError: invalid template.
        """
        self.name = name
        self._sandbox = TemplateSandbox(date)
        if len(text) > _MAX_SOURCE_SIZE:
            raise TemplateError(
                f"template {name} cannot be compiled: it has {len(text):,} characters; the limit is "
                f"{_MAX_SOURCE_SIZE:,}"
            )
        try:
            compiled = _compile(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"template {name}, line {error.lineno}: {error.message}; a chat template is written in Jinja for "
                "transformers' apply_chat_template"
            ) from error
        except (TemplateLimitError, *_RENDER_ERRORS) as error:
            raise TemplateError(f"template {name} cannot be compiled: {error}") from error
        names = self._sandbox.make_globals(None)
        self._template = jinja2.Template.from_code(self._sandbox, compiled.code, names)
        # Use one plain dict: jinja2's own chain of globals costs more than a short rendering.
        self._names = {**names, **tokens, "documents": None}
        self._marks_generation = compiled.marks_generation
        self.has_fixed_prompt = compiled.has_fixed_prompt
        # Names of the variables that the template may read.
        self.variables = compiled.variables
        self._arguments: TemplateArguments = {}

    def with_arguments(self, arguments: TemplateArguments) -> "ChatTemplate":
        """Return the template with these variables; both share what is compiled."""
        template = copy.copy(self)
        template._names = {**self._names, **arguments}  # noqa: SLF001 - a copy of this template
        template._arguments = {**self._arguments, **arguments}  # noqa: SLF001
        return template

    @property
    def asked_for_date(self) -> bool:
        """True once a rendering has read the date."""
        return self._sandbox.asked_for_date

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
        mark_round: MarkRound | None = None,
    ) -> TemplateOutput:
        """Render a conversation as ``apply_chat_template`` of transformers 5 does.

        Args:
            messages: turns with the keys that templates know (see :func:`normalize_message`).
            tools: tools that the model may call.
            prompt: whether to end with the beginning of an assistant's turn.
            mark_round: returns the texts to write where a round of a loop begins and ends, by the item of the loop.

        Raises:
            RenderError: the template rejects this conversation.
            TemplateError: the template exceeds a limit or performs a forbidden operation.
        """
        sandbox = self._sandbox
        sandbox.open(messages, tools, self._arguments, mark_round)
        variables = {**self._names, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            context = self._template.new_context(variables, shared=True)
            for chunk in self._template.root_render_func(context):
                sandbox.count(len(chunk))
                sandbox.chunks.append(chunk)
        except (TemplateLimitError, SecurityError, MemoryError, RecursionError) as error:
            why = str(error) or type(error).__name__
            raise TemplateError(
                f"template {self.name} was stopped: {why:.300}; choose another template, or fix it"
            ) from error
        except _RENDER_ERRORS as error:
            remedy = "change the record, or choose another --template"
            if token := _UNDEFINED_TOKEN.fullmatch(str(error)):
                remedy = f"the tokenizer has no {token[1]}: choose one that has it, or another --template"
            raise RenderError(
                f"template {self.name} rejects it ({type(error).__name__}: {error!s:.300}); {remedy}"
            ) from error
        text = "".join(sandbox.chunks)
        return TemplateOutput(text, self._locate_generation(text) if self._marks_generation else None)

    def _locate_generation(self, text: str) -> tuple[tuple[int, int], ...]:
        marks = []
        for start, block_text in self._sandbox.marks:
            if not text.startswith(block_text, start):
                raise TemplateError(
                    f"template {self.name} has {{% generation %}} inside a macro or a set block, where its position "
                    "in the text is unknown: move it out"
                )
            marks.append((start, start + len(block_text)))
        return tuple(marks)


def find_thought_end(content: str) -> int:
    """Return the end of the thought at the beginning of a content; 0 without one."""
    thought = _THOUGHT.match(content) if THOUGHT_TAGS[1] in content else None
    return thought.end() if thought else 0


def find_common_prefix(texts: Sequence[str]) -> str:
    """Return the characters with which all texts begin."""
    return os.path.commonprefix(texts)  # noqa: RUF071 - it compares characters


def normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """Remove None values and rename reasoning keys, as transformers 5 does."""
    if len(message) == 2 and None not in message.values():
        return message
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in REASONING_KEYS if key in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
