"""The repetition rules of Gopher (Rae et al. 2021, table A1).

See https://arxiv.org/abs/2112.11446. Counts are those of datatrove's ``GopherRepetitionFilter``; shares are of the
characters of the complete text.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from batchloom.text.steps import CleanFunction, DroppedText, NgramShares, Share, WordStep, check_limits

if TYPE_CHECKING:
    from batchloom.text.word_statistics import BatchWords, Ngrams

REPETITION_EMPTY: Final = "repetition: empty"
DUPLICATE_PARAGRAPHS: Final = "repetition: duplicate paragraphs"
PARAGRAPH_CHARACTERS: Final = "repetition: characters in duplicate paragraphs"
DUPLICATE_LINES: Final = "repetition: duplicate lines"
LINE_CHARACTERS: Final = "repetition: characters in duplicate lines"
TOP_NGRAM: Final = "repetition: most frequent {}-gram"
DUPLICATE_NGRAMS: Final = "repetition: duplicate {}-grams"

# A bound decides only if it is below the limit by this factor, because of rounding.
_MARGIN = 1 - 1e-9

I64 = npt.NDArray[np.int64]


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
    return WordStep(functools.partial(_find_drops, settings))


def _find_drops(settings: Repetition, texts: Sequence[str], words: "BatchWords") -> list[DroppedText | None]:
    drops = [_check_duplicate_parts(settings, text) for text in texts]
    ngrams = words.make_ngrams()
    # Most texts are far from the limits. The n-grams of the others are compared letter by letter.
    for n, limit, text in _find_top_candidates(settings.top_ngrams, ngrams, texts):
        drops[text] = drops[text] or _check_top_ngram(n, limit, texts[text], words.get_ends(text))
    for n, limit, text, starts in _find_duplicate_candidates(settings.duplicate_ngrams, ngrams, texts):
        drops[text] = drops[text] or _check_duplicate_ngrams(n, limit, texts[text], words.get_ends(text), starts)
    return drops


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


def _find_top_candidates(
    shares: NgramShares, ngrams: "Ngrams", texts: Sequence[str]
) -> Iterator[tuple[int, float, int]]:
    """Yield n, its limit, and each text whose most frequent n-gram may exceed it."""
    sizes, times = _measure(texts)[ngrams.texts], None
    for n, limit in _sort_shares(shares):
        lengths, most = ngrams.measure(n) + n - 1, limit * sizes * _MARGIN
        # An n-gram occurs at most as often as the shorter one that it begins with.
        times = ngrams.count(n, np.ones(len(lengths), bool)) if times is None else times
        candidates = times * lengths > most
        candidates &= ngrams.count(n, candidates) * lengths > most
        for text in np.unique(ngrams.texts[candidates]).tolist():
            yield n, limit, text


def _check_top_ngram(n: int, limit: float, text: str, ends: list[int]) -> DroppedText | None:
    letters = "".join(text.split())
    words = [letters[start:end] for start, end in pairwise(ends)]
    if len(words) < n:
        return None
    # Of those that are as frequent, the first one counts.
    (ngram, times), *_ = Counter(zip(*(words[start:] for start in range(n)), strict=False)).most_common(1)
    characters = times * len(" ".join(ngram))
    if characters / len(text) <= limit:
        return None
    detail = f"{' '.join(ngram)[:80]!r} {times:,} times, {_format_share(characters, len(text), limit)}"
    return DroppedText(TOP_NGRAM.format(n), detail)


def _find_duplicate_candidates(
    shares: NgramShares, ngrams: "Ngrams", texts: Sequence[str]
) -> Iterator[tuple[int, float, int, list[int]]]:
    """Yield n, its limit, and texts whose repeated n-grams may exceed it, with these."""
    sizes = _measure(texts)
    for n, limit in _sort_shares(shares):
        repeats, repeated = ngrams.find_repeats(n)
        characters = ngrams.measure_union(n, repeats)
        for text in np.flatnonzero(characters > limit * sizes * _MARGIN).tolist():
            start, stop = ngrams.bounds[text : text + 2]
            first, last = np.searchsorted(repeated, (start, stop))
            yield n, limit, text, (repeated[first:last] - start).tolist()


def _check_duplicate_ngrams(n: int, limit: float, text: str, ends: list[int], starts: list[int]) -> DroppedText | None:
    """Check the share of repeated n-grams, like datatrove's ``find_all_duplicate``.

    The words of a repeated n-gram are skipped, and n-grams that begin in them are not recorded.
    """
    letters, seen, characters, free = "".join(text.split()), set[str](), 0, 0
    for start in starts:
        if start < free or start + n >= len(ends):
            continue
        ngram = letters[ends[start] : ends[start + n]]
        if ngram in seen:
            characters += len(ngram)
            free = start + n
        else:
            seen.add(ngram)
    if characters / len(text) <= limit:
        return None
    return DroppedText(DUPLICATE_NGRAMS.format(n), _format_share(characters, len(text), limit))


def _sort_shares(shares: NgramShares) -> list[tuple[int, float]]:
    """Return (n, limit) by n; of those with the same n, the last counts."""
    return sorted({int(n): limit for n, limit in shares}.items())


def _measure(texts: Sequence[str]) -> I64:
    return np.fromiter(map(len, texts), np.int64, len(texts))
