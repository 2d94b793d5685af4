"""Checks and facts of a conversation that was rendered with marks."""

import re
from collections.abc import Iterator
from typing import Any

from batchloom.chat.templates.chat_template import REASONING_KEYS, Messages, RenderError
from batchloom.chat.templates.marks import MARKED_KEYS, STRUCTURAL_KEYS, MarkedText, MarkingScope, contains_match

_CHANGED_PROBLEM = "changes contents or leaves out parts of them"
OMITTED_REASONING = "leaves out the reasoning of earlier answers (--reasoning split trains each as the last one)"
_UNWRITTEN_REASONING = "leaves out reasoning, also of the last answer (choose another --template to train it)"


def check_unmarked_strings(messages: Messages, tools: list[Any] | None, control: re.Pattern[str]) -> None:
    """Refuse control tokens in keys, roles and other strings that cannot be marked."""
    unmarked_fields = [{k: value for k, value in message.items() if k not in MARKED_KEYS} for message in messages]
    marked_fields = [message.get(key) for message in messages for key in MARKED_KEYS]
    unmarked_strings = list(_iter_unmarked_strings([marked_fields, tools]))
    if contains_match(unmarked_fields, control) or contains_match(unmarked_strings, control):
        raise RenderError(
            "it spells a control token in a role, a name or a key, where the token cannot be distinguished from "
            "the template's own"
        )


def _iter_unmarked_strings(value: Any) -> Iterator[Any]:
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


def check_tool_calls(marked: MarkedText, template: str, built_in: str) -> None:
    """Refuse a conversation whose tool calls the template omits."""
    turns = [owner + 1 for owner, key in marked.missing_strings if key == "tool_calls"]
    if turns:
        raise RenderError(
            f"template {template} leaves out tool calls of turn {min(turns)}: choose one that writes them, such as "
            f"--template {built_in}"
        )


def check_questions(marked: MarkedText, messages: Messages, scope: MarkingScope, template: str) -> None:
    """Refuse a conversation if the template omits or changes what a user says."""
    missing = {owner for owner, _ in marked.missing_strings}
    changed = {owner for owner, _ in marked.changed_strings}
    if not scope.includes("user"):
        spans = marked.rounds
        changed |= {
            number
            for number, message in enumerate(messages)
            for text in _list_texts(message.get("content"))
            if number not in spans or text.strip() not in marked.text[spans[number].start : spans[number].stop]
        }
    for numbers, verb in ((missing, "leaves out"), (changed, "changes")):
        turns = [number + 1 for number in numbers if number >= 0 and messages[number].get("role") == "user"]
        if turns:
            raise RenderError(
                f"template {template} {verb} content of turn {min(turns)}, on which the answers depend: change the "
                "record, or choose another --template"
            )


def _list_texts(content: Any) -> list[str]:
    """Return the texts of a content: a string, or parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def find_hidden_messages(marked: MarkedText, messages: Messages) -> frozenset[int]:
    """Return the given messages that no mark locates in the rendered text.

    They are blank, or of roles that are not marked.
    """
    owners = {point.owner for point in marked.points}
    hidden = set()
    for number, message in enumerate(messages):
        if number in owners or message.get("role") == "assistant":
            continue
        span = marked.rounds.get(number)
        written = marked.text[span.start : span.stop].strip() if span else ""
        if not written or not all(text.strip() in written for text in _list_texts(message.get("content"))):
            hidden.add(number)
    return frozenset(hidden)


def describe_changes(marked: MarkedText, messages: Messages) -> tuple[str, ...]:
    """Describe the strings of a conversation that a template omits or changes."""
    keys = {key for _, key in marked.missing_strings}
    changes = {"leaves out the list of tools"} if "tools" in keys else set()
    if unwritten := {owner for owner, key in marked.missing_strings if key in REASONING_KEYS}:
        # A template that leaves out reasoning at the end of a conversation never writes any.
        changes.add(_UNWRITTEN_REASONING if len(messages) - 1 in unwritten else OMITTED_REASONING)
    if marked.changed_strings or keys - {"tools", *REASONING_KEYS}:
        changes.add(_CHANGED_PROBLEM)
    return tuple(sorted(changes))
