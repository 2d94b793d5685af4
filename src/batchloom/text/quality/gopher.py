"""The quality rules of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, appendix A.1.1).

Counted as datatrove's ``GopherQualityFilter`` counts: words as in :mod:`batchloom.text.english_words`, a
mark of punctuation among them; the first rule that a document breaks is its reason.
"""

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np

from batchloom.core.settings import raise_problems
from batchloom.text.quality.rule_limits import limit_problems
from batchloom.text.quality.word_statistics import hash_of, measured
from batchloom.text.steps import Clean, Drop

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
REASONS: Final = (
    *(FEW_WORDS, MANY_WORDS, SHORT_WORDS, LONG_WORDS, HASHES, ELLIPSES),
    *(BULLETS, ELLIPSIS_LINES, FEW_LETTERS, FEW_STOP_WORDS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gopher:
    """The limits of Gopher's quality rules; None switches one off. Defaults are the published ones.

    Attributes:
        min_words, max_words: words that are not punctuation alone.
        min_word_length, max_word_length: their mean length in characters.
        max_symbols: of ``#`` to words, and of ellipses to words.
        max_bullet_lines: share of lines that begin with a bullet or a hyphen.
        max_ellipsis_lines: share of lines that end with an ellipsis.
        min_letter_words: share of words that have a letter.
        min_stop_words: how many of ``stop_words`` occur.
        stop_words: in lower case, as they must stand in the text.
    """

    min_words: int | None = 50
    max_words: int | None = 100_000
    min_word_length: float | None = 3.0
    max_word_length: float | None = 10.0
    max_symbols: float | None = 0.1
    max_bullet_lines: float | None = 0.9
    max_ellipsis_lines: float | None = 0.3
    min_letter_words: float | None = 0.8
    min_stop_words: int | None = 2
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")

    def __post_init__(self) -> None:
        raise_problems(
            limit_problems(
                self,
                whole=("min_words", "max_words", "min_stop_words"),
                number=("min_word_length", "max_word_length", "max_symbols"),
                share=("max_bullet_lines", "max_ellipsis_lines", "min_letter_words"),
                words=("stop_words",),
            )
        )


def make(settings: Gopher) -> Clean:
    """The step that drops what breaks a rule and leaves the rest as it is."""
    return functools.partial(_clean, settings)


def _clean(settings: Gopher, text: str) -> str | Drop:
    return _words(settings, text) or _symbols(settings, text) or _kinds(settings, text) or text


def _words(settings: Gopher, text: str) -> Drop | None:
    found = measured(text)
    plain = ~found.symbols
    count = int(np.count_nonzero(plain))
    if settings.min_words is not None and count < settings.min_words:
        return Drop(FEW_WORDS, f"{count:,} words, at least {settings.min_words:,}")
    if settings.max_words is not None and count > settings.max_words:
        return Drop(MANY_WORDS, f"{count:,} words, at most {settings.max_words:,}")
    if not count:
        return None
    mean = int(found.lengths[plain].sum()) / count
    if settings.min_word_length is not None and mean < settings.min_word_length:
        detail = f"{mean:.2f} characters a word, at least {settings.min_word_length:g}"
        return Drop(SHORT_WORDS, detail)
    if settings.max_word_length is not None and mean > settings.max_word_length:
        detail = f"{mean:.2f} characters a word, at most {settings.max_word_length:g}"
        return Drop(LONG_WORDS, detail)
    return None


def _symbols(settings: Gopher, text: str) -> Drop | None:
    count, most = len(measured(text)), settings.max_symbols
    if most is not None and count:
        hashes, ellipses = text.count("#"), text.count("...") + text.count("…")
        if hashes / count > most:
            return Drop(HASHES, f"{hashes:,} to {count:,} words, at most {most:g} a word")
        if ellipses / count > most:
            return Drop(ELLIPSES, f"{ellipses:,} to {count:,} words, at most {most:g} a word")
    return _lines(settings, text.splitlines())


def _lines(settings: Gopher, lines: list[str]) -> Drop | None:
    if settings.max_bullet_lines is not None and lines:
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        if bullets / len(lines) > settings.max_bullet_lines:
            return Drop(BULLETS, _of_lines(bullets, len(lines), settings.max_bullet_lines))
    if settings.max_ellipsis_lines is not None and lines:
        ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        if ends / len(lines) > settings.max_ellipsis_lines:
            return Drop(ELLIPSIS_LINES, _of_lines(ends, len(lines), settings.max_ellipsis_lines))
    return None


def _of_lines(count: int, every: int, most: float) -> str:
    return f"{count:,} of {every:,} lines, at most {most:.0%}"


def _kinds(settings: Gopher, text: str) -> Drop | None:
    found = measured(text)
    if settings.min_letter_words is not None and len(found):
        count = int(np.count_nonzero(found.letters))
        if count / len(found) < settings.min_letter_words:
            asked = f"at least {settings.min_letter_words:.0%}"
            return Drop(FEW_LETTERS, f"{count:,} of {len(found):,} words, {asked}")
    if settings.min_stop_words is not None:
        stops = _hashes(settings.stop_words)
        count = sum(bool((found.hashes == stop).any()) for stop in stops)
        if count < settings.min_stop_words:
            asked = f"at least {settings.min_stop_words} of {', '.join(settings.stop_words)}"
            return Drop(FEW_STOP_WORDS, f"{count} stop words, {asked}")
    return None


@functools.lru_cache(16)
def _hashes(words: tuple[str, ...]) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(hash_of(word)[0]) for word in dict.fromkeys(words))
