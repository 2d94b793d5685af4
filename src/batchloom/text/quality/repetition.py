"""The repetition rules of Gopher (Rae et al. 2021, table A1).

See https://arxiv.org/abs/2112.11446. Counts are those of datatrove's ``GopherRepetitionFilter``; shares are of the
characters of the complete text. N-grams are compared by 64-bit hashes.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from batchloom.text.english_words import SPACE_HASH, SPACE_POWER, U64, compute_word_statistics, iter_words
from batchloom.text.steps import CleanFunction, DroppedText, NgramShares, Share, check_limits

REPETITION_EMPTY: Final = "repetition: empty"
DUPLICATE_PARAGRAPHS: Final = "repetition: duplicate paragraphs"
PARAGRAPH_CHARACTERS: Final = "repetition: characters in duplicate paragraphs"
DUPLICATE_LINES: Final = "repetition: duplicate lines"
LINE_CHARACTERS: Final = "repetition: characters in duplicate lines"
TOP_NGRAM: Final = "repetition: most frequent {}-gram"
DUPLICATE_NGRAMS: Final = "repetition: duplicate {}-grams"

# A bound decides only if it is below the limit by this factor, because of rounding.
_MARGIN = 1 - 1e-9

WordEnds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Limits of Gopher's repetition rules; None or a missing pair disables one.

    Attributes:
        max_duplicate_paragraphs, max_duplicate_lines: share of paragraphs (lines) that occurred
            before in the document.
        max_duplicate_paragraph_characters, max_duplicate_line_characters: share of the characters
            in them.
        top_ngrams: (n, limit) pairs: share of the characters in the most frequent n-gram of words.
        duplicate_ngrams: (n, limit) pairs: share of the characters in repeated n-grams.
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
    return functools.partial(_clean_text, settings)


def _clean_text(settings: Repetition, text: str) -> str | DroppedText:
    if not text:
        return DroppedText(REPETITION_EMPTY, "no characters")
    return _check_duplicate_parts(settings, text) or _check_ngrams(settings, text) or text


def _check_duplicate_parts(settings: Repetition, text: str) -> DroppedText | None:
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


def _check_ngrams(settings: Repetition, text: str) -> DroppedText | None:
    statistics, size = compute_word_statistics(text), len(text)
    ends: WordEnds = np.zeros(len(statistics) + 1, np.int64)
    np.cumsum(statistics.lengths, out=ends[1:])
    tops = {int(n): most for n, most in settings.top_ngrams}
    hashes = _iter_ngram_hashes(statistics.hashes * SPACE_POWER + SPACE_HASH, statistics.powers * SPACE_POWER)
    for n, grams in _select_ngram_sizes(hashes, tops):
        top = _find_top_ngram(ends, grams, n, tops[n] * size * _MARGIN)
        if top and top[0] * top[2] / size > tops[n]:
            times, first, length = top
            ngram = " ".join(islice(iter_words(text), first, first + n))
            detail = f"{ngram[:80]!r} {times:,} times, {_format_share(times * length, size, tops[n])}"
            return DroppedText(TOP_NGRAM.format(n), detail)
    limits = {int(n): most for n, most in settings.duplicate_ngrams}
    for n, grams in _select_ngram_sizes(_iter_ngram_hashes(statistics.hashes, statistics.powers), limits):
        # Sorting halves of hashes takes a third of the time. They bound the repeats, and decide for most texts.
        halves = np.sort(grams.astype(np.uint32))
        repeats = int(np.count_nonzero(halves[1:] == halves[:-1]))
        if not repeats or repeats * int((ends[n:] - ends[:-n]).max()) <= limits[n] * size * _MARGIN:
            continue
        characters = _count_repeated_characters(ends, grams, n)
        if characters / size > limits[n]:
            return DroppedText(DUPLICATE_NGRAMS.format(n), _format_share(characters, size, limits[n]))
    return None


def _select_ngram_sizes(hashes: Iterator[tuple[int, U64]], limits: dict[int, float]) -> Iterator[tuple[int, U64]]:
    most = max(limits, default=0)
    for n, grams in islice(hashes, most):
        if n in limits and len(grams):
            yield n, grams


def _iter_ngram_hashes(hashes: U64, powers: U64) -> Iterator[tuple[int, U64]]:
    """Yield n and the hash of the n words from each word on, for n = 1, 2, ..."""
    grams, n = hashes, 1
    while True:
        yield n, grams
        grams = grams[:-1] * powers[n:] + hashes[n:] if len(grams) > 1 else grams[:0]
        n += 1


def _find_top_ngram(ends: WordEnds, grams: U64, n: int, most: float) -> tuple[int, int, int] | None:
    """Return count, first word index and characters of the most frequent n-gram.

    Returns None if it covers at most ``most`` characters. The first one wins a tie.
    """
    lengths = ends[n:] - ends[:-n]
    lengths += n - 1
    longest = int(lengths.max())
    ordered = np.sort(grams)
    is_last = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_last[:-1])
    lasts = is_last.nonzero()[0]
    if (len(ordered) - len(lasts) + 1) * longest <= most:
        return None
    counts = lasts.copy()
    counts[0] += 1
    counts[1:] -= lasts[:-1]
    times = int(counts.max())
    if times * longest <= most:
        return None
    frequent = ordered[lasts[counts == times]]
    at = np.minimum(np.searchsorted(frequent, grams), len(frequent) - 1)
    first = int((frequent[at] == grams).argmax())
    return times, first, int(lengths[first])


def _count_repeated_characters(ends: WordEnds, grams: U64, n: int) -> int:
    """Count the characters of repeated n-grams, each once.

    As in datatrove's ``find_all_duplicate``, the words of a repeated n-gram are skipped, and n-grams that begin
    in them are not recorded.
    """
    ordered = np.sort(grams)
    repeated_hashes = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated_hashes):
        return 0
    repeated_hashes = repeated_hashes[np.concatenate(([True], repeated_hashes[1:] != repeated_hashes[:-1]))]
    kind = np.minimum(np.searchsorted(repeated_hashes, grams), len(repeated_hashes) - 1)
    starts = np.flatnonzero(repeated_hashes[kind] == grams)
    counted_starts = _rank_first_occurrences(starts.tolist(), kind[starts].tolist(), n)
    return int((ends[counted_starts + n] - ends[counted_starts]).sum())


def _rank_first_occurrences(starts: list[int], kinds: list[int], n: int) -> npt.NDArray[np.int64]:
    seen_kinds: set[int] = set()
    counted_starts, free = [], 0
    for start, kind in zip(starts, kinds, strict=True):
        if start < free:
            continue
        if kind in seen_kinds:
            counted_starts.append(start)
            free = start + n
        else:
            seen_kinds.add(kind)
    return np.array(counted_starts, np.int64)
