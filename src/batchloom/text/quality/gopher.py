"""The quality rules of Gopher (Rae et al. 2021, appendix A.1.1).

See https://arxiv.org/abs/2112.11446. Counts are those of datatrove's ``GopherQualityFilter``: words as in
:mod:`batchloom.text.english_words`, including punctuation marks. The first violated rule is the drop reason.
"""

import functools
import re
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from batchloom.text.english_words import SEGMENT_WORDS, iter_words
from batchloom.text.steps import CleanFunction, Count, DroppedText, Number, Share, Words, check_limits
from batchloom.text.words import WordCounts, count_words

FEW_WORDS: Final = "gopher: too few words"
MANY_WORDS: Final = "gopher: too many words"
SHORT_WORDS: Final = "gopher: words too short"
LONG_WORDS: Final = "gopher: words too long"
HASHES: Final = "gopher: too many hash signs"
ELLIPSES: Final = "gopher: too many ellipses"
BULLETS: Final = "gopher: too many lines begin with a bullet"
ELLIPSIS_LINES: Final = "gopher: too many lines end with an ellipsis"
FEW_LETTERS: Final = "gopher: too few words with a letter"
FEW_STOP_WORDS: Final = "gopher: too few stop words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gopher:
    """Limits of Gopher's quality rules; None disables one. Defaults are as published.

    Attributes:
        min_words: minimum number of words that are not only punctuation.
        max_words: maximum number of these words.
        min_word_length: minimum mean length of these words in characters.
        max_word_length: maximum mean length of these words in characters.
        max_symbols: maximum ratio of ``#`` to words, and of ellipses to words.
        max_bullet_lines: maximum share of lines that begin with a bullet or a hyphen.
        max_ellipsis_lines: maximum share of lines that end with an ellipsis.
        min_letter_words: minimum share of words that have a letter.
        min_stop_words: minimum number of ``stop_words`` that occur.
        stop_words: stop words in lower case; matching is case-sensitive.
    """

    min_words: Count | None = 50
    max_words: Count | None = 100_000
    min_word_length: Number | None = 3.0
    max_word_length: Number | None = 10.0
    max_symbols: Number | None = 0.1
    max_bullet_lines: Share | None = 0.9
    max_ellipsis_lines: Share | None = 0.3
    min_letter_words: Share | None = 0.8
    min_stop_words: Count | None = 2
    stop_words: Words = ("the", "be", "to", "of", "and", "that", "have", "with")

    def __post_init__(self) -> None:
        check_limits(self)


def make_gopher_step(settings: Gopher) -> CleanFunction:
    """Return a function that drops texts that violate a rule."""
    return functools.partial(_clean_text, settings)


def _clean_text(settings: Gopher, text: str) -> str | DroppedText:
    counts = count_words(text)
    ellipses = text.count("...") + text.count("…")
    return (
        _check_words(settings, counts)
        or _check_symbols(settings, text, counts.words, ellipses)
        or _check_lines(settings, text, ellipses)
        or _check_word_kinds(settings, text, counts)
        or text
    )


def _check_words(settings: Gopher, counts: WordCounts) -> DroppedText | None:
    count = counts.words - counts.symbols
    if settings.min_words is not None and count < settings.min_words:
        return DroppedText(FEW_WORDS, f"{count:,} words, at least {settings.min_words:,}")
    if settings.max_words is not None and count > settings.max_words:
        return DroppedText(MANY_WORDS, f"{count:,} words, at most {settings.max_words:,}")
    if not count:
        return None
    mean = counts.characters / count
    if settings.min_word_length is not None and mean < settings.min_word_length:
        detail = f"{mean:.2f} characters per word, at least {settings.min_word_length:g}"
        return DroppedText(SHORT_WORDS, detail)
    if settings.max_word_length is not None and mean > settings.max_word_length:
        detail = f"{mean:.2f} characters per word, at most {settings.max_word_length:g}"
        return DroppedText(LONG_WORDS, detail)
    return None


def _check_symbols(settings: Gopher, text: str, count: int, ellipses: int) -> DroppedText | None:
    most = settings.max_symbols
    if most is not None and count:
        hashes = text.count("#")
        if hashes / count > most:
            return DroppedText(HASHES, f"{hashes:,} in {count:,} words, at most {most:g} per word")
        if ellipses / count > most:
            return DroppedText(ELLIPSES, f"{ellipses:,} in {count:,} words, at most {most:g} per word")
    return None


def _check_lines(settings: Gopher, text: str, ellipses: int) -> DroppedText | None:
    most = settings.max_bullet_lines
    most_ends = settings.max_ellipsis_lines
    # Most texts have too few of these characters for their line ends.
    least_lines = text.count("\n")
    may_have_bullets = most is not None and text.count("•") + text.count("-") > most * least_lines
    may_have_ends = most_ends is not None and ellipses > most_ends * least_lines
    lines = text.splitlines() if may_have_bullets or may_have_ends else []
    if most is not None and may_have_bullets and lines:
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        if bullets / len(lines) > most:
            return DroppedText(BULLETS, _format_line_share(bullets, len(lines), most))
    if most_ends is not None and may_have_ends and lines:
        ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        if ends / len(lines) > most_ends:
            return DroppedText(ELLIPSIS_LINES, _format_line_share(ends, len(lines), most_ends))
    return None


def _format_line_share(count: int, total: int, most: float) -> str:
    return f"{count:,} of {total:,} lines, at most {most:.0%}"


def _check_word_kinds(settings: Gopher, text: str, counts: WordCounts) -> DroppedText | None:
    least = settings.min_letter_words
    share = counts.letter_words / counts.words if counts.words else 1
    if least is not None and share < least:
        requirement = f"at least {least:.0%}"
        return DroppedText(FEW_LETTERS, f"{counts.letter_words:,} of {counts.words:,} words, {requirement}")
    if settings.min_stop_words is not None:
        count = _count_stop_words(settings.stop_words, settings.min_stop_words, text)
        if count < settings.min_stop_words:
            requirement = f"at least {settings.min_stop_words} of {', '.join(settings.stop_words)}"
            return DroppedText(FEW_STOP_WORDS, f"{count} stop words, {requirement}")
    return None


def _count_stop_words(stop_words: tuple[str, ...], least: int, text: str) -> int:
    """Return the number of stop words that occur, or some number from ``least`` on."""
    spaced_words, pattern = _make_stop_patterns(stop_words)
    # Most texts have enough of them between spaces; only the others need the words of their segments.
    count = len(list(islice(filter(text.__contains__, spaced_words), least)))
    if count < least:
        segments = filter(pattern.search, set(text.split()))
        count = len(set(stop_words).intersection(chain.from_iterable(map(SEGMENT_WORDS.__getitem__, segments))))
    return count


@functools.lru_cache(16)
def _make_stop_patterns(words: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Return never split stop words between spaces, and a pattern of all of them."""
    spaced = tuple([f" {word} " for word in dict.fromkeys(words) if tuple(iter_words(word)) == (word,)])
    return spaced, re.compile("|".join(map(re.escape, words)))
