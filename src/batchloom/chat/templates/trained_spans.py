"""Selection of the trained spans of a rendered conversation."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from batchloom.chat.templates.chat_template import RenderError
from batchloom.chat.templates.conversation_text import CharacterSpan, ConversationText
from batchloom.chat.templates.turn_positions import ASSISTANT, TurnPosition
from batchloom.core.document import MESSAGE_ROLES, Conversation, TrainFlag, TurnWeight
from batchloom.core.loss_weights import MAX_LOSS_WEIGHT
from batchloom.core.settings import suggest

TRAIN_ON_RULES = ("assistant", "all", "last", "completion", "flagged")
TrainOnEos = Literal["turn", "all", "last", "none"]


class WeightedSpan(NamedTuple):
    """Characters of a text, and the weight of the loss of their trained tokens.

    Attributes:
        start, stop: character offsets.
        weight: weight that replaces those of earlier spans.
        is_aligned: whether the span begins and ends between tokens. In any other, a token that crosses an end
            belongs to the span if at least two of its characters do, as in axolotl.
    """

    start: int
    stop: int
    weight: float
    is_aligned: bool = True


class NothingTrainedError(Exception):
    """A conversation has nothing to train; the message says why."""


def find_train_on_problem(value: str) -> str:
    """Return the problem of a text for ``train_on``, or an empty string."""
    if value in TRAIN_ON_RULES:
        return ""
    roles = value.split(",")
    unknown = next((role for role in roles if role not in MESSAGE_ROLES), None)
    if unknown is not None:
        hint = suggest(unknown, (*TRAIN_ON_RULES, *sorted(MESSAGE_ROLES)))
        return f"is none of {', '.join(TRAIN_ON_RULES)}, or roles such as assistant,tool{hint}"
    return "names a role twice" if len(set(roles)) < len(roles) else ""


def compute_trained_spans(
    conversation: Conversation, rendered: ConversationText, train_on: str, train_on_eos: TrainOnEos = "turn"
) -> list[CharacterSpan]:
    """Compute the trained spans of the text, sorted and disjoint.

    The train flag of a message overrides ``train_on`` for its turn. The header before a turn is
    trained only with ``all``, the stop token after a trained turn as ``train_on_eos`` says.

    Args:
        conversation: the conversation; its flags override ``train_on``.
        rendered: its text and positions.
        train_on: ``assistant``: every assistant turn; ``last``: the last of them;
            ``completion``: everything from the body of the completion's first turn on;
            ``all``: the complete text; ``flagged``: only turns that their flags mark;
            or roles, separated by commas: every turn of these.
            Generation marks of the template, if any, delimit the assistant turns.
        train_on_eos: stop tokens to train: ``turn``: those of trained turns; ``all``: those of all turns; ``last``:
            that of the last trained turn; ``none``.

    Returns:
        (start, stop) of each span, in characters of the text.

    Raises:
        NothingTrainedError: no span is left to train.
        RenderError: a trained turn cannot be located.
    """
    if not conversation.weight:
        raise NothingTrainedError("nothing to train: the record has weight 0")
    is_plain = train_on_eos == "turn" and rendered.generation is None and not conversation.trained
    if train_on == "assistant" and is_plain and not rendered.thoughts:
        plain = _compute_plain_spans(conversation, rendered)
        if plain:
            return plain
    roles = [str(message.get("role")) for message in conversation.messages]
    flags = {number: is_trained(flag) for number, flag in enumerate(conversation.trained[: len(roles)])}
    flagged = {number for number, flag in flags.items() if flag}
    left_out = {number for number, flag in flags.items() if flag is False}
    if train_on in ("all", "completion"):
        start = 0 if train_on == "all" else _find_completion_start(conversation, rendered)
        excluded = [_get_turn_span(rendered, number) for number in left_out]
        spans = subtract_spans([(start, len(rendered.text))], excluded)
        spans += [_get_turn_span(rendered, number) for number in flagged]
        selected = set(range(len(roles)))
    else:
        assistants = [number for number, role in enumerate(roles) if role == ASSISTANT]
        chosen_roles = train_on.split(",")
        selected = {number for number, role in enumerate(roles) if role in chosen_roles}
        selected = set(assistants[-1:]) if train_on == "last" else selected
        spans = _list_turn_spans(rendered, assistants, sorted((selected | flagged) - left_out))
    if train_on_eos != "turn" and spans:
        spans = _select_stops(rendered, spans, train_on_eos, (selected | flagged) - left_out)
    spans = subtract_spans(_merge_spans(spans), list(rendered.thoughts))
    if spans:
        return spans
    if ASSISTANT not in roles:
        raise NothingTrainedError(f"nothing to train: there is no assistant turn (roles: {', '.join(roles):.80})")
    raise NothingTrainedError("nothing to train: the turns that train_on selects are empty or flagged as not trained")


def compute_weighted_spans(conversation: Conversation, rendered: ConversationText) -> list[WeightedSpan]:
    """Compute the spans whose loss has another weight than 1, in ascending precedence.

    Raises:
        RenderError: a weighted turn or its content cannot be located, or weights multiply beyond the limit.
    """
    factor = conversation.weight
    spans = [WeightedSpan(0, len(rendered.text), factor)] if factor != 1 else []
    for number, flag in enumerate(conversation.trained):
        if not isinstance(flag, TurnWeight) or flag.trained is False:
            continue
        turn = require_turn(rendered, number)
        weight = factor * flag.weight
        spans.append(WeightedSpan(turn.body, turn.end, weight))
        if flag.ranges:
            spans += _list_content_spans(conversation, rendered, number, weight)
        if flag.stop_weight is not None:
            spans.append(WeightedSpan(turn.stop, turn.end, factor * flag.stop_weight))
    if spans and (largest := max(span.weight for span in spans)) > MAX_LOSS_WEIGHT:
        raise RenderError(
            f"its loss weights multiply to {largest:g}; the largest is {MAX_LOSS_WEIGHT}: lower one of them"
        )
    return spans


def _list_content_spans(
    conversation: Conversation, rendered: ConversationText, number: int, weight: float
) -> list[WeightedSpan]:
    """Return the weighted spans of a turn with content ranges.

    The rest of the turn, up to the end of its content, has weight 0.
    """
    flag = conversation.trained[number]
    content = conversation.messages[number]["content"]
    spans = [
        (start, stop)
        for start, stop, owner, key in rendered.strings
        if owner == number and key == "content" and rendered.text[start:stop] == content.strip()
    ]
    if len(spans) != 1 or not isinstance(flag, TurnWeight):
        raise RenderError(
            f"the template changes the content of turn {number + 1}, so that its trained ranges cannot be located; "
            "choose another template, or flag the message"
        )
    # Templates may strip white space, so the span is that of the content without it.
    low, high = spans[0]
    start = low - (len(content) - len(content.lstrip()))
    if rendered.text.startswith(content, max(start, 0)):
        low = start
        high = start + len(content)
    turn = require_turn(rendered, number)
    weighted_spans = [WeightedSpan(turn.body, high, 0.0)]
    for content_range in flag.ranges:
        begin = max(start + content_range.start, low)
        end = min(start + content_range.stop, high)
        if begin < end:
            weighted_spans.append(WeightedSpan(begin, end, weight * content_range.weight, is_aligned=False))
    return weighted_spans


def is_trained(flag: TrainFlag) -> bool | None:
    """Return whether a flag marks its turn as trained; None if it does not say."""
    return flag.trained if isinstance(flag, TurnWeight) else flag


def _select_stops(
    rendered: ConversationText, spans: list[CharacterSpan], train_on_eos: TrainOnEos, trained: set[int]
) -> list[CharacterSpan]:
    """Add the stop tokens of turns to the spans, or remove them."""
    if not rendered.turns:
        require_turn(rendered, 0)
    stops = {number: (turn.stop, turn.end) for number, turn in enumerate(rendered.turns) if turn is not None}
    if train_on_eos == "all":
        return [*spans, *stops.values()]
    last = max((number for number in stops if number in trained), default=None)
    kept = last if train_on_eos == "last" else None
    excluded = [stop for number, stop in stops.items() if number != kept]
    # A generation mark may go on behind a stop, to the end of its line.
    marks = rendered.generation or ()
    for _, end in [*excluded] if marks else ():
        _, mark_end = marks[max(bisect_right(marks, (end, end)) - 1, 0)]
        if end < mark_end and not rendered.text[end:mark_end].strip():
            excluded.append((end, mark_end))
    return subtract_spans(_merge_spans(spans), excluded)


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
        return [_get_turn_span(rendered, number) for number in numbers]
    _check_marks(rendered, assistants, marks)
    if numbers == assistants:
        return list(marks)
    if rendered.turns:
        spans = []
        for number in numbers:
            turn = rendered.turns[number]
            inside = [mark for mark in marks if turn is not None and turn.head <= mark[0] < turn.end]
            spans += inside if number in assistants else [_get_turn_span(rendered, number)]
        return spans
    if len(marks) != len(assistants):
        raise RenderError(
            f"the template marks {len(marks)} generations but the conversation has {len(assistants)} assistant "
            "turns: they cannot be matched"
        )
    by_number = dict(zip(assistants, marks, strict=True))
    return [by_number.get(n) or _get_turn_span(rendered, n) for n in numbers]


def _check_marks(rendered: ConversationText, assistants: list[int], marks: Sequence[CharacterSpan]) -> None:
    """Refuse generation marks outside the turns of assistants.

    They are trusted where turns cannot be located.
    """
    turns = [rendered.turns[number] for number in assistants] if rendered.turns else []
    for start, stop in marks if turns else ():
        written = start + len(rendered.text[start:stop].rstrip())
        if not any(turn is not None and turn.head <= start and written <= turn.end for turn in turns):
            raise RenderError(
                f"the template marks {rendered.text[start:stop]!a:.60} as generated, which is not inside one assistant "
                "turn: mend its {% generation %} block, or choose another template"
            )


def _find_completion_start(conversation: Conversation, rendered: ConversationText) -> int:
    number = conversation.completion
    if number is None:
        raise RenderError(
            "train_on is completion, but the record does not separate its completion from its prompt: use assistant "
            "or last"
        )
    if not 0 <= number < len(conversation.messages):
        raise NothingTrainedError("nothing to train: the completion has no messages")
    return require_turn(rendered, number).body


def require_turn(rendered: ConversationText, number: int) -> TurnPosition:
    """Return the position of a turn.

    Raises:
        RenderError: it cannot be located, or the template leaves it out.
    """
    turn = rendered.turns[number] if rendered.turns else None
    if turn is None:
        why = rendered.problem or "the template leaves it out"
        remedy = "" if ";" in why else "; choose another template"
        raise RenderError(f"turn {number + 1} cannot be found in the rendered text: {why}{remedy}")
    return turn


def _get_turn_span(rendered: ConversationText, number: int) -> CharacterSpan:
    turn = require_turn(rendered, number)
    return turn.body, turn.end


def subtract_spans(spans: Iterable[CharacterSpan], excluded: Iterable[CharacterSpan]) -> list[CharacterSpan]:
    """Remove spans from others, which are disjoint."""
    ordered = sorted(excluded)
    remaining = []
    for start, stop in spans:
        begin = start
        for first, last in ordered:
            if first < stop and last > begin:
                remaining.append((begin, first))
                begin = last
        remaining.append((begin, stop))
    return [(start, stop) for start, stop in remaining if start < stop]


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
