"""Rendering of conversations to text, with the position of every turn."""

import copy
import datetime as dt
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, final

import orjson

from batchloom.chat.templates.answer_headers import AnswerHeaders
from batchloom.chat.templates.chat_template import (
    BUILT_IN_TEMPLATES,
    DEFAULT_DATE,
    NO_TEMPLATE,
    THOUGHT_TAGS,
    ChatTemplate,
    ChosenTemplate,
    Messages,
    RenderError,
    TemplateOutput,
    normalize_message,
)
from batchloom.chat.templates.conversation_text import ConversationText
from batchloom.chat.templates.marked_checks import (
    check_questions,
    check_tool_calls,
    check_unmarked_strings,
    describe_changes,
    find_hidden_messages,
)
from batchloom.chat.templates.marks import (
    MARKING_SCOPES,
    TOOLS_OWNER,
    MarkedText,
    Marker,
    MarkingScope,
    MarkPoint,
    MarksError,
    contains_match,
    extract_marks,
    find_unused_plane,
    mark_messages,
)
from batchloom.chat.templates.media_placeholders import (
    PlaceholderFormats,
    PlaceholderSpan,
    convert_contents,
    describe_markers,
    detect_content_style,
    find_placeholder_spans,
    list_media_owners,
)
from batchloom.chat.templates.skeletons import (
    ConversationShape,
    TurnSkeleton,
    absorb_whitespace,
    get_conversation_shape,
    make_probe,
    make_skeleton,
)
from batchloom.chat.templates.template_arguments import RESERVED_ARGUMENTS, TemplateArguments
from batchloom.chat.templates.tool_arguments import (
    QUOTED_ARGUMENTS,
    WRAPPED_TOOLS,
    are_arguments_quoted,
    describe_results,
    is_bare_tool,
    switch_arguments,
    wrap_tool,
)
from batchloom.chat.templates.turn_positions import (
    ASSISTANT,
    CONTROL_LIKE,
    TurnForm,
    TurnLocator,
    TurnPosition,
    TurnPositionError,
    describe_alterations,
    make_control_pattern,
)
from batchloom.core.document import Conversation, TurnWeight
from batchloom.core.medium import MediumKind
from batchloom.core.settings import suggest

# Number of shapes, and of different template arguments, in a cache; above it the cache is cleared.
_MAX_CACHED_SHAPES = 4096
_MAX_CACHED_ARGUMENTS = 64


class _ConversationMedia(NamedTuple):
    """Kinds and message indices of a conversation's media, and their mark in strings."""

    kinds: list[MediumKind]
    owners: list[int]
    mark: str


@final
class ConversationRenderer:
    """Renderer of conversations with a chosen template.

    Attributes:
        name: name of the template.
        notes: notes on the template for the user, in sentences.
    """

    def __init__(
        self,
        choice: ChosenTemplate,
        tokens: Mapping[str, str],
        control: Mapping[str, int],
        *,
        added: Iterable[str] = (),
        date: dt.date = DEFAULT_DATE,
        media: PlaceholderFormats = MappingProxyType({}),
        arguments: TemplateArguments = MappingProxyType({}),
    ) -> None:
        """Compile and probe a template.

        Args:
            choice: the template.
            tokens: named special tokens that it may write, such as ``bos_token``.
            control: control tokens of the tokenizer and their ids.
            added: its other added tokens, which templates also write around turns.
            date: date that ``strftime_now`` returns.
            media: placeholder format of each kind of media.
            arguments: variables of the template.

        Raises:
            TemplateError: invalid template, or one that may not terminate.
        """
        self.name = choice.name
        self._arguments = dict(arguments)
        pattern = make_control_pattern(list(control))
        # Some vocabularies have runs of line ends among their added tokens, which do not delimit turns.
        added_pattern = make_control_pattern([*control, *filter(str.strip, added), THOUGHT_TAGS[0]])
        plain = ChatTemplate(choice.name, choice.text, tokens, date)
        bos = tokens.get("bos_token", "")
        # A token that also ends texts, as GPT-2's, does not say where a text begins.
        form = TurnForm(pattern, "" if bos == tokens.get("eos_token") else bos)
        remedy = _choose_built_in(control)
        self._plain = _TemplateRenderer(
            plain, form, added_pattern, media, remedy, inserts_contents=choice.inserts_contents
        ).with_arguments(arguments)
        self._tools = self._plain
        if choice.tools_text is not None:
            template = ChatTemplate(f"{choice.name} (tool_use)", choice.tools_text, tokens, date)
            renderer = _TemplateRenderer(template, form, added_pattern, media, remedy)
            self._tools = renderer.with_arguments(arguments)
        self._pattern = pattern
        # Renderers of records with arguments of their own, by these arguments as JSON.
        self._by_arguments: dict[tuple[bool, bytes], _TemplateRenderer] = {}
        self._note = choice.note
        self._date = date
        self._source = f"{choice.text}\n{choice.tools_text or ''}"
        # Tokens in the template that the tokenizer reads as text.
        self._unknown_tokens = sorted(set(CONTROL_LIKE.findall(self._source)) - control.keys() - set(added))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user; rendering may add more."""
        notes = [self._note] if self._note else []
        if any(renderer.template.asked_for_date for renderer in (self._plain, self._tools)):
            notes.append(
                f"template {self.name} writes the date: it always gets {self._date.isoformat()}, so that the store "
                "does not depend on the day of preparation (--template-date)"
            )
        if unread := sorted(self._arguments.keys() - self.variables):
            known = ", ".join(sorted(self.variables - RESERVED_ARGUMENTS)) or "none"
            names = ", ".join(name + suggest(name, self.variables) for name in unread)
            notes.append(
                f"template {self.name} never reads the argument{'s' * (len(unread) > 1)} {names} (it reads {known})"
            )
        if self._plain.form.ends and not self._plain.learns_to_stop:
            unknown = ", ".join(self._unknown_tokens)
            notes.append(
                f"template {self.name} writes no control token after an assistant turn: a model will not learn to stop"
                + (f" (the tokenizer does not have {unknown} as control tokens)" if unknown else "")
            )
        for kind in self._plain.placeholder_formats:
            if kind not in self._plain.content_style.typed:
                alone = self._plain.placeholder_formats[kind].fallback_text
                notes.append(f"template {self.name} has no {kind} placeholder: {alone!r} is written in its place")
        return tuple(notes)

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template may read."""
        return self._plain.template.variables | self._tools.template.variables

    def may_read_key(self, key: str) -> bool:
        """Return whether the template may read this key of a message."""
        return re.search(rf"\b{re.escape(key)}\b", self._source) is not None

    def render(self, conversation: Conversation, *, with_strings: bool = False) -> ConversationText:
        """Render a conversation and locate its turns.

        Args:
            conversation: the conversation.
            with_strings: whether to locate the strings of its answers, too.

        Raises:
            RenderError: the template rejects the conversation, or its contents spell control tokens that
                cannot be distinguished from the template's.
            TemplateError: the template is stopped by the sandbox.
        """
        if not conversation.messages:
            raise RenderError("the conversation has no messages")
        renderer = self._tools if conversation.tools else self._plain
        if conversation.template_args:
            renderer = self._get_renderer(renderer, conversation.template_args)
        return renderer.render(conversation, with_strings=with_strings)

    def _get_renderer(self, renderer: "_TemplateRenderer", arguments: TemplateArguments) -> "_TemplateRenderer":
        """Return the renderer of a record with arguments of its own."""
        key = renderer is self._plain, orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
        if key not in self._by_arguments:
            if contains_match(arguments, self._pattern):
                raise RenderError(
                    "it spells a control token in a template argument, where the token cannot be distinguished from "
                    "the template's own; leave it out, or give the argument to the job (--template-arg)"
                )
            if len(self._by_arguments) >= _MAX_CACHED_ARGUMENTS:
                self._by_arguments.clear()
            self._by_arguments[key] = renderer.with_arguments(arguments)
        return self._by_arguments[key]


@final
class TextJoiner:
    """Renderer that joins a prompt and its completion without a template.

    The end token follows. It has the interface of :class:`ConversationRenderer`.
    """

    name = NO_TEMPLATE
    notes: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()

    def __init__(self, end: str) -> None:
        self._end = end

    def may_read_key(self, _key: str) -> bool:
        """Return False: messages are refused."""
        return False

    def render(self, conversation: Conversation, *, with_strings: bool = False) -> ConversationText:
        """Return the prompt, its completion and the end token.

        A completion that has the end token already gets no second one. A prompt without completion stays as it is.
        """
        if conversation.is_prompt:
            text = "".join(message["content"] for message in conversation.messages)
            return ConversationText(text, [], "", [], None)
        *prompts, completion = (message["content"] for message in conversation.messages)
        prompt = "".join(prompts)
        end = len(prompt) + len(completion.removesuffix(self._end))
        text = (prompt + completion)[:end] + self._end
        turns: list[TurnPosition | None] = [
            TurnPosition(0, 0, len(prompt), len(prompt)),
            TurnPosition(len(prompt), len(prompt), end, len(text)),
        ]
        turns = turns[-len(conversation.messages) :]
        return ConversationText(text, turns, "", [end], ((len(prompt), len(text)),))


@final
class _TemplateRenderer:
    """A compiled template, and what probes show of it."""

    def __init__(
        self,
        template: ChatTemplate,
        form: TurnForm,
        added: re.Pattern[str],
        placeholder_formats: PlaceholderFormats,
        built_in: str,
        *,
        inserts_contents: bool = False,
    ) -> None:
        """Probe a template.

        Args:
            template: the template.
            form: control tokens and BOS; the texts around answers are learned from probes.
            added: pattern of the tokenizer's added tokens, control tokens included.
            placeholder_formats: placeholder format of each kind of media.
            built_in: built-in template that the error for omitted tool calls suggests.
            inserts_contents: see :class:`ChosenTemplate`.
        """
        self.template = template
        self._base_template = template
        self._initial_form = form
        self._added = added
        self.placeholder_formats = placeholder_formats
        self._built_in = built_in
        self._inserts_contents = inserts_contents
        self._probe()

    def with_arguments(self, arguments: TemplateArguments) -> "_TemplateRenderer":
        """Return a renderer with these template arguments, which has its own skeletons."""
        if not arguments:
            return self
        renderer = copy.copy(self)
        renderer.template = self.template.with_arguments(arguments)
        renderer._probe()  # noqa: SLF001 - a copy of this renderer
        return renderer

    def _probe(self) -> None:
        """Learn the text around turns from the first probe that the template accepts."""
        self.content_style = detect_content_style(self.template, self.placeholder_formats)
        self._get_skeleton = functools.lru_cache(_MAX_CACHED_SHAPES)(self._learn_skeleton)
        self._use_form(self._initial_form)
        self.learns_to_stop = False
        user = ("user", False)
        assistant = (ASSISTANT, False)
        system = ("system", False)
        pair = (user, assistant)
        for shape in (pair * 2, (system, *pair * 2), pair, (system, *pair)):
            roles = [role for role, _ in shape]
            try:
                messages, probe = self._render_probe(shape)
                probe = absorb_whitespace(probe)[0]
                self._use_form(self._initial_form.learn(probe, roles))
                turns = self._locate(probe, messages, None)
            except (RenderError, TurnPositionError):
                # A form that no probe confirms still tells what is wrong with a conversation.
                continue
            answers = [turn for turn, role in zip(turns, roles, strict=True) if role == ASSISTANT and turn is not None]
            self.learns_to_stop = any(turn.stop < turn.end for turn in answers)
            return

    def _use_form(self, form: TurnForm) -> None:
        self.form = form
        self._headers = AnswerHeaders(self.template, self._base_template, form, self.content_style, self._added)

    def _locate(
        self,
        marked: MarkedText,
        messages: Messages,
        tools: list[Any] | None,
        scope: MarkingScope = MARKING_SCOPES[0],
    ) -> list[TurnPosition | None]:
        """Locate the turns of a marked text of ``messages``, which are not marked."""
        hidden = find_hidden_messages(marked, messages)
        locator = TurnLocator(
            marked,
            [str(message.get("role")) for message in messages],
            self.form,
            lambda number: self._headers.iter_candidates(messages[:number], tools),
            lambda number: self._iter_texts_alone(number, messages, hidden, tools, scope, marked.plane),
            hidden,
        )
        return locator.locate()

    def _iter_texts_alone(
        self,
        number: int,
        messages: Messages,
        hidden: frozenset[int],
        tools: list[Any] | None,
        scope: MarkingScope,
        plane: int,
    ) -> Iterator[str]:
        """Yield texts of a message without its results and without hidden messages.

        The first is among the other messages, the second the last one.
        """
        earlier = [message for n, message in enumerate(messages[: number + 1]) if n not in hidden]
        later = ((n, message) for n, message in enumerate(messages) if n > number)
        following = list(itertools.dropwhile(lambda item: item[1].get("role") == "tool", later))
        following_messages = [message for n, message in following if n not in hidden]
        for later_messages in (following_messages, []) if following_messages else ([],):
            with suppress(RenderError):
                marked = self._render_with_marks([*earlier, *later_messages], tools, scope, plane)
                if span := marked.rounds.get(len(earlier) - 1):
                    yield marked.text[span.start : span.stop]

    def _render_probe(self, shape: ConversationShape) -> tuple[Messages, MarkedText]:
        messages = convert_contents(make_probe(shape), self.content_style)[0]
        return messages, self._render_with_marks(messages, None, MARKING_SCOPES[0], 0)

    def render(self, conversation: Conversation, *, with_strings: bool) -> ConversationText:
        """See :meth:`ConversationRenderer.render`."""
        prompt = conversation.is_prompt
        # A skeleton has neither the beginning of an answer nor the positions of strings.
        has_ranges = any(isinstance(flag, TurnWeight) and flag.ranges for flag in conversation.trained)
        is_fillable = not (conversation.tools or prompt or has_ranges or with_strings)
        filled = self._fill_skeleton(conversation.messages) if is_fillable else None
        changes = describe_markers(conversation.messages)
        if filled is not None and self._inserts_contents:
            # Jinja would give the same text, but would take nearly half of the time of encoding a conversation.
            return filled._replace(altered=(*filled.altered, *changes)) if changes else filled
        conversation, media, adaptations = self._adapt(conversation)
        changes += adaptations
        tools = conversation.tools or None
        messages, output, form = self._render_accepted(conversation.messages, tools, prompt=prompt)
        changes += form
        if filled is not None and filled.text == output.text:
            rendered = filled._replace(generation=output.generation)
        else:
            if are_arguments_quoted(messages, output.text):
                changes += (QUOTED_ARGUMENTS,)
            rendered = self._render_marked(output, messages, tools, media, prompt=prompt)
        return rendered._replace(altered=(*rendered.altered, *changes))

    def _adapt(self, conversation: Conversation) -> tuple[Conversation, _ConversationMedia, tuple[str, ...]]:
        """Return a conversation as the template takes it, its media, and the changes."""
        messages = conversation.messages
        media = _ConversationMedia([], [], "")
        changes: tuple[str, ...] = ()
        if self.content_style.texts == "parts" or any(isinstance(message.get("content"), list) for message in messages):
            kinds = [medium.kind for medium in conversation.media]
            owners = list_media_owners(messages, self.placeholder_formats)
            messages, mark, changes = convert_contents(messages, self.content_style)
            media = _ConversationMedia(kinds, owners, mark)
            conversation = replace(conversation, messages=messages)
        if conversation.tools and any(map(is_bare_tool, conversation.tools)):
            changes += (WRAPPED_TOOLS,)
            conversation = replace(conversation, tools=list(map(wrap_tool, conversation.tools)))
        if any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            changes += describe_results(messages)
        return conversation, media, changes

    def _render_accepted(
        self, source: Messages, tools: list[Any] | None, *, prompt: bool
    ) -> tuple[Messages, TemplateOutput, tuple[str, ...]]:
        """Render messages in the first form that the template accepts; return that form."""
        messages = list(map(normalize_message, source))
        try:
            return messages, self.template.render(messages, tools, prompt=prompt), ()
        except RenderError:
            switched, change = switch_arguments(messages)
            # transformers 4 passes None on, and templates of its time test for it.
            for other, changes in ((source, ()), (switched, (change,))):
                if other != messages:
                    with suppress(RenderError):
                        return other, self.template.render(other, tools, prompt=prompt), changes
            raise

    def _find_media_spans(
        self, text: str, control: list[int], media: _ConversationMedia
    ) -> tuple[PlaceholderSpan, ...]:
        if not media.kinds:
            return ()
        return tuple(
            find_placeholder_spans(text, control, media.kinds, media.mark, self.placeholder_formats, self.content_style)
        )

    def _fill_skeleton(self, messages: Messages) -> ConversationText | None:
        """Return the text that the skeleton gives; None if the messages have no skeleton."""
        shape = get_conversation_shape(messages)
        # One whose prompt depends on contents may write another header in each conversation.
        is_fixed = shape is not None and self.template.has_fixed_prompt
        skeleton = self._get_skeleton(shape) if shape is not None and is_fixed else None
        return None if skeleton is None else skeleton.fill([message["content"] for message in messages])

    def _learn_skeleton(self, shape: ConversationShape) -> TurnSkeleton | None:
        """Learn the skeleton of a shape; None if its text is not fixed around contents."""
        if any(self.form.control.search(role) for role, _ in shape):
            return None
        try:
            messages, probe = self._render_probe(shape)
            if probe.changed_strings or len({string.owner for string in probe.strings}) != len(probe.strings):
                return None
            if any(shape[owner][0] == "user" for owner, _ in probe.missing_strings):
                return None
            probe, strip_modes = absorb_whitespace(probe)
            turns = self._locate(probe, messages, None)
        except (RenderError, TurnPositionError):
            return None
        return make_skeleton(shape, probe, strip_modes, turns, self.form.control)

    def _render_marked(
        self,
        output: TemplateOutput,
        messages: Messages,
        tools: list[Any] | None,
        media: _ConversationMedia,
        *,
        prompt: bool,
    ) -> ConversationText:
        """Locate turns with a second, marked rendering if no skeleton matches."""
        control_pattern = self.form.control
        hostile = contains_match(messages, control_pattern) or contains_match(tools, control_pattern)
        try:
            scope, marked = self._find_marking(output.text, messages, tools, hostile=hostile, prompt=prompt)
        except TurnPositionError as error:
            control = [match.start() for match in control_pattern.finditer(output.text)]
            media_spans = self._find_media_spans(output.text, control, media)
            return ConversationText(output.text, [], str(error), control, output.generation, (), media_spans)
        if hostile:
            check_unmarked_strings(messages, tools, control_pattern)
        check_tool_calls(marked, self.template.name, self._built_in)
        check_questions(marked, messages, scope, self.template.name)
        gaps = marked.iter_gaps() if hostile else [(0, len(output.text))]
        control = [match.start() for gap in gaps for match in control_pattern.finditer(output.text, *gap)]
        media_spans = self._find_media_spans(output.text, control, media)
        if media_spans:
            marked = _add_media_points(marked, media_spans, media.owners)
        turns: list[TurnPosition | None] = []
        problem = ""
        altered = describe_changes(marked, messages)
        try:
            turns = self._locate(marked, messages, tools, scope)
            roles = [str(message.get("role")) for message in messages]
            are_empty = [not (message.get("content") or message.get("tool_calls")) for message in messages]
            altered = describe_alterations(turns, roles, are_empty) + altered
        except TurnPositionError as error:
            problem = str(error)
        return ConversationText(
            output.text,
            turns,
            problem,
            control,
            output.generation,
            altered,
            media_spans,
            marked.strings,
        )

    def _find_marking(
        self, text: str, messages: Messages, tools: list[Any] | None, *, hostile: bool, prompt: bool
    ) -> tuple[MarkingScope, MarkedText]:
        """Return the first scope with which the template writes the same text.

        Raises:
            TurnPositionError: there is none.
            RenderError: there is none, and the conversation spells control tokens.
        """
        fault = RenderError if hostile else TurnPositionError
        plane = find_unused_plane(text)
        if plane is None:
            raise fault("it holds private-use characters of both planes 15 and 16, which mark contents")
        problem = "the template renders marked contents differently from plain contents"
        if hostile:
            problem = (
                "it spells a control token, and the template changes its contents, so that the token cannot be "
                "distinguished from the template's own"
            )
        for scope in MARKING_SCOPES:
            try:
                marked = self._render_with_marks(messages, tools, scope, plane, prompt=prompt)
            except MarksError as error:
                # A narrower scope needs fewer.
                problem = str(error)
                continue
            except RenderError:
                continue
            # Only marks around all strings tell whose the control tokens are.
            if marked.text == text and not (hostile and (scope.roles is not None or marked.changed_strings)):
                return scope, marked
        raise fault(problem)

    def _render_with_marks(
        self,
        messages: Messages,
        tools: list[Any] | None,
        scope: MarkingScope,
        plane: int,
        *,
        prompt: bool = False,
    ) -> MarkedText:
        marker = Marker(plane)
        marked_messages = mark_messages(messages, marker, scope)
        if scope.roles is None:
            tools = marker.mark_all(tools, TOOLS_OWNER, "tools")
        mark_round = marker.make_round_function(marked_messages)
        output = self.template.render(marked_messages, tools, prompt=prompt, mark_round=mark_round)
        return extract_marks(output.text, marker)


def _add_media_points(marked_text: MarkedText, spans: Sequence[PlaceholderSpan], owners: Sequence[int]) -> MarkedText:
    """Add media to the marks of their messages: a turn may hold nothing else."""
    media = [
        MarkPoint(position, owner, -1 - n)
        for n, (owner, span) in enumerate(zip(owners, spans, strict=True))
        for position in (span.start, span.stop)
    ]
    return replace(marked_text, points=sorted([*marked_text.points, *media]))


def _choose_built_in(control: Mapping[str, int]) -> str:
    """Return the built-in template whose control tokens the tokenizer has."""
    fitting = (name for name, tokens in BUILT_IN_TEMPLATES.items() if tokens and control.keys() >= {*tokens})
    return next(fitting, "plain")
