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

    def iter_candidates(self, before: Messages, tools: list[Any] | None) -> Iterator[set[str]]:
        """Yield sets of texts with which the template may begin an answer.

        Those of an example serve for all messages of its form, unless the prompt depends on what they say.
        """
        if self.template.has_fixed_prompt:
            context = (bool(tools), *((message.get("role"), *sorted(message)) for message in before[-2:]))
            if context not in self.headers:
                if len(self.headers) >= _MAX_CACHED_CONTEXTS:
                    self.headers.clear()
                example = convert_contents(make_example(before[-2:]), self.style)[0]
                self.headers[context] = self._make_headers(example, tools and [EXAMPLE_TOOL])
            yield self.headers[context]
        yield self._make_headers(before, tools)
        if "add_generation_prompt" not in self.template.variables:
            # Such a template may always end with the beginning of an answer.
            end = self._render_end(before, tools)
            yield {end} if end and all(lead.startswith(end) for lead in self.form.leads) else set()

    def _make_headers(self, before: Messages, tools: list[Any] | None) -> set[str]:
        """Return the texts with which the template may begin an answer.

        After the result of a tool a prompt may have no header although the conversation has that of other answers. A
        template that has no prompt for an answer is given what it writes before all of them.
        """
        headers = self._make_prompts(before, tools)
        if not any(headers):
            headers |= self._make_prompts(self.question, None)
        return headers if any(headers) else self._find_lead()

    def _render_end(self, before: Messages, tools: list[Any] | None) -> str:
        """Return what a template writes behind these messages."""
        marker = Marker(0)
        copies = list(map(dict, before))
        try:
            text = self.template.render(copies, tools, mark_round=marker.make_round_function(copies)).text
        except RenderError:
            return ""
        *texts, end = marker.split(text)
        return end if texts else ""

    def _find_lead(self) -> set[str]:
        """Return what the template writes before each answer, if it is the same."""
        leads = set(map(self._cut_thought, self.form.leads))
        return {lead if lead.strip() else "" for lead in leads} if len(leads) == 1 else set()

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
        """Return a generation prompt without the empty or open thought at its end."""
        thoughts = [
            token
            for token in self.added.finditer(prompt)
            if "think" in token.group().lower() and not self.form.control.fullmatch(token.group())
        ]
        edges = [0, *(edge for token in thoughts for edge in token.span()), len(prompt)]
        texts = [prompt[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        # A text within or behind a thought is given like the rest of the prompt.
        return prompt if any(text.strip() for text in texts[1:]) else texts[0]

    def _render_prompt(self, template: ChatTemplate, before: Messages, tools: list[Any] | None) -> str:
        """Return what a template writes with a generation prompt only."""
        texts: list[str] = []
        tails: list[str] = []
        try:
            for prompt in (True, False):
                marker = Marker(0)
                copies = list(map(dict, before))
                mark_round = marker.make_round_function(copies)
                *texts_before, tail = marker.split(
                    template.render(copies, tools, prompt=prompt, mark_round=mark_round).text
                )
                texts.append("".join([*texts_before, tail]))
                tails.append(tail)
        except RenderError:
            question = self.question
            return "" if before == question else self._render_prompt(template, question, tools)
        if tails[0] != tails[1]:
            # A constant text may stand before the prompt, or behind it.
            written = tails[0].removeprefix(tails[1])
            return written if written != tails[0] else tails[0].removesuffix(tails[1])
        # The prompt is in the round of the last message, or there is none.
        before_it = len(find_common_prefix(texts))
        behind_it = len(find_common_prefix([text[before_it:][::-1] for text in texts]))
        return texts[0][before_it : len(texts[0]) - behind_it] if len(texts[0]) > len(texts[1]) else ""

    @property
    def question(self) -> Messages:
        """A question before a first answer, as the template takes it."""
        return convert_contents(make_probe(_QUESTION), self.style)[0]
