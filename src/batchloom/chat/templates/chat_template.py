"""Compiled chat templates, which render a conversation to text."""

import datetime as dt
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, final

import jinja2
from jinja2.exceptions import SecurityError

from batchloom.chat.templates.sandbox import TemplateLimitError, TemplateSandbox
from batchloom.core.errors import TemplateError

# Default date of `strftime_now`, fixed so that a store does not depend on the day it is prepared.
# Llama 3's own template falls back to the same day.
DEFAULT_DATE = dt.date(2024, 7, 26)

_MAX_SOURCE_SIZE = 1 << 16
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Errors that template code may raise; any other is a bug of batchloom.
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


class RenderError(Exception):
    """A template rejects a conversation; the message says why."""


class TemplateOutput(NamedTuple):
    """Text that a template wrote.

    Attributes:
        text: the rendered conversation.
        generation: (start, stop) of each ``{% generation %}`` block, in characters.
    """

    text: str
    generation: tuple[tuple[int, int], ...] = ()


@final
class ChatTemplate:
    """A compiled Jinja template.

    Attributes:
        name: name that the user gave it.
        marks_generation: whether it has ``{% generation %}`` blocks.
    """

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
            tree = self._sandbox.parse(text)
            self._template = self._sandbox.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"template {name}, line {error.lineno}: {error.message}; a chat template is written in Jinja for "
                "transformers' apply_chat_template"
            ) from error
        except (TemplateLimitError, *_RENDER_ERRORS) as error:
            raise TemplateError(f"template {name} cannot be compiled: {error}") from error
        # Use one plain dict: jinja2's own chain of globals costs more than a short rendering.
        self._names = {**self._template.globals, **tokens, "documents": None}
        self.marks_generation = any(call.name == "_marked" for call in tree.find_all(jinja2.nodes.ExtensionAttribute))

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
    ) -> TemplateOutput:
        """Render a conversation as ``apply_chat_template`` of transformers 5 does.

        Args:
            messages: turns with the keys that templates know (see :func:`normalize_messages`).
            tools: tools that the model may call.
            prompt: whether to end with the beginning of an assistant's turn.

        Raises:
            RenderError: the template rejects this conversation.
            TemplateError: the template exceeds a limit or performs a forbidden operation.
        """
        sandbox = self._sandbox
        sandbox.open(messages, tools)
        variables = {
            **self._names,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": prompt,
        }
        try:
            context = self._template.new_context(variables, shared=True)
            for chunk in self._template.root_render_func(context):
                sandbox.count(len(chunk))
                sandbox.chunks.append(chunk)
        except (TemplateLimitError, SecurityError, MemoryError, RecursionError) as error:
            self._refuse(error)
        except _RENDER_ERRORS as error:
            raise RenderError(
                f"template {self.name} rejects it ({type(error).__name__}: {error!s:.300}); change the record, or "
                "choose another --template"
            ) from error
        text = "".join(sandbox.chunks)
        return TemplateOutput(text, self._generation(text)) if sandbox.marks else TemplateOutput(text)

    def _refuse(self, error: Exception) -> NoReturn:
        why = str(error) or type(error).__name__
        raise TemplateError(
            f"template {self.name} was stopped: {why:.300}; choose another template, or fix it"
        ) from error

    def _generation(self, text: str) -> tuple[tuple[int, int], ...]:
        marks = []
        for start, block_text in self._sandbox.marks:
            if not text.startswith(block_text, start):
                raise TemplateError(
                    f"template {self.name} has {{% generation %}} inside a macro or a set block, where its position "
                    "in the text is unknown: move it out"
                )
            marks.append((start, start + len(block_text)))
        return tuple(marks)


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove None values and rename reasoning keys, as transformers 5 does."""
    return [
        message if len(message) == 2 and None not in message.values() else _normalize_message(message)
        for message in messages
    ]


def _normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in _REASONING_KEYS if key in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
