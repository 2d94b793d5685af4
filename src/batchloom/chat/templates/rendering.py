"""Rendering of conversations to text, with the position of every turn."""

import copy
import datetime as dt
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, final

import orjson

from batchloom.chat.templates.chat_template import (
    BUILT_IN_TEMPLATES,
    DEFAULT_DATE,
    NO_TEMPLATE,
    REASONING_KEYS,
    ChatTemplate,
    ChosenTemplate,
    RenderError,
    TemplateOutput,
    normalize_message,
)
from batchloom.chat.templates.conversation_text import CharacterSpan, ConversationText
from batchloom.chat.templates.marks import (
    MARKING_SCOPES,
    STRUCTURAL_KEYS,
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
    TEXT_PLACEHOLDERS,
    PlaceholderFormats,
    PlaceholderSpan,
    convert_contents,
    detect_content_style,
    find_placeholder_spans,
    list_media_owners,
)
from batchloom.chat.templates.skeletons import (
    EXAMPLE_TOOL,
    ConversationShape,
    TurnSkeleton,
    absorb_whitespace,
    get_conversation_shape,
    make_example,
    make_probe,
    make_skeleton,
)
from batchloom.chat.templates.template_arguments import RESERVED_ARGUMENTS, TemplateArguments
from batchloom.chat.templates.tool_arguments import (
    CONVERTED_ARGUMENTS,
    QUOTED_ARGUMENTS,
    are_arguments_quoted,
    switch_arguments,
)
from batchloom.chat.templates.turn_positions import (
    ASSISTANT,
    TurnForm,
    TurnPosition,
    TurnPositionError,
    describe_alterations,
    learn_form,
    locate_turns,
    make_control_pattern,
)
from batchloom.core.document import Conversation, TurnWeight
from batchloom.core.medium import PLACEHOLDER_PATTERN, MediumKind
from batchloom.core.settings import suggest

# Number of shapes, and of different template arguments, in a cache; above it the cache is cleared.
_MAX_CACHED_SHAPES = 4096
_MAX_CACHED_ARGUMENTS = 64
_QUESTION: ConversationShape = (("user", False),)
_CHANGED_PROBLEM = "changes contents or leaves out parts of them"
OMITTED_REASONING = "leaves out reasoning (--reasoning split trains each thought where the template writes it)"
_OMITTED_PROBLEMS = {"tools": "leaves out the list of tools", **dict.fromkeys(REASONING_KEYS, OMITTED_REASONING)}


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
        self.name, self._arguments = choice.name, dict(arguments)
        pattern = make_control_pattern(list(control))
        # Some vocabularies have runs of line ends among their added tokens, which do not delimit turns.
        added_pattern = make_control_pattern([*control, *filter(str.strip, added), "<think>"])
        plain = ChatTemplate(choice.name, choice.text, tokens, date)
        remedy = _choose_built_in(control)
        self._plain = _TemplateRenderer(
            plain, pattern, added_pattern, media, remedy, inserts_contents=choice.inserts_contents
        ).with_arguments(arguments)
        self._tools = self._plain
        if choice.tools_text is not None:
            template = ChatTemplate(f"{choice.name} (tool_use)", choice.tools_text, tokens, date)
            renderer = _TemplateRenderer(template, pattern, added_pattern, media, remedy)
            self._tools = renderer.with_arguments(arguments)
        self._pattern = pattern
        # Renderers of records with arguments of their own, by these arguments as JSON.
        self._by_arguments: dict[tuple[bool, bytes], _TemplateRenderer] = {}
        self._note, self._date = choice.note, date
        self._source = f"{choice.text}\n{choice.tools_text or ''}"

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
            notes.append(
                f"template {self.name} writes no control token after an assistant turn: a model will not learn to stop"
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

    def render(self, conversation: Conversation) -> ConversationText:
        """Render a conversation and locate its turns.

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
        return renderer.render(conversation)

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

    def render(self, conversation: Conversation) -> ConversationText:
        """Return the prompt, its completion and the end token.

        A completion that has the end token already gets no second one. A prompt without completion stays as it is.
        """
        if conversation.is_prompt:
            text = "".join(message["content"] for message in conversation.messages)
            return ConversationText(text, [], "", [], None)
        prompt, completion = (message["content"] for message in conversation.messages)
        end = len(prompt) + len(completion.removesuffix(self._end))
        text = (prompt + completion)[:end] + self._end
        turns: list[TurnPosition | None] = [
            TurnPosition(0, 0, len(prompt), len(prompt)),
            TurnPosition(len(prompt), len(prompt), end, len(text)),
        ]
        return ConversationText(text, turns, "", [end], ((len(prompt), len(text)),))


@final
class _TemplateRenderer:
    """A compiled template and the turn skeletons learned from it.

    ``built_in`` is the built-in template that the error for omitted tool calls suggests; ``inserts_contents`` is that
    of :class:`ChosenTemplate`.
    """

    def __init__(
        self,
        template: ChatTemplate,
        pattern: re.Pattern[str],
        added_pattern: re.Pattern[str],
        placeholder_formats: PlaceholderFormats,
        built_in: str,
        *,
        inserts_contents: bool = False,
    ) -> None:
        self.template, self.pattern, self.added_pattern = template, pattern, added_pattern
        self.placeholder_formats, self.built_in = placeholder_formats, built_in
        self.inserts_contents = inserts_contents
        self.content_style = detect_content_style(template, placeholder_formats)
        self._base_template = template
        self._headers: dict[Any, set[str]] = {}
        self.form, self.learns_to_stop = TurnForm(pattern), False
        self._learn_form()
        self.skeletons: dict[ConversationShape, TurnSkeleton | None] = {}

    def with_arguments(self, arguments: TemplateArguments) -> "_TemplateRenderer":
        """Return a renderer with these template arguments, which has its own skeletons."""
        if not arguments:
            return self
        renderer = copy.copy(self)
        renderer.template = self.template.with_arguments(arguments)
        renderer.content_style = detect_content_style(renderer.template, self.placeholder_formats)
        renderer._headers, renderer.skeletons = {}, {}  # noqa: SLF001 - a copy of this renderer
        renderer._learn_form()  # noqa: SLF001
        return renderer

    def _learn_form(self) -> None:
        """Learn the text around turns from the first probe that the template accepts."""
        user, assistant, system = ("user", False), (ASSISTANT, False), ("system", False)
        pair = (user, assistant)
        for shape in (pair * 2, (system, *pair * 2), pair, (system, *pair)):
            roles = [role for role, _ in shape]
            self._headers = {}
            try:
                probe = absorb_whitespace(self._render_marked_probe(shape))[0]
                self.form = learn_form(probe, roles, self.pattern)
                turns = self._locate(probe, self._make_probe(shape), None)
            except (RenderError, TurnPositionError):
                self.form = TurnForm(self.pattern)
                continue
            answers = [turn for turn, role in zip(turns, roles, strict=True) if role == ASSISTANT and turn is not None]
            self.learns_to_stop = any(turn.stop < turn.end for turn in answers)
            return

    def _locate(
        self, marked: MarkedText, messages: list[dict[str, Any]], tools: list[Any] | None, plane: int = 0
    ) -> list[TurnPosition | None]:
        """Locate the turns of a marked text of ``messages``, which are not marked."""
        roles = [str(message.get("role")) for message in messages]
        return locate_turns(
            marked,
            roles,
            self.form,
            lambda number: self._iter_headers(messages[:number], tools),
            lambda number: self._render_last(messages[: number + 1], tools, plane),
        )

    def _iter_headers(self, before: list[dict[str, Any]], tools: list[Any] | None) -> Iterator[set[str]]:
        """Yield sets of texts with which the template may begin an answer.

        The first are those for any messages of the same form, which are kept. Where they do not fit, the template may
        look at the contents.
        """
        context = (bool(tools), *((message.get("role"), *sorted(message)) for message in before[-2:]))
        if context not in self._headers:
            if len(self._headers) >= _MAX_CACHED_SHAPES:
                self._headers.clear()
            example = convert_contents(make_example(before[-2:]), self.content_style)[0]
            self._headers[context] = self._make_headers(example, tools and [EXAMPLE_TOOL])
        yield self._headers[context]
        yield self._make_headers(before, tools)
        if "add_generation_prompt" not in self.template.variables:
            # What follows the messages may be an end of the text.
            yield self._find_lead()

    def _make_headers(self, before: list[dict[str, Any]], tools: list[Any] | None) -> set[str]:
        """Return the texts with which the template may begin an answer.

        After the result of a tool a prompt may have no header although the conversation has that of other answers. A
        template that has no prompt for an answer is given what it writes before all of them.
        """
        headers = self._make_prompts(before, tools)
        if not any(headers):
            headers |= self._make_prompts(self._make_probe(_QUESTION), None)
        return headers if any(headers) else self._find_lead()

    def _find_lead(self) -> set[str]:
        """Return what the template writes before all answers, if a probe shows it."""
        lead = os.path.commonprefix([*self.form.leads])  # noqa: RUF071 - of characters
        return {lead if lead.strip() else ""} if self.form.leads else set()

    def _make_prompts(self, before: list[dict[str, Any]], tools: list[Any] | None) -> set[str]:
        """Return what a template writes as a generation prompt.

        Some prompts also begin the answer, with a thought that other templates leave to the model. What the
        conversation repeats of it is trained like the rest. What template arguments add to a prompt, such as an empty
        thought, is given.
        """
        plain = self._render_prompt(self._base_template, before, tools)
        prompt = plain
        if self.template is not self._base_template:
            prompt = self._render_prompt(self.template, before, tools)
        is_prefilled = plain and prompt != plain and prompt.startswith(plain)
        header = self._cut_thought(plain if is_prefilled else prompt)
        return {header, *self._iter_shared_headers(header), *([prompt] if is_prefilled else [])}

    def _iter_shared_headers(self, prompt: str) -> Iterator[str]:
        """Yield what a generation prompt and an answer share.

        After it both end, or go on with white space or an added token.
        """
        for lead in self.form.leads:
            shared = os.path.commonprefix([prompt, lead])  # noqa: RUF071 - of characters
            rests = (prompt[len(shared) :], lead[len(shared) :])
            if shared and all(not rest.strip() or self.added_pattern.match(rest) for rest in rests):
                yield shared

    def _cut_thought(self, prompt: str) -> str:
        """Return a generation prompt up to a token that begins a thought."""
        for token in self.added_pattern.finditer(prompt):
            is_thought = "think" in token.group().lower() and not self.pattern.fullmatch(token.group())
            if token.start() and is_thought:
                return prompt[: token.start()]
        return prompt

    def _render_prompt(self, template: ChatTemplate, before: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return what a template writes after these messages as a generation prompt."""
        try:
            marker, copies = Marker(0), list(map(dict, before))
            text = template.render(copies, tools, prompt=True, mark_round=marker.make_round_function(copies)).text
            if (end := marker.find_last(text)) is not None:
                return text[end:]
            without = template.render(before, tools).text
            return text.removeprefix(without) if text.startswith(without) else ""
        except RenderError:
            question = self._make_probe(_QUESTION)
            return "" if before == question else self._render_prompt(template, question, tools)

    def _render_last(self, messages: list[dict[str, Any]], tools: list[Any] | None, plane: int) -> str:
        """Return the text of the last one of these messages."""
        marked = self._render_with_marks(messages, tools, Marker(plane), MARKING_SCOPES[0], prompt=False)
        texts = [marked.text[one.start : one.stop] for one in marked.rounds if one.owner == len(messages) - 1]
        return max(texts, key=len, default="")

    def _make_probe(self, shape: ConversationShape) -> list[dict[str, Any]]:
        return convert_contents(make_probe(shape), self.content_style)[0]

    def _render_marked_probe(self, shape: ConversationShape) -> MarkedText:
        return self._render_with_marks(self._make_probe(shape), None, Marker(0), MARKING_SCOPES[0], prompt=False)

    def render(self, conversation: Conversation) -> ConversationText:
        """See :meth:`ConversationRenderer.render`."""
        messages, media = conversation.messages, _ConversationMedia([], [], "")
        changes: tuple[str, ...] = ()
        if self.content_style.texts == "parts" or any(isinstance(one.get("content"), list) for one in messages):
            kinds = [medium.kind for medium in conversation.media]
            owners = list_media_owners(messages, self.placeholder_formats)
            messages, mark, changes = convert_contents(messages, self.content_style)
            media = _ConversationMedia(kinds, owners, mark)
        if self.placeholder_formats and contains_match([one.get("content") for one in messages], PLACEHOLDER_PATTERN):
            changes += (TEXT_PLACEHOLDERS,)
        if conversation.tools and any(_is_bare_tool(tool) for tool in conversation.tools):
            changes += ("reads tools as functions, and gets tools without a type wrapped as such",)
            conversation = replace(conversation, tools=list(map(_wrap_tool, conversation.tools)))
        rendered = self._render_converted(conversation, messages, media)
        return rendered._replace(altered=(*rendered.altered, *changes)) if changes else rendered

    def _render_converted(
        self, conversation: Conversation, source_messages: list[dict[str, Any]], media: _ConversationMedia
    ) -> ConversationText:
        messages = list(map(normalize_message, source_messages))
        tools, prompt = conversation.tools or None, conversation.is_prompt
        # A skeleton has neither the beginning of an answer nor the positions of contents.
        has_ranges = any(isinstance(flag, TurnWeight) and flag.ranges for flag in conversation.trained)
        filled = None if tools or prompt or has_ranges else self._fill_skeleton(messages)
        if filled is not None and self.inserts_contents and not media.kinds:
            # Jinja would give the same text, but would take nearly half of the time of encoding a conversation.
            return filled
        changes: tuple[str, ...] = ()
        try:
            output = self.template.render(messages, tools, prompt=prompt)
        except RenderError as error:
            messages, output = self._render_otherwise(messages, source_messages, tools, error, prompt=prompt)
            if messages is not source_messages:
                changes = (CONVERTED_ARGUMENTS,)
        if filled is not None and filled.text == output.text:
            media_spans = self._find_media_spans(output.text, filled.control, media)
            return filled._replace(generation=output.generation, media_spans=media_spans)
        if are_arguments_quoted(messages, output.text):
            changes += (QUOTED_ARGUMENTS,)
        rendered = self._render_marked(output, messages, tools, media, prompt=prompt)
        return rendered._replace(altered=(*rendered.altered, *changes))

    def _render_otherwise(
        self,
        messages: list[dict[str, Any]],
        source_messages: list[dict[str, Any]],
        tools: list[Any] | None,
        error: RenderError,
        *,
        prompt: bool,
    ) -> tuple[list[dict[str, Any]], TemplateOutput]:
        """Render messages that a template rejects in another form."""
        # transformers 4 passes None on, and templates of its time test for it.
        for other in (source_messages, switch_arguments(messages)):
            if other != messages:
                try:
                    return other, self.template.render(other, tools, prompt=prompt)
                except RenderError:
                    continue
        raise error

    def _find_media_spans(
        self, text: str, control: list[int], media: _ConversationMedia
    ) -> tuple[PlaceholderSpan, ...]:
        if not media.kinds:
            return ()
        return tuple(
            find_placeholder_spans(text, control, media.kinds, media.mark, self.placeholder_formats, self.content_style)
        )

    def _fill_skeleton(self, messages: list[dict[str, Any]]) -> ConversationText | None:
        """Return the text that the skeleton gives; None if the messages have no skeleton."""
        shape = get_conversation_shape(messages)
        if shape is None:
            return None
        if shape not in self.skeletons:
            if len(self.skeletons) >= _MAX_CACHED_SHAPES:
                self.skeletons.clear()
            self.skeletons[shape] = self._learn_skeleton(shape)
        skeleton = self.skeletons[shape]
        return None if skeleton is None else skeleton.fill([message["content"] for message in messages])

    def _learn_skeleton(self, shape: ConversationShape) -> TurnSkeleton | None:
        """Learn the skeleton of a shape; None if its text is not fixed around contents."""
        if any(self.pattern.search(role) for role, _ in shape):
            return None
        try:
            probe = self._render_marked_probe(shape)
            if not probe.intact or len({string.owner for string in probe.strings}) != len(probe.strings):
                return None
            if any(shape[owner][0] == "user" for owner, _ in probe.missing_strings):
                return None
            probe, strip_modes = absorb_whitespace(probe)
            turns = self._locate(probe, self._make_probe(shape), None)
        except (RenderError, TurnPositionError):
            return None
        return make_skeleton(probe, strip_modes, turns, self.pattern)

    def _render_marked(
        self,
        output: TemplateOutput,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        media: _ConversationMedia,
        *,
        prompt: bool,
    ) -> ConversationText:
        """Locate turns with a second, marked rendering if no skeleton matches."""
        problem = "the template renders marked contents differently from plain contents"
        plane = find_unused_plane(output.text)
        if plane is None:
            problem = "it holds private-use characters of both planes 15 and 16, which mark contents"
        hostile = contains_match(messages, self.pattern) or contains_match(tools, self.pattern)
        limit_error: RenderError | None = None
        for scope in MARKING_SCOPES:
            if plane is None:
                break
            marker = Marker(plane)
            try:
                marked_text = self._render_with_marks(messages, tools, marker, scope, prompt=prompt)
            except MarksError as error:
                # A narrower scope needs fewer.
                problem, limit_error = str(error), error
                continue
            except RenderError:
                continue
            if marked_text.text != output.text:
                continue
            if hostile and (scope != MARKING_SCOPES[0] or not marked_text.intact):
                continue
            if hostile:
                self._check_unmarked_strings(messages, tools)
            self._check_tool_calls(marked_text)
            self._check_questions(marked_text, messages, scope)
            control = self._find_control_tokens(marked_text, hostile=hostile)
            media_spans = self._find_media_spans(output.text, control, media)
            if media_spans:
                marked_text = _add_media_points(marked_text, media_spans, media.owners)
            content_spans = _find_content_spans(marked_text, messages)
            turns, altered, problem = self._find_turns(marked_text, messages, tools, plane)
            return ConversationText(
                output.text, turns, problem, control, output.generation, altered, media_spans, content_spans
            )
        if hostile and limit_error is not None:
            raise limit_error
        if hostile:
            raise RenderError(
                "it spells a control token, and the template changes its contents, so that the token cannot be "
                "distinguished from the template's own"
            )
        control = [match.start() for match in self.pattern.finditer(output.text)]
        media_spans = self._find_media_spans(output.text, control, media)
        return ConversationText(output.text, [], problem, control, output.generation, (), media_spans)

    def _find_turns(
        self, marked_text: MarkedText, messages: list[dict[str, Any]], tools: list[Any] | None, plane: int
    ) -> tuple[list[TurnPosition | None], tuple[str, ...], str]:
        """Return the turns, the template's alterations, and why turns are not located."""
        problem = ""
        turns: list[TurnPosition | None] = []
        try:
            turns = self._locate(marked_text, messages, tools, plane)
        except TurnPositionError as error:
            problem = str(error)
        return turns, describe_alterations(turns) + _describe_changes(marked_text), problem

    def _render_with_marks(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        marker: Marker,
        scope: MarkingScope,
        *,
        prompt: bool,
    ) -> MarkedText:
        marked_messages = mark_messages(messages, marker, scope)
        if scope == MARKING_SCOPES[0]:
            tools = marker.mark_all(tools, TOOLS_OWNER, "tools")
        mark_round = marker.make_round_function(marked_messages)
        return extract_marks(
            self.template.render(marked_messages, tools, prompt=prompt, mark_round=mark_round).text, marker
        )

    def _check_unmarked_strings(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Refuse control tokens in keys, roles and other strings that cannot be marked."""
        marked_keys = {"content", "tool_calls", *REASONING_KEYS}
        unmarked_fields = [
            {key: value for key, value in message.items() if key not in marked_keys} for message in messages
        ]
        parts = [message.get(key) for message in messages for key in marked_keys]
        if contains_match(unmarked_fields, self.pattern) or contains_match(
            list(_iter_unmarked_strings([parts, tools])), self.pattern
        ):
            raise RenderError(
                "it spells a control token in a role, a name or a key, where the token cannot be distinguished from "
                "the template's own"
            )

    def _check_tool_calls(self, marked_text: MarkedText) -> None:
        """Refuse a conversation whose tool calls the template omits."""
        turns = [owner + 1 for owner, key in marked_text.missing_strings if key == "tool_calls"]
        if turns:
            raise RenderError(
                f"template {self.template.name} leaves out tool calls of turn {min(turns)}: choose one that writes "
                f"them, such as --template {self.built_in}"
            )

    def _check_questions(self, marked_text: MarkedText, messages: list[dict[str, Any]], scope: MarkingScope) -> None:
        """Refuse a conversation if the template omits or changes a user's content."""
        missing = {owner for owner, _ in marked_text.missing_strings}
        changed = {owner for owner, _ in marked_text.changed_strings}
        if "user" not in scope.roles:
            spans = {span.owner: span for span in marked_text.rounds}
            changed |= {
                number
                for number, message in enumerate(messages)
                if isinstance(content := message.get("content"), str)
                and (number not in spans or content.strip() not in marked_text.text[slice(*spans[number][:2])])
            }
        for numbers, verb in ((missing, "leaves out"), (changed, "changes")):
            turns = [number + 1 for number in numbers if number >= 0 and messages[number].get("role") == "user"]
            if turns:
                raise RenderError(
                    f"template {self.template.name} {verb} content of turn {min(turns)}, on which the answers depend: "
                    "change the record, or choose another --template"
                )

    def _find_control_tokens(self, marked_text: MarkedText, *, hostile: bool) -> list[int]:
        """Return the offsets of control tokens that the template wrote."""
        if not hostile:
            return [match.start() for match in self.pattern.finditer(marked_text.text)]
        edges = [0, *(edge for string in marked_text.strings for edge in string[:2]), len(marked_text.text)]
        return [
            match.start()
            for n in range(0, len(edges), 2)
            for match in self.pattern.finditer(marked_text.text, edges[n], edges[n + 1])
        ]


def _find_content_spans(marked_text: MarkedText, messages: list[dict[str, Any]]) -> dict[int, CharacterSpan]:
    """Return the span of each content that is one text, written once and unchanged."""
    spans: dict[int, CharacterSpan] = {}
    repeated: set[int] = set()
    for start, stop, number, key in marked_text.strings:
        content = messages[number].get("content") if number >= 0 and key == "content" else None
        if not isinstance(content, str) or marked_text.text[start:stop] != content.strip():
            continue
        if number in spans:
            repeated.add(number)
        spans[number] = start, stop
    return {number: span for number, span in spans.items() if number not in repeated}


def _add_media_points(marked_text: MarkedText, spans: Sequence[PlaceholderSpan], owners: Sequence[int]) -> MarkedText:
    """Add media to the marks of their messages: a turn may hold nothing else."""
    media = [
        MarkPoint(position, owner, -1 - n)
        for n, (owner, span) in enumerate(zip(owners, spans, strict=True))
        for position in (span.start, span.stop)
    ]
    return replace(marked_text, points=sorted([*marked_text.points, *media]))


def _is_bare_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and "name" in tool and tool.keys().isdisjoint(("function", "type"))


def _wrap_tool(tool: Any) -> Any:
    return {"type": "function", "function": tool} if _is_bare_tool(tool) else tool


def _choose_built_in(control: Mapping[str, int]) -> str:
    """Return the built-in template whose control tokens the tokenizer has."""
    fitting = (name for name, tokens in BUILT_IN_TEMPLATES.items() if tokens and control.keys() >= {*tokens})
    return next(fitting, "plain")


def _iter_unmarked_strings(value: Any) -> Any:
    """Yield the strings of a value that are never marked: keys, and structural values."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key in STRUCTURAL_KEYS:
                yield item
            yield from _iter_unmarked_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_unmarked_strings(item)


def _describe_changes(marked_text: MarkedText) -> tuple[str, ...]:
    """Describe the strings of a conversation that a template omits or changes."""
    changes = {_OMITTED_PROBLEMS.get(key, _CHANGED_PROBLEM) for _, key in marked_text.missing_strings}
    return tuple(sorted(changes if marked_text.intact else changes | {_CHANGED_PROBLEM}))
