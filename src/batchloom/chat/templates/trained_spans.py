"""Selection of the trained spans of a rendered conversation."""

from typing import Literal

from batchloom.chat.templates.chat_template import RenderError
from batchloom.chat.templates.rendering import ConversationText
from batchloom.chat.templates.turn_positions import ASSISTANT, TurnPosition
from batchloom.core.document import Conversation

TrainOn = Literal["assistant", "all", "last", "completion"]

CharacterSpan = tuple[int, int]


class NothingTrainedError(Exception):
    """A conversation has nothing to train; the message says why."""


def compute_trained_spans(
    conversation: Conversation, rendered: ConversationText, train_on: TrainOn
) -> list[CharacterSpan]:
    """Compute the trained spans of the text, sorted and disjoint.

    The train flag of a message overrides ``train_on`` for its turn. The header before a turn is
    trained only with ``all``, the stop token after a trained turn always.

    Args:
        conversation: the conversation; its flags override ``train_on``.
        rendered: its text and positions.
        train_on: ``assistant``: every assistant turn; ``last``: the last of them;
            ``completion``: everything from the body of the completion's first turn on;
            ``all``: the complete text. Generation marks of the template, if any, delimit
            the assistant turns.

    Returns:
        (start, stop) of each span, in characters of the text.

    Raises:
        NothingTrainedError: no span is left to train.
        RenderError: a trained turn cannot be located.
    """
    if train_on == "assistant" and rendered.generation is None and not conversation.trained:
        plain = _compute_plain_spans(conversation, rendered)
        if plain:
            return plain
    roles = [str(message.get("role")) for message in conversation.messages]
    flags = dict(enumerate(conversation.trained[: len(roles)]))
    flagged = {number for number, flag in flags.items() if flag}
    left_out = {number for number, flag in flags.items() if flag is False}
    if train_on == "all" and not left_out:
        return [(0, len(rendered.text))]
    if train_on in ("all", "completion"):
        start = 0 if train_on == "all" else _find_completion_start(conversation, rendered)
        spans = _subtract_turns(start, len(rendered.text), [_require_turn(rendered, number) for number in left_out])
        spans += [_require_turn(rendered, number)[1:] for number in flagged]
    else:
        assistants = [number for number, role in enumerate(roles) if role == ASSISTANT]
        selected = set(assistants[-1:] if train_on == "last" else assistants)
        spans = _list_turn_spans(rendered, assistants, sorted((selected | flagged) - left_out))
    spans = _merge_spans(spans)
    if spans:
        return spans
    if ASSISTANT not in roles:
        raise NothingTrainedError(f"nothing to train: there is no assistant turn (roles: {', '.join(roles):.80})")
    raise NothingTrainedError("nothing to train: the turns that train_on selects are empty or flagged as not trained")


def _compute_plain_spans(conversation: Conversation, rendered: ConversationText) -> list[CharacterSpan]:
    """Return the assistant spans of a plain conversation; empty for special cases."""
    spans = []
    previous_end = 0
    for message, turn in zip(conversation.messages, rendered.turns, strict=False):
        if message.get("role") == ASSISTANT:
            if turn is None or turn.body < previous_end or turn.end <= turn.body:
                return []
            previous_end = turn.end
            spans.append((turn.body, previous_end))
    return spans


def _list_turn_spans(rendered: ConversationText, assistants: list[int], numbers: list[int]) -> list[CharacterSpan]:
    """Return the spans of turns; generation marks delimit those of assistants."""
    marks = rendered.generation
    if marks is None or not numbers:
        return [_require_turn(rendered, number)[1:] for number in numbers]
    if numbers == assistants:
        return list(marks)
    if len(marks) != len(assistants):
        raise RenderError(
            f"the template marks {len(marks)} generations but the conversation has {len(assistants)} assistant "
            "turns: they cannot be matched"
        )
    by_number = dict(zip(assistants, marks, strict=True))
    return [by_number.get(n) or _require_turn(rendered, n)[1:] for n in numbers]


def _find_completion_start(conversation: Conversation, rendered: ConversationText) -> int:
    number = conversation.completion
    if number is None:
        raise RenderError(
            "train_on is completion, but the record does not separate its completion from its prompt: use assistant "
            "or last"
        )
    if not 0 <= number < len(conversation.messages):
        raise NothingTrainedError("nothing to train: the completion has no messages")
    return _require_turn(rendered, number).body


def _require_turn(rendered: ConversationText, number: int) -> TurnPosition:
    turn = rendered.turns[number] if rendered.turns else None
    if turn is None:
        why = rendered.problem or "the template leaves it out"
        remedy = "" if ";" in why else "; choose another template"
        raise RenderError(f"turn {number + 1} cannot be found in the rendered text: {why}{remedy}")
    return turn


def _subtract_turns(start: int, stop: int, left_out: list[TurnPosition]) -> list[CharacterSpan]:
    spans = []
    for turn in sorted(left_out):
        if turn.body > start:
            spans.append((start, turn.body))
        start = max(start, turn.end)
    return [*spans, (start, stop)]


def _merge_spans(spans: list[CharacterSpan]) -> list[CharacterSpan]:
    """Sort spans, drop empty ones, and merge those that touch or overlap."""
    merged: list[CharacterSpan] = []
    for start, stop in sorted(spans):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
