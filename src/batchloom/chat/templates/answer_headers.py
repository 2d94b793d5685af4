"""Headers of answers, which a template writes and no model.

A header is the generation prompt that the template writes after the messages before. It is learned from examples, so
that it does not depend on the records that were seen.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

from batchloom.chat.templates.chat_template import ChatTemplate, Messages, RenderError, find_common_prefix
from batchloom.chat.templates.marks import Marker
from batchloom.chat.templates.media_placeholders import ContentStyle, convert_contents
from batchloom.chat.templates.skeletons import EXAMPLE_TOOL, ConversationShape, make_example, make_probe
from batchloom.chat.templates.turn_positions import TurnForm

# Number of contexts in the cache; above it the cache is cleared.
_MAX_CACHED_CONTEXTS = 4096
_QUESTION: ConversationShape = (("user", False),)


@final
@dataclass(eq=False, slots=True)
class AnswerHeaders:
    """Texts with which a template may begin an answer."""

    template: ChatTemplate
    base_template: ChatTemplate  # The template without arguments
    form: TurnForm
    style: ContentStyle
    added: re.Pattern[str]  # The tokenizer's added tokens, control tokens included
    # Headers of an example, by the roles and keys of the last messages before the answer.
    headers: dict[Any, set[str]] = field(default_factory=dict)
    # Headers of examples, each with a text behind it that is no part of the header of a conversation.
    confirmed: set[tuple[str, str]] = field(default_factory=set)

    def iter_candidates(self, before: Messages, tools: list[Any] | None) -> Iterator[set[str]]:
        """Yield sets of texts with which the template may begin an answer.

        The first are those for any messages of the same form. Where they do not fit, the template may look at the
        contents.
        """
        context = (bool(tools), *((message.get("role"), *sorted(message)) for message in before[-2:]))
        if context not in self.headers:
            if len(self.headers) >= _MAX_CACHED_CONTEXTS:
                self.headers.clear()
            example = convert_contents(make_example(before[-2:]), self.style)[0]
            self.headers[context] = self._make_headers(example, tools and [EXAMPLE_TOOL])
        yield self.headers[context]
        yield self._make_headers(before, tools)
        if "add_generation_prompt" not in self.template.variables:
            # Such a template may write only an end token after the messages.
            yield self._find_lead()

    def _make_headers(self, before: Messages, tools: list[Any] | None) -> set[str]:
        """Return the texts with which the template may begin an answer.

        After the result of a tool a prompt may have no header although the conversation has that of other answers. A
        template that has no prompt for an answer is given what it writes before all of them.
        """
        headers = self._make_prompts(before, tools)
        if not any(headers):
            headers |= self._make_prompts(self.question, None)
        return headers if any(headers) else self._find_lead()

    def _find_lead(self) -> set[str]:
        """Return what the template writes before all answers, if a probe shows it."""
        lead = self._cut_thought(find_common_prefix([*self.form.leads]))
        return {lead if lead.strip() else ""} if self.form.leads else set()

    def _make_prompts(self, before: Messages, tools: list[Any] | None) -> set[str]:
        """Return what a template writes as a generation prompt.

        Some prompts also begin the answer, with a thought that other templates leave to the model. What the
        conversation repeats of it is trained like the rest. What template arguments add to a prompt, such as an empty
        thought, is given.
        """
        plain = self._render_prompt(self.base_template, before, tools)
        prompt = plain
        if self.template is not self.base_template:
            prompt = self._render_prompt(self.template, before, tools)
        is_prefilled = plain and prompt != plain and prompt.startswith(plain)
        header = self._cut_thought(plain if is_prefilled else prompt)
        return {header, *self._iter_shared_headers(header), *([prompt] if is_prefilled else [])}

    def _iter_shared_headers(self, prompt: str) -> Iterator[str]:
        """Yield what a generation prompt and an answer share.

        After it both end, or go on with white space or an added token.
        """
        for lead in self.form.leads:
            shared = find_common_prefix([prompt, lead])
            rests = (prompt[len(shared) :], lead[len(shared) :])
            if shared and all(not rest.strip() or self.added.match(rest) for rest in rests):
                yield shared

    def _cut_thought(self, prompt: str) -> str:
        """Return a generation prompt up to a token that begins a thought."""
        for token in self.added.finditer(prompt):
            is_thought = "think" in token.group().lower() and not self.form.control.fullmatch(token.group())
            if token.start() and is_thought:
                return prompt[: token.start()]
        return prompt

    def _render_prompt(self, template: ChatTemplate, before: Messages, tools: list[Any] | None) -> str:
        """Return what a template writes after these messages as a generation prompt."""
        try:
            marker = Marker(0)
            copies = list(map(dict, before))
            text = template.render(copies, tools, prompt=True, mark_round=marker.make_round_function(copies)).text
            if (end := marker.find_last(text)) is not None:
                return text[end:]
            without = template.render(before, tools).text
            return text.removeprefix(without) if text.startswith(without) else ""
        except RenderError:
            question = self.question
            return "" if before == question else self._render_prompt(template, question, tools)

    @property
    def question(self) -> Messages:
        """A question before a first answer, as the template takes it."""
        return convert_contents(make_probe(_QUESTION), self.style)[0]
