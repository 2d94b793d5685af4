"""Boilerplate: lines of web pages that are no text of theirs, as menus, notices and counters."""

import re
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from batchloom.core.spec import raise_problems, set_wholes
from batchloom.text.steps import Clean

Kind = Literal["policies", "javascript", "navigation", "counters"]

# Raffel et al. 2020 (C4): lines that hold one of these are notices of policies.
_POLICIES = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies"),
    "use cookies",
)
# Here a line must also ask for something: texts about the language name it all the time.
_JAVASCRIPT = re.compile(
    r"javascript (?:is|must be|needs to be|has been|seems to be) (?:currently )?(?:disabled|enabled|required|turned)"
    r"|(?:enable|requires?|turn on|without|activate) javascript"
    r"|javascript (?:disabled|required)"
)
# Penedo et al. 2023 (RefinedWeb), table 9: short lines that begin or end so, or hold so.
_FIRST = ("sign in", "sign-in", "sign up", "log in", "login", "skip to", "share on", "follow us")
_LAST = ("read more", "continue reading", "learn more", "load more", "show more", "see more")
_WITHIN = ("items in cart", "item in cart", "items in your cart", "all rights reserved")
_SHORT = 10
# The same table: counters.
_COUNTER = re.compile(
    r"[0-9][0-9.,]*+ ?[km]?+ ?"
    r"(?:likes?|shares?|comments?|replies|reply|views?|followers?|retweets?|upvotes?|reactions?|reads?)"
)
_COUNTERS = re.compile(rf"\n[ \t]*+(?:{_COUNTER.pattern})[ \t]*+(?:\n|\Z)")
# Whole lines: what menus, footers and buttons of pages say.
_NAVIGATION = frozenset(
    [
        "about us",
        "accept",
        "accept all",
        "accept all cookies",
        "accept cookies",
        "add to cart",
        "advertisement",
        "advertisements",
        "back to home",
        "back to top",
        "close menu",
        "contact us",
        "cookie settings",
        "cookies",
        "copy link",
        "decline",
        "email this",
        "forgot password",
        "forgot your password",
        "go to top",
        "got it",
        "home page",
        "jump to content",
        "jump to main content",
        "jump to navigation",
        "leave a comment",
        "leave a reply",
        "log out",
        "main menu",
        "manage cookies",
        "manage preferences",
        "more info",
        "my account",
        "navigation menu",
        "newsletter",
        "next article",
        "next page",
        "next post",
        "open menu",
        "pin it",
        "post a comment",
        "previous article",
        "previous page",
        "previous post",
        "print this page",
        "privacy",
        "privacy policy",
        "privacy settings",
        "reject all",
        "related articles",
        "related posts",
        "remember me",
        "return to top",
        "scroll to top",
        "search this site",
        "share this",
        "share this article",
        "share this page",
        "share this post",
        "shopping cart",
        "show menu",
        "site map",
        "sitemap",
        "sponsored content",
        "subscribe",
        "subscribe now",
        "subscribe to our newsletter",
        "table of contents menu",
        "terms",
        "terms and conditions",
        "terms of service",
        "terms of use",
        "toggle menu",
        "toggle navigation",
        "toggle search",
        "tweet this",
        "view all",
        "view cart",
    ]
)
_ORNAMENTS = " \t.:!|·•*#-–—_<>«»‹›→←↑…[]()"  # noqa: RUF001


@dataclass(frozen=True, slots=True, kw_only=True)
class BoilerplateSettings:
    """Settings of the step ``boilerplate``.

    Attributes:
        kinds: of lines that go: ``policies`` (of cookies, privacy, use), ``javascript`` (asking for
            it), ``navigation`` (menus, buttons, log-in, ``Read more``), ``counters`` (``3 likes``).
        most_words: a line of policies or about JavaScript goes only when it has at most so many:
            longer ones are texts about these.
        lines: further whole lines that go, whatever their case.
    """

    kinds: tuple[Kind, ...] = ("policies", "javascript", "navigation", "counters")
    most_words: int = 40
    lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        raise_problems(set_wholes(self, {"most_words": (1, 1 << 30)}))


def make(settings: BoilerplateSettings) -> Clean:
    """The step as a function."""
    kinds, most = frozenset(settings.kinds), settings.most_words
    wholes = frozenset(line.lower().strip(_ORNAMENTS) for line in settings.lines) - {""}
    if "navigation" in kinds:
        wholes |= _NAVIGATION
    parts = _parts(kinds)

    def clean(text: str) -> str:
        lowered = text.lower()
        if not (
            any(part in lowered for part in parts)
            or ("counters" in kinds and _COUNTERS.search(f"\n{lowered}"))
            or not wholes.isdisjoint(map(str.strip, lowered.split("\n"), repeat(_ORNAMENTS)))
        ):
            return text
        lines = text.split("\n")
        kept = [line for line in lines if not _is_boilerplate(line.lower(), wholes, kinds, most)]
        return "\n".join(kept) if len(kept) < len(lines) else text

    return clean


def _parts(kinds: frozenset[str]) -> tuple[str, ...]:
    """What a text must hold one of to have any such line; few, as each is searched for in every text."""
    parts: tuple[str, ...] = ()
    if "policies" in kinds:
        parts += ("privacy policy", "cookie", "terms of use")
    if "javascript" in kinds:
        parts += ("javascript",)
    if "navigation" in kinds:
        parts += (*_FIRST, *_LAST, "in cart", "in your cart", "all rights reserved")
    return parts


def _is_boilerplate(line: str, wholes: frozenset[str], kinds: frozenset[str], most: int) -> bool:
    """Whether a line, in lower case, is boilerplate."""
    bare = line.strip(_ORNAMENTS)
    if bare in wholes or ("counters" in kinds and _COUNTER.fullmatch(bare)):
        return True
    if not bare:
        return False
    if "navigation" in kinds and (
        bare.startswith(_FIRST) or bare.endswith(_LAST) or any(part in bare for part in _WITHIN)
    ):
        return len(bare.split(maxsplit=_SHORT)) <= _SHORT
    if ("policies" in kinds and any(part in bare for part in _POLICIES)) or (
        "javascript" in kinds and "javascript" in bare and _JAVASCRIPT.search(bare)
    ):
        return len(bare.split(maxsplit=most)) <= most
    return False
