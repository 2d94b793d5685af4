"""The repetition rules of Gopher (Rae et al. 2021, table A1).

See https://arxiv.org/abs/2112.11446. Counts are those of datatrove's ``GopherRepetitionFilter``; shares are of the
characters of the complete text.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from batchloom.text.steps import CleanFunction, DroppedText, NgramShares, Share, check_limits
from batchloom.text.words import NgramLimits, find_excess

REPETITION_EMPTY: Final = "repetition: empty"
DUPLICATE_PARAGRAPHS: Final = "repetition: duplicate paragraphs"
PARAGRAPH_CHARACTERS: Final = "repetition: characters in duplicate paragraphs"
DUPLICATE_LINES: Final = "repetition: duplicate lines"
LINE_CHARACTERS: Final = "repetition: characters in duplicate lines"
TOP_NGRAM: Final = "repetition: most frequent {}-gram"
DUPLICATE_NGRAMS: Final = "repetition: duplicate {}-grams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Limits of Gopher's repetition rules; None or a missing pair disables one.

    Attributes:
        max_duplicate_paragraphs: maximum share of paragraphs that occurred before in the document.
        max_duplicate_paragraph_characters: maximum share of the characters in these paragraphs.
        max_duplicate_lines: maximum share of lines that occurred before in the document.
        max_duplicate_line_characters: maximum share of the characters in these lines.
        top_ngrams: (n, limit) pairs: maximum share of the characters in the most frequent n-gram of words.
        duplicate_ngrams: (n, limit) pairs: maximum share of the characters in repeated n-grams.
    """

    max_duplicate_paragraphs: Share | None = 0.3
    max_duplicate_paragraph_characters: Share | None = 0.2
    max_duplicate_lines: Share | None = 0.3
    max_duplicate_line_characters: Share | None = 0.2
    top_ngrams: NgramShares = ((2, 0.2), (3, 0.18), (4, 0.16))
    duplicate_ngrams: NgramShares = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))

    def __post_init__(self) -> None:
        check_limits(self)


def make_repetition_step(settings: Repetition) -> CleanFunction:
    """Return a function that drops texts with too much repetition."""
    tops = _sort_limits(settings.top_ngrams)
    duplicates = _sort_limits(settings.duplicate_ngrams)
    return functools.partial(_clean_text, settings, tops, duplicates)


def _sort_limits(shares: NgramShares) -> NgramLimits:
    """Return (n, limit) by n; of those with the same n, the last counts."""
    return tuple(sorted({int(n): float(limit) for n, limit in shares}.items()))


def _clean_text(settings: Repetition, tops: NgramLimits, duplicates: NgramLimits, text: str) -> str | DroppedText:
    return _check_duplicate_parts(settings, text) or _check_ngrams(tops, duplicates, text) or text


def _check_duplicate_parts(settings: Repetition, text: str) -> DroppedText | None:
    if not text:
        return DroppedText(REPETITION_EMPTY, "no characters")
    paragraph_drop = _check_repeats(
        split_paragraphs(text),
        len(text),
        (settings.max_duplicate_paragraphs, settings.max_duplicate_paragraph_characters),
        (DUPLICATE_PARAGRAPHS, PARAGRAPH_CHARACTERS),
    )
    return paragraph_drop or _check_repeats(
        split_lines(text),
        len(text),
        (settings.max_duplicate_lines, settings.max_duplicate_line_characters),
        (DUPLICATE_LINES, LINE_CHARACTERS),
    )


def _check_repeats(
    parts: list[str], size: int, limits: tuple[float | None, float | None], reasons: tuple[str, str]
) -> DroppedText | None:
    (count, characters), (most, most_characters) = count_duplicates(parts), limits
    if most is not None and count / len(parts) > most:
        return DroppedText(reasons[0], f"{count:,} of {len(parts):,}, at most {most:.0%}")
    if most_characters is not None and characters / size > most_characters:
        return DroppedText(reasons[1], _format_share(characters, size, most_characters))
    return None


def split_paragraphs(text: str) -> list[str]:
    """Split the stripped text at runs of two or more newlines, like ``re.split``."""
    parts = text.strip().split("\n\n")
    return [part.lstrip("\n") for part in parts if part] or [""]


def split_lines(text: str) -> list[str]:
    """Split at runs of newlines, like ``re.split``: a newline at an end adds ""."""
    lines = list(filter(None, text.split("\n")))
    return [""] * text.startswith("\n") + lines + [""] * text.endswith("\n")


def _format_share(characters: int, size: int, most: float) -> str:
    return f"{characters / size:.1%} of {size:,} characters, at most {most:.0%}"


def count_duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of parts that occurred before, and their characters."""
    distinct = set(parts)
    if len(distinct) == len(parts):
        return 0, 0
    characters = sum(map(len, parts)) - sum(map(len, distinct))
    return len(parts) - len(distinct), characters


def _check_ngrams(tops: NgramLimits, duplicates: NgramLimits, text: str) -> DroppedText | None:
    excess = find_excess(text, tops, duplicates)
    if excess is None:
        return None
    detail = _format_share(excess.characters, len(text), excess.share)
    if not excess.times:
        return DroppedText(DUPLICATE_NGRAMS.format(excess.n), detail)
    return DroppedText(TOP_NGRAM.format(excess.n), f"{excess.ngram[:80]!r} {excess.times:,} times, {detail}")
