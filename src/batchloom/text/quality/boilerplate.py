"""Removal of boilerplate lines of web pages: menus, notices and counters."""

import re
from dataclasses import dataclass
from typing import Literal

from batchloom.core.settings import coerce_int_fields, raise_problems
from batchloom.text.quality.c4 import POLICY_PHRASES
from batchloom.text.steps import CleanFunction

BoilerplateKind = Literal["policies", "javascript", "navigation", "counters"]

# Require a demand, too: texts about the language name it all the time.
_JAVASCRIPT_PATTERN = re.compile(
    r"javascript (?:is|must be|needs to be|has been|seems to be) (?:currently )?(?:disabled|enabled|required|turned)"
    r"|(?:enable|requires?|turn on|without|activate) javascript"
    r"|javascript (?:disabled|required)"
)
# Line rules of Penedo et al. 2023 (RefinedWeb), appendix: short lines that begin with, end with or
# contain a phrase. Each has one more word here, because wrapped prose has lines that begin with "sign in".
_LINE_START_PATTERN = re.compile(
    r"(?:(?:sign|log)[ -]?in|sign[ -]?up) (?:to (?:your|comment|reply|post|leave|continue|view|see)|or|with|now|here)\b"
    r"|skip to (?:main |primary |page |the )?(?:content|navigation|search|footer|menu)\b"
    r"|(?:share|post) (?:this )?(?:on|via|to|with) (?:facebook|twitter|x|linkedin|pinterest|whatsapp|reddit|email)\b"
    r"|follow us on\b"
)
_LINE_END_PATTERN = re.compile(r"(?:Read|READ) (?:more|More|MORE)|(?:Continue|CONTINUE) (?:reading|Reading|READING)")
_LINE_INNER_PATTERN = re.compile(r"\bitems? in (?:your )?cart\b")
_SHORT_LINE_WORDS = 10
_COUNTER_REGEX = (
    r"[0-9][0-9.,]*+ ?[km]?+ ?"
    r"(?:likes?|shares?|comments?|replies|reply|views?|followers?|retweets?|upvotes?|reactions?|reads?)"
)
# Complete lines of menus, footers and buttons; none is a line of a program.
_NAVIGATION_TEXT = """
    about us | accept all | accept all cookies | accept cookies | add to cart | advertisement |
    advertisements | back to home | back to top | close menu | contact us | cookie policy | cookie settings |
    copy link | email this | forgot password? | forgot your password? | go to top | home page |
    jump to content | jump to main content | jump to navigation | leave a comment | leave a reply | log in |
    log out | main menu | manage cookies | manage preferences | my account | navigation menu | next article |
    next page | next post | open menu | pin it | post a comment | previous article | previous page |
    previous post | print this page | privacy policy | privacy settings | reject all | related articles |
    related posts | return to top | scroll to top | search this site | share this | share this article |
    share this page | share this post | shopping cart | show menu | sign in | sign up | sitemap |
    skip to content | skip to main content | sponsored content | subscribe now | subscribe to our newsletter |
    terms and conditions | terms of service | terms of use | toggle menu | toggle navigation | toggle search |
    tweet this | view all | view cart
"""
_NAVIGATION_LINES = frozenset(map(str.strip, _NAVIGATION_TEXT.split("|")))
_COUNTER_LINE = re.compile(rf"(?:{_COUNTER_REGEX})[^\w\n]*+(?=\n|\Z)")
# Beginning of a line of the two kinds, from the line end before it.
_BEGINNING = re.compile(rf"\n[^\w\n]*+(?:{_LINE_START_PATTERN.pattern}|{_COUNTER_LINE.pattern})")
_NON_WORD = re.compile(r"[^\w\n]*+")
_WORD_CHARACTER = re.compile(r"\w")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoilerplateSettings:
    """Settings of the step ``boilerplate``.

    Attributes:
        kinds: kinds of removed lines: ``policies`` (cookies, privacy, terms of use), ``javascript``
            (demands for it), ``navigation`` (menus, buttons, log-in, ``Read more``), ``counters`` (``3 likes``).
        most_words: maximum length of a removed line about policies or JavaScript;
            longer ones are texts about these.
        lines: additional complete lines to remove, in any case.
    """

    kinds: tuple[BoilerplateKind, ...] = ("policies", "javascript", "navigation", "counters")
    most_words: int = 40
    lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        raise_problems(coerce_int_fields(self, {"most_words": (1, 1 << 30)}))


def make_boilerplate_step(settings: BoilerplateSettings) -> CleanFunction:
    kinds = frozenset(settings.kinds)
    most = settings.most_words
    full_lines = frozenset(line.strip().lower() for line in settings.lines) - {""}
    if "navigation" in kinds:
        full_lines |= _NAVIGATION_LINES
    parts = _list_required_substrings(kinds)
    begins = bool(kinds & {"navigation", "counters"})

    def clean(text: str) -> str:
        lowered = text.lower()
        beginnings = _BEGINNING.finditer(f"\n{lowered}") if begins else ()
        positions = {match.start() for match in beginnings}
        for part in parts:
            at = lowered.find(part)
            while at >= 0:
                positions.add(at)
                at = lowered.find(part, at + len(part))
        numbers = _find_line_numbers(lowered, positions) if positions else set[int]()
        lines = lowered.split("\n")
        if not full_lines.isdisjoint(map(str.strip, lines)):
            numbers |= {number for number, line in enumerate(lines) if line.strip() in full_lines}
        if not numbers:
            return text
        lines = text.split("\n")
        removed = {number for number in numbers if _is_boilerplate(lines[number], full_lines, kinds, most)}
        return "\n".join([line for number, line in enumerate(lines) if number not in removed]) if removed else text

    return clean


def _find_line_numbers(text: str, positions: set[int]) -> set[int]:
    """Return the 0-based numbers of the lines at these positions."""
    numbers = set()
    number = 0
    last = 0
    for position in sorted(positions):
        number += text.count("\n", last, position)
        last = position
        numbers.add(number)
    return numbers


def _list_required_substrings(kinds: frozenset[str]) -> tuple[str, ...]:
    """Return a few substrings; lines without any of them match none of these rules."""
    parts: tuple[str, ...] = ()
    if "policies" in kinds:
        parts += ("privacy policy", "cookie", "terms of use")
    if "javascript" in kinds:
        parts += ("javascript",)
    if "navigation" in kinds:
        parts += ("read more", "continue reading", " cart")
    return parts


def _is_boilerplate(line: str, full_lines: frozenset[str], kinds: frozenset[str], most: int) -> bool:
    lowered = line.strip().lower()
    if not lowered:
        return False
    if lowered in full_lines:
        return True
    words = len(lowered.split(maxsplit=max(most, _SHORT_LINE_WORDS)))
    if words <= _SHORT_LINE_WORDS and _is_button(line, lowered, kinds):
        return True
    if words > most:
        return False
    if "policies" in kinds and any(part in lowered for part in POLICY_PHRASES):
        return True
    return "javascript" in kinds and "javascript" in lowered and bool(_JAVASCRIPT_PATTERN.search(lowered))


def _is_button(line: str, lowered: str, kinds: frozenset[str]) -> bool:
    """Return whether a short line is a counter, an invitation or the end of a teaser."""
    start = _NON_WORD.match(lowered).end()  # type: ignore[union-attr]  # also matches the empty string
    if "counters" in kinds and _COUNTER_LINE.match(lowered, start):
        return True
    if "navigation" not in kinds:
        return False
    return bool(
        _LINE_START_PATTERN.match(lowered, start)
        or _LINE_INNER_PATTERN.search(lowered)
        or any(not _WORD_CHARACTER.search(line, last.end()) for last in _LINE_END_PATTERN.finditer(line))
    )
