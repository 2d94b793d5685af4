"""Chat templates: choice, compilation, and rendering to text in a sandbox."""

import copy
import datetime as dt
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, final

import jinja2
import jinja2.ext
import jinja2.meta
import orjson
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from batchloom.chat.templates.rendering_meter import TemplateLimitError
from batchloom.chat.templates.sandbox import MarkRound, TemplateSandbox
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
# Default date of `strftime_now`, fixed so that a store does not depend on the day it is prepared.
# Llama 3's own template falls back to the same day.
DEFAULT_DATE = dt.date(2024, 7, 26)

_MAX_SOURCE_SIZE = 1 << 16
# Errors that template code may raise; any other is a bug of batchloom.
_UNDEFINED_TOKEN = re.compile(r"'(\w+_token)' is undefined")
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
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
