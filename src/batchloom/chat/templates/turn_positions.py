"""Positions of the turns in a rendered conversation.

Two kinds of evidence show each turn. The rounds of the template's loop over the messages give the text of each message,
whatever its values are. The marks around strings give the text of each value that is a string, wherever the template
writes it. A turn is located if both agree: all that the template writes of its strings is in its round, behind the
header, and nothing of another message. The header is the generation prompt that the template writes after the messages
before. Where the evidence disagrees, the turn is refused with the reason.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchloom.chat.templates.marks import MarkedText

ASSISTANT = "assistant"
# As most templates spell control tokens.
CONTROL_LIKE = re.compile(r"<\|[^<>|\s]{1,40}\|>")
_SPACE = re.compile(r"\s*")


def make_control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of ``tokens``, preferring the longest."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


class TurnPosition(NamedTuple):
    """Character offsets of a turn."""

    # Start of the header that the template writes before the turn.
    head: int
    # First character that the model writes, or that was given.
    body: int
    # Start and end of the stop token; both are the end of the content if there is none.
    stop: int
    end: int


class TurnPositionError(Exception):
    """The turns of a conversation cannot be located; the message says why."""


class AnswerEnd(NamedTuple):
    """Text that a template writes after an answer, up to the end of the message."""

    text: str
    end: int  # End of the stop token in it, with white space before it; 0 without one


@dataclass(frozen=True, slots=True)
class TurnForm:
    """Form of the text around turns, as a probe shows it."""

    control: re.Pattern[str]  # The tokenizer's control tokens
    bos: str = ""  # Token that begins texts and never ends a turn; empty without one
    leads: frozenset[str] = frozenset()  # Texts before an answer, from the beginning of the message on
    ends: tuple[AnswerEnd, ...] = ()  # Texts after an answer, those with a stop token first
    followers: frozenset[str] = frozenset()  # Control tokens that begin the message after an answer

    @property
    def stops(self) -> frozenset[str]:
        """Tokens that end answers in their messages."""
        return frozenset(self.control.findall(end.text[: end.end])[-1] for end in self.ends if end.end)

    def learn(self, probe: MarkedText, roles: Sequence[str]) -> "TurnForm":
        """Return the form with the texts around the answers of a marked probe."""
        leads: set[str] = set()
        ends: set[AnswerEnd] = set()
        for span in probe.strings:
            if roles[span.owner] == ASSISTANT and (written := probe.rounds.get(span.owner)):
                leads.add(probe.text[written.start : span.start])
                ends.add(self._find_end(probe.text[span.stop : written.stop]))
        longest_first = sorted(ends, key=lambda end: (not end.end, -len(end.text)))
        answers = sorted(span for number, span in probe.rounds.items() if roles[number] == ASSISTANT)
        next_tokens = [self.control.match(probe.text, _skip_space(probe.text, span.stop)) for span in answers[:-1]]
        followers = frozenset(token.group() for token in next_tokens if token)
        return replace(self, leads=frozenset(leads), ends=tuple(longest_first), followers=followers)

    def _find_end(self, text: str) -> AnswerEnd:
        """Return a text after an answer with the end of its first control tokens.

        They may be apart by white space if there is no other text.
        """
        is_blank = not self.control.sub("", text).strip()
        end = 0
        token = self.control.search(text)
        while token and token.group() != self.bos:
            end = token.end()
            token = self.control.match(text, _skip_space(text, end) if is_blank else end)
        return AnswerEnd(text, end)


class TurnLocator:
    """Search for the turns of a rendered conversation."""

    def __init__(
        self,
        marked: MarkedText,
        roles: Sequence[str],
        form: TurnForm,
        find_headers: Callable[[int], Iterable[Collection[str]]],
        find_texts_alone: Callable[[int], Iterable[str]],
        hidden: Collection[int],
    ) -> None:
        """Prepare the search.

        Args:
            marked: the rendered conversation.
            roles: role of each message.
            form: what a probe shows.
            find_headers: returns sets of texts with which the template may begin the answer that is message N. A set
                counts if none before it fits.
            find_texts_alone: returns texts of message N without the results of its calls and without hidden messages.
            hidden: given messages that may stand anywhere, as no mark shows where.
        """
        self._text = marked.text
        self._points = marked.points
        self._strings = marked.strings
        self._form = form
        self._find_headers = find_headers
        self._find_texts_alone = find_texts_alone
        self._hidden = hidden
        self._roles = roles
        self._rounds = marked.rounds
        self._repeated = marked.repeated
        self._ordered_rounds = sorted(self._rounds.values())
        # Indices in ``points``, by message.
        self._indices: dict[int, list[int]] = {}
        for index, point in enumerate(self._points):
            self._indices.setdefault(point.owner, []).append(index)

    def locate(self) -> list[TurnPosition | None]:
        """Return the position of each message; None if the template writes no text of it.

        Raises:
            TurnPositionError: the evidence for an assistant's turn is missing or disagrees.
        """
        turns = [
            self._locate_answer(number) if role == ASSISTANT else self._locate_other(number)
            for number, role in enumerate(self._roles)
        ]
        previous_end = 0
        for number, turn in sorted(enumerate(turns), key=lambda item: item[1] or (0,)):
            if turn is not None:
                turns[number] = turn._replace(head=max(turn.head, min(previous_end, turn.body)))
                previous_end = max(previous_end, turn.end)
        return turns

    def _locate_answer(self, number: int) -> TurnPosition | None:
        turn = f"turn {number + 1}"
        points = [self._points[index] for index in self._indices.get(number, ())]
        if number in self._repeated:
            raise TurnPositionError(f"the template writes {turn} in several places")
        if number not in self._rounds:
            if points:
                raise TurnPositionError(f"the template does not write {turn} where it loops over the messages")
            return None
        start = self._rounds[number].start
        limit = self._rounds[number].stop
        first = next((point.position for point in points if start <= point.position <= limit), limit)
        header = self._find_header(number, start, first)
        if header is None:
            raise TurnPositionError(f"the header of {turn} differs from the template's generation prompt")
        body = header.stop
        limit = self._find_limit(number, body, limit)
        # The header of a tool's result may repeat the name of the call.
        body_points = [point for point in points if body <= point.position <= limit]
        if not {point.pair for point in body_points}.issuperset(point.pair for point in points):
            raise TurnPositionError(f"the template writes {turn} in several places")
        last = body_points[-1].position if body_points else body
        header_text = self._text[header.start : body]
        stop, end = self._find_stop(number, header_text, last, limit)
        self._check_inner_stops(number, header_text.strip(), body, stop)
        return TurnPosition(start, body, stop, end)

    def _find_header(self, number: int, start: int, first: int) -> slice | None:
        """Return the header in a round whose first string begins at ``first``."""
        found = (self._match_header(headers, start, first) for headers in self._find_headers(number))
        header = next((header for header in found if header is not None), None)
        is_first = not self._points or self._points[0].position >= start
        lead = self._text[start:first]
        if header is None or header.start < header.stop or not is_first or lead in self._form.leads:
            return header
        # BOS, or a default system message, may stand before the first answer.
        known_lead = next((known for known in self._form.leads if known and lead.endswith(known)), None)
        body = first - len(known_lead or "")
        return None if known_lead is None else slice(body, body)

    def _match_header(self, headers: Iterable[str], start: int, first: int) -> slice | None:
        """Return the longest header that fits.

        An empty one fits wherever no other does.
        """
        for header in sorted(headers, key=len, reverse=True):
            if self._text.startswith(header, start, first):
                return slice(start, start + len(header))
            # Templates write a default system message, or tools, in the round of the first message; or the beginning
            # of a header in the round before.
            begin = max(0, start - len(header))
            if self._text.count(header, begin, first) == 1:
                begin = self._text.index(header, begin)
                return slice(begin, begin + len(header))
        return None

    def _check_inner_stops(self, number: int, header: str, body: int, stop: int) -> None:
        """Refuse a turn that goes on behind a stop token, unless with another answer."""
        stop_tokens = self._form.stops
        first = bisect_right(self._strings, body, key=lambda string: string.stop)
        for token in self._form.control.finditer(self._text, body, stop) if stop_tokens else ():
            while first < len(self._strings) and self._strings[first].stop <= token.start():
                first += 1
            is_spelled = first < len(self._strings) and self._strings[first].start <= token.start()
            if token.group() not in stop_tokens or is_spelled:
                continue
            behind = _skip_space(self._text, token.end())
            if behind < stop and not (header and self._text.startswith(header, behind)):
                raise TurnPositionError(f"the template writes text behind the stop token of turn {number + 1}")

    def _find_limit(self, number: int, body: int, limit: int) -> int:
        """Return where a turn ends.

        Results of its calls may stand behind it in the same round.
        """
        first = bisect_right(self._points, body, key=lambda point: point.position)
        last = bisect_left(self._points, limit, key=lambda point: point.position)
        foreign_points = [point for point in self._points[first:last] if point.owner != number]
        if not foreign_points and not self._hidden:
            return limit
        start = self._rounds[number].start
        for written in self._find_texts_alone(number):
            stop = start + len(written)
            if self._text.startswith(written, start) and all(
                point.owner > number and point.position >= stop for point in foreign_points
            ):
                return min(stop, limit)
        inner = (
            foreign_points[0].owner
            if foreign_points
            else min(self._hidden, key=lambda n: (n < number, abs(n - number)))
        )
        raise TurnPositionError(f"the template writes turn {inner + 1} inside turn {number + 1}")

    def _locate_other(self, number: int) -> TurnPosition | None:
        """Return the position of a given turn; None if nothing of it is written."""
        indices = self._indices.get(number, [])
        span = self._rounds.get(number)
        if span is not None:
            inner = [index for index in indices if span.start <= self._points[index].position <= span.stop]
            if not indices:
                stop, end = self._find_last_token(span.start, span.stop) or (span.stop, span.stop)
                return TurnPosition(span.start, stop, stop, end)
            indices = inner or indices
        if not indices:
            return None
        # The strings of the turn up to the next one of another message.
        last = indices[0]
        while last + 1 < len(self._points) and self._points[last + 1].owner == number:
            last += 1
        body = self._points[indices[0]].position
        stop = self._points[last].position
        limit = self._points[last + 1].position if last + 1 < len(self._points) else len(self._text)
        if span is not None and span.start <= stop <= span.stop:
            stop_span = self._find_last_token(stop, min(limit, span.stop))
            return TurnPosition(span.start, body, *(stop_span or (stop, stop)))
        token = self._form.control.search(self._text, stop, limit)
        return TurnPosition(body, body, *(token.span() if token else (stop, stop)))

    def _find_stop(self, number: int, header: str, last: int, limit: int) -> tuple[int, int]:
        """Return start and end of the stop token after an answer's last string."""
        ends = self._form.ends
        ending = next((end for end in ends if self._text.endswith(end.text, last, limit)), AnswerEnd("", 0))
        begin = limit - len(ending.text)
        if ending.end:
            return begin, begin + ending.end
        if token := self._find_last_token(last, limit):
            return token
        if any(end.end for end in ends):
            raise TurnPositionError(f"the template writes no stop token after turn {number + 1}")
        return self._find_next_token(header, limit) or (begin, begin)

    def _find_next_token(self, header: str, limit: int) -> tuple[int, int] | None:
        """Return the control token that begins the next message, as a model writes it."""
        token = self._form.control.match(self._text, _skip_space(self._text, limit))
        if token is None or token.group() == self._form.bos:
            return None
        following = bisect_left(self._ordered_rounds, limit, key=lambda span: span.start)
        if following < len(self._ordered_rounds):
            is_stop = self._roles[self._ordered_rounds[following].owner] != ASSISTANT
        else:
            # After the last message comes the end token of the text, or a generation prompt.
            is_stop = token.group() not in header or token.group() in self._form.followers
        return token.span() if is_stop else None

    def _find_last_token(self, start: int, limit: int) -> tuple[int, int] | None:
        """Return start and end of a control token that only white space follows."""
        visible = start + len(self._text[start:limit].rstrip())
        tokens = list(self._form.control.finditer(self._text, start, limit))
        is_last = bool(tokens) and tokens[-1].end() == visible and tokens[-1].group() != self._form.bos
        return tokens[-1].span() if is_last else None


def _skip_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return space.end() if space else start


def describe_alterations(
    turns: Sequence[TurnPosition | None], roles: Sequence[str], are_empty: Sequence[bool]
) -> tuple[str, ...]:
    """Describe whether a template omitted or reordered messages of these roles.

    An empty message that it omits is no change.
    """
    omitted = dict.fromkeys(
        role for role, is_empty, turn in zip(roles, are_empty, turns, strict=True) if turn is None and not is_empty
    )
    remedy = " (--map system_role=developer gives them to it as those of the system)" if "developer" in omitted else ""
    altered: tuple[str, ...] = ()
    if omitted:
        altered += (f"leaves out messages of the role {' and '.join(omitted)}{remedy}",)
    positions = [turn for turn in turns if turn is not None]
    if positions != sorted(positions):
        altered += ("writes messages in another order",)
    return altered
