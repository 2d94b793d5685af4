"""White space: Unicode spaces become spaces, and invisible blanks are removed."""

import re
from dataclasses import dataclass

from batchloom.core.settings import coerce_int_fields, raise_problems
from batchloom.text.steps import CleanFunction

# Category Zs without the space itself, spelled out so that every Python matches the same.
_UNICODE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# Each begins with one character, which is found at memory speed; the lookbehind is checked
# afterwards. Blanks at the beginning of a line are its indentation.
_SPACE_RUNS = re.compile(r" (?<=[^ \t\n] )[ \t]++")
_TAB_RUNS = re.compile(r"\t(?<=[^ \t\n]\t)[ \t]++")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitespaceSettings:
    """Settings of the step ``whitespace``.

    Attributes:
        spaces: whether other Unicode spaces (no-break, ideographic ...) become a space.
        runs: whether runs of blanks inside a line become one space; indentation stays.
        trailing: whether blanks at the end of a line are removed.
        blank_lines: maximum number of consecutive empty lines; None: no limit.
    """

    spaces: bool = True
    runs: bool = True
    trailing: bool = True
    blank_lines: int | None = 2

    def __post_init__(self) -> None:
        if self.blank_lines is not None:
            raise_problems(coerce_int_fields(self, {"blank_lines": (0, 1 << 30)}))


def make_whitespace_step(settings: WhitespaceSettings) -> CleanFunction:
    """Return the function of the step."""
    most = settings.blank_lines
    breaks = "\n" * (2 if most is None else most + 2)
    many = re.compile(f"{breaks}\n*+")

    def clean(text: str) -> str:
        if settings.spaces and not text.isascii() and _UNICODE_SPACES.search(text):
            text = _UNICODE_SPACES.sub(" ", text)
        if settings.trailing:
            text = _strip_trailing(text)
        if settings.runs:
            text = _collapse_runs(text)
        if most is None or breaks[1:] not in text:
            return text
        if text.startswith(breaks[1:]):  # The first line has no line end before it that would count.
            text = breaks[2:] + text.lstrip("\n")
        return many.sub(breaks[1:], text) if breaks in text else text

    return clean


def _strip_trailing(text: str) -> str:
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        return "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    return text


def _collapse_runs(text: str) -> str:
    if "\t" in text:
        return _TAB_RUNS.sub(" ", _SPACE_RUNS.sub(" ", text))
    return _SPACE_RUNS.sub(" ", text) if "  " in text else text
