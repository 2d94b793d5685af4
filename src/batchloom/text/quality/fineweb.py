"""The filters of FineWeb (Penedo et al. 2024, section 3.6).

See https://arxiv.org/abs/2406.17557. Counts are those of datatrove's ``FineWebQualityFilter`` with its defaults.
"""

import functools
from dataclasses import dataclass
from typing import Final

from batchloom.text.english_words import iter_words, load_english_set
from batchloom.text.quality.repetition import count_duplicates
from batchloom.text.steps import CleanFunction, Count, DroppedText, Number, Share, Switch, check_limits

FINEWEB_EMPTY: Final = "fineweb: empty"
FEW_ENDS: Final = "fineweb: too few lines end with punctuation"
SHORT_LINES: Final = "fineweb: too many short lines"
DUPLICATES: Final = "fineweb: too many characters in duplicate lines"
NEWLINES: Final = "fineweb: too many newlines"


@dataclass(frozen=True, slots=True, kw_only=True)
class FineWeb:
    """Limits of FineWeb's filters; None disables one. Defaults are as published.

    Attributes:
        min_ended_lines: minimum share of lines that end with terminal punctuation.
        spare_unended: let a document without any such line pass.
        max_short_lines: maximum share of lines of at most ``short_line`` characters.
        short_line: length of a short line in characters.
        max_duplicate_characters: maximum share of characters in lines that occurred before.
        max_newlines: maximum ratio of newlines to words.
    """

    min_ended_lines: Share | None = 0.12
    spare_unended: Switch = False
    max_short_lines: Share | None = 0.67
    short_line: Count = 30
    max_duplicate_characters: Share | None = 0.01
    max_newlines: Number | None = 0.3

    def __post_init__(self) -> None:
        check_limits(self)


def make_fineweb_step(settings: FineWeb) -> CleanFunction:
    """Return a function that drops texts that violate a rule."""
    return functools.partial(_clean_text, settings)


def _clean_text(settings: FineWeb, text: str) -> str | DroppedText:
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return DroppedText(FINEWEB_EMPTY, "no line that is not blank")
    return _check_line_ends(settings, lines) or _check_repeated_lines(settings, lines, text) or text


def _check_line_ends(settings: FineWeb, lines: list[str]) -> DroppedText | None:
    if settings.min_ended_lines is not None:
        marks = load_english_set("terminal_punctuation")
        ended = sum(line[-1] in marks for line in lines)
        spared = settings.spare_unended and not ended
        if ended / len(lines) < settings.min_ended_lines and not spared:
            requirement = f"at least {settings.min_ended_lines:.0%}"
            return DroppedText(FEW_ENDS, f"{ended:,} of {len(lines):,} lines, {requirement}")
    if settings.max_short_lines is not None:
        short = sum(len(line) <= settings.short_line for line in lines)
        if short / len(lines) > settings.max_short_lines:
            requirement = f"at most {settings.max_short_lines:.0%}"
            return DroppedText(SHORT_LINES, f"{short:,} of {len(lines):,} lines, {requirement}")
    return None


def _check_repeated_lines(settings: FineWeb, lines: list[str], text: str) -> DroppedText | None:
    newlines = text.count("\n")
    if settings.max_duplicate_characters is not None:
        _, characters = count_duplicates(lines)
        size = len(text) - newlines
        if characters / size > settings.max_duplicate_characters:
            requirement = f"at most {settings.max_duplicate_characters:.0%}"
            share = f"{characters / size:.1%} of {size:,} characters"
            return DroppedText(DUPLICATES, f"{share}, {requirement}")
    # A text has at least as many words as segments.
    if settings.max_newlines is not None and newlines / len(text.split()) > settings.max_newlines:
        count = sum(1 for _ in iter_words(text))
        if newlines / count > settings.max_newlines:
            requirement = f"at most {settings.max_newlines:g} per word"
            return DroppedText(NEWLINES, f"{newlines:,} in {count:,} words, {requirement}")
    return None
