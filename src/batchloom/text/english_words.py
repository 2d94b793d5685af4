"""Segmentation of English into words and sentences, as by spaCy.

The published quality rules count words as datatrove does, and datatrove counts those of
``spacy.blank("en")``: white space separates, affixes are stripped (``("word",`` is four
words), contractions are split (``don't`` is ``do n't``), abbreviations and URLs are not split.
This module applies the same rules to each segment between white space, in time linear in its
length for any input, and caches the words of each segment.

One thing differs: spaCy searches its exceptions (``:-)``, ``a.m.``) among all words of a text, so
that one that spans a space hides another that overlaps it; here each segment is separate.
"""

import functools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

# Bounds of the segment cache: enough for the common ones, a few MiB.
_MAX_CACHED_SEGMENTS = 1 << 16
_MAX_CACHED_LENGTH = 64
# No suffix is longer except a run of dots, including its lookbehind.
_SUFFIX_REACH = 16

# The infixes of ``english.json`` restricted to ASCII, which shortens their letter classes.
_INFIX_ASCII = re.compile(
    r"\.\.+|(?<=[0-9])[+\-*^](?=[0-9-])|(?<=[a-z'\"`,])\.(?=[A-Z'\"`,])|(?<=[a-zA-Z]),(?=[a-zA-Z])"
    r"|(?<=[a-zA-Z0-9])(?:-{1,3}|~)(?=[a-zA-Z])|(?<=[a-zA-Z0-9])[:<>=/](?=[a-zA-Z])"
)
# First letters of the prefixes that begin with a letter: US$, C$, A$.
_PREFIX_LETTERS = frozenset("UCA")

# spaCy's URL_PATTERN (Diego Perini, MIT) without ``(?::\S*)?`` in its user part, which the ``\S+``
# before it already matches: the same strings match, in linear time.
_URL = (
    r"(?:(?:[\w\+\-\.]{2,})://)?(?:\S+@)?(?:"
    r"(?!(?:10|127)(?:\.\d{1,3}){3})(?!(?:169\.254|192\.168)(?:\.\d{1,3}){2})"
    r"(?!172\.(?:1[6-9]|2\d|3[0-1])(?:\.\d{1,3}){2})"
    r"(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])(?:\.(?:1?\d{1,2}|2[0-4]\d|25[0-5])){2}"
    r"(?:\.(?:[1-9]\d?|1\d\d|2[0-4]\d|25[0-4]))"
    r"|(?:(?:[A-Za-z0-9\u00a1-\uffff][A-Za-z0-9\u00a1-\uffff_-]{0,62})?[A-Za-z0-9\u00a1-\uffff]\.)+"
    r"(?:[@LOWER@]{2,63}))(?::\d{2,5})?(?:[/?#]\S*)?$"
)


@final
@dataclass(frozen=True, slots=True)
class _EnglishRules:
    """Compiled rules of ``english.json``.

    Attributes:
        prefix, suffix, infix, url: regular expressions.
        ends: ASCII characters that are a suffix in any context.
        special: segments with predefined words.
        phrases: predefined words by the words that the segment would be split into.
        reaches: numbers of words of such phrases, by first word.
        longest: characters of the longest special segment.
    """

    prefix: re.Pattern[str]
    suffix: re.Pattern[str]
    infix: re.Pattern[str]
    url: re.Pattern[str]
    ends: frozenset[str]
    special: Mapping[str, tuple[str, ...]]
    phrases: dict[tuple[str, ...], tuple[str, ...]]
    reaches: dict[str, tuple[int, ...]]
    longest: int


@functools.cache
def load_english_tables() -> Mapping[str, Any]:
    """Load the tables of ``english.json``, which names their sources."""
    tables: Mapping[str, Any] = json.loads(Path(__file__).with_name("english.json").read_bytes())
    return tables


@functools.cache
def _load_rules() -> _EnglishRules:
    tables = load_english_tables()
    special = {entry.replace(" ", ""): tuple(entry.split()) for entry in tables["special"]}
    suffix = re.compile("|".join(f"{suffix}$" for suffix in tables["suffixes"]))
    rules = _EnglishRules(
        re.compile("|".join(tables["prefixes"])),
        suffix,
        re.compile("|".join(tables["infixes"])),
        re.compile(_URL.replace("@LOWER@", tables["lower"])),
        frozenset(filter(suffix.match, map(chr, range(128)))),
        special,
        {},
        {},
        max(map(len, special)),
    )
    for segment, words in special.items():
        split_words = tuple(_split_segment(segment, rules, {}))
        if len(split_words) > 1 or (rules.prefix.match(segment) and split_words != words):
            rules.phrases[split_words] = words
            rules.reaches[split_words[0]] = tuple({*rules.reaches.get(split_words[0], ()), len(split_words)})
    return rules


def _split_segment(segment: str, rules: _EnglishRules, special: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Split a segment into words, without exceptions that affixes hide."""
    before: list[str] = []
    after: list[str] = []
    start, stop = _strip_affixes(segment, rules, special, before, after)
    core = segment[start:stop]
    if not core:
        words = []
    elif core in special:
        words = list(special[core])
    elif "." in core and rules.url.match(core):
        words = [core]
    else:
        words = _split_infixes(core, rules)
    return before + words + after[::-1]


def _strip_affixes(
    segment: str,
    rules: _EnglishRules,
    special: Mapping[str, tuple[str, ...]],
    before: list[str],
    after: list[str],
) -> tuple[int, int]:
    """Strip prefixes and suffixes; return the bounds of the rest."""
    start, stop, longest = 0, len(segment), rules.longest
    while start < stop:
        if stop - start <= longest and segment[start:stop] in special:
            break
        inner = _find_prefix_end(segment, rules, start, stop)
        if start < inner and 0 < stop - inner <= longest and segment[inner:stop] in special:
            before.append(segment[start:inner])
            return inner, stop
        outer = _find_suffix_start(segment, rules, inner, stop)
        if outer < stop and 0 < outer - start <= longest and segment[start:outer] in special:
            after.append(segment[outer:stop])
            return start, outer
        if start < inner:
            before.append(segment[start:inner])
        if outer < stop:
            after.append(segment[outer:stop])
        if start == inner and outer == stop:
            break
        start, stop = inner, outer
    return start, stop


def _find_prefix_end(segment: str, rules: _EnglishRules, start: int, stop: int) -> int:
    """Return the end of the prefix of ``segment[start:stop]``, or ``start``."""
    first = segment[start]
    if first.isascii() and first.isalnum() and first not in _PREFIX_LETTERS:
        return start
    match = rules.prefix.match(segment, start, stop)
    return match.end() if match else start


def _find_suffix_start(segment: str, rules: _EnglishRules, start: int, stop: int) -> int:
    """Return the start of the suffix of ``segment[start:stop]``, or ``stop``."""
    tail = segment[max(start, stop - _SUFFIX_REACH) : stop]
    last = tail[-1:]
    if last in rules.ends or (last == "." and "a" <= tail[-2:-1] <= "z"):
        return stop - 1
    if last == "." and tail.endswith(".."):
        at = stop - 2
        while at > start and segment[at - 1] == ".":
            at -= 1
        return at
    # A suffix of letters follows a digit, or is 's.
    if tail.isascii() and last.isalnum() and (last.isdigit() or tail.isalpha()):
        return stop
    match = rules.suffix.search(tail)
    return stop - len(tail) + match.start() if match else stop


def _split_infixes(core: str, rules: _EnglishRules) -> list[str]:
    """Split a word at infixes, which are words, too."""
    if not core.isascii():
        infix = rules.infix
    elif core.isalnum():
        return [core]
    else:
        infix = _INFIX_ASCII
    words, start = [], 0
    for match in infix.finditer(core):
        at, stop = match.span()
        if at == 0:
            continue
        if at != start:
            words.append(core[start:at])
        words.append(core[at:stop])
        start = stop
    if start < len(core):
        words.append(core[start:])
    return words


def _merge_phrases(words: list[str], rules: _EnglishRules) -> list[str]:
    """Merge split exceptions again: the longest first, then the leftmost."""
    if len(words) == 1:
        return words
    candidates = [
        (-reach, at)
        for at, word in enumerate(words)
        for reach in rules.reaches.get(word, ())
        if at + reach <= len(words) and tuple(words[at : at + reach]) in rules.phrases
    ]
    if not candidates:
        return words
    covered_words: set[int] = set()
    phrase_stops: dict[int, int] = {}
    for reach, at in sorted(candidates):
        if at not in covered_words and at - reach - 1 not in covered_words:
            phrase_stops[at] = at - reach
        covered_words.update(range(at, at - reach))
    out: list[str] = []
    at = 0
    while at < len(words):
        stop = phrase_stops.get(at, 0)
        out += rules.phrases[tuple(words[at:stop])] if stop else words[at : at + 1]
        at = stop or at + 1
    return out


def split_segment_words(segment: str) -> tuple[str, ...]:
    """Split a segment without white space into words."""
    rules = _load_rules()
    if segment in rules.special:
        return rules.special[segment]
    if segment.isascii() and segment.isalpha():
        return (segment,)
    core, last = segment[:-1], segment[-1:]
    if (
        (last in rules.ends or (last == "." and core[-1:].islower()))
        and core.isascii()
        and core.isalpha()
        and core not in rules.special
    ):
        return core, last
    return tuple(_merge_phrases(_split_segment(segment, rules, rules.special), rules))


@final
class _SegmentWordCache(dict[str, tuple[str, ...]]):
    """Lazy cache of the words of each segment."""

    def __missing__(self, segment: str) -> tuple[str, ...]:
        words = split_segment_words(segment)
        if len(segment) <= _MAX_CACHED_LENGTH:
            if len(self) >= _MAX_CACHED_SEGMENTS:
                self.clear()
            self[segment] = words
        return words


_SEGMENT_WORDS = _SegmentWordCache()


def iter_words(text: str) -> Iterator[str]:
    """Return an iterator over the words of a text."""
    return chain.from_iterable(map(_SEGMENT_WORDS.__getitem__, text.split()))


_ODD_SPACE = re.compile(r"^ |  |[^\S ]")
_SPACE_OR_PIECE = re.compile(r"\s+|\S+")


def count_sentences(line: str, most: int) -> int:
    """Count the sentences of a text, up to ``most``.

    A sentence ends with ``. ! ?`` or similar as a word of its own, plus the punctuation that
    follows.
    """
    ends, count, ended = _load_sentence_ends(), 0, False
    for word in _iter_words_and_spaces(line):
        count = count or 1
        if word in ends:
            ended = True
        elif ended and not is_punctuation(word):
            count, ended = count + 1, False
            if count >= most:
                break
    return min(count, most)


def _iter_words_and_spaces(text: str) -> Iterator[str]:
    """Yield words and white space, except a single space before a word."""
    if text.isascii() and not _ODD_SPACE.search(text):
        yield from iter_words(text)
        return
    for match in _SPACE_OR_PIECE.finditer(text):
        segment = match[0]
        if not segment.isspace():
            yield from _SEGMENT_WORDS[segment]
        elif match.start() and segment.startswith(" "):
            if len(segment) > 1:
                yield segment[1:]
        else:
            yield segment


@functools.cache
def _load_sentence_ends() -> frozenset[str]:
    return frozenset(load_english_tables()["sentence_ends"])


@functools.lru_cache(4096)
def is_punctuation(word: str) -> bool:
    """Return whether every character of a word is of Unicode's category P."""
    return all(unicodedata.category(char).startswith("P") for char in word)
