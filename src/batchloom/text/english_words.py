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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, final

# Bounds of a segment cache: enough for the common ones, some tens of MiB.
_MAX_CACHED_SEGMENTS = 1 << 17
_MAX_CACHED_LENGTH = 64
# No suffix is longer except a run of dots, including its lookbehind.
_SUFFIX_REACH = 16

# The infixes of ``english.json`` restricted to ASCII. Each begins with its characters and then looks back: CPython
# finds a set of characters several times as fast as a position between two.
_INFIX_ASCII = re.compile(
    r"\.\.+|[+\-*^](?<=[0-9].)(?=[0-9-])|\.(?<=[a-z'\"`,].)(?=[A-Z'\"`,])|,(?<=[a-zA-Z].)(?=[a-zA-Z])"
    r"|-(?<=[a-zA-Z0-9].)-{0,2}(?=[a-zA-Z])|[~:<>=/](?<=[a-zA-Z0-9].)(?=[a-zA-Z])"
)
# The end of an ASCII segment that a suffix of letters can follow from: 5km, 5km/h, it's.
_LETTERS_SUFFIX = re.compile(r"[0-9][a-zA-Z/]+\Z|'[sS]\Z")
# ASCII characters, neither letters nor digits, that end no suffix.
_INNER_CHARACTERS = frozenset("-/=@\\^|~")
# ASCII without dots and dollars that neither begins nor ends with an affix.
_PLAIN_CORE = re.compile(r"[\w\-/=@\\^|~](?:[^.$]*[\w\-/=@\\^|~])?", re.ASCII)
# A word without special cases, in place of any other.
_ANY_WORD = "xyzzy"
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
K = TypeVar("K", str, bytes)
V = TypeVar("V")


@final
@dataclass(frozen=True, slots=True)
class _EnglishRules:
    """Compiled rules of ``english.json``."""

    prefix: re.Pattern[str]
    suffix: re.Pattern[str]
    infix: re.Pattern[str]
    url: re.Pattern[str]
    # Characters that are a prefix, or a suffix, in any context.
    starts: frozenset[str]
    ends: frozenset[str]
    # All these characters and ".".
    edges: str
    # Segments with predefined words, and the characters of the longest.
    special: Mapping[str, tuple[str, ...]]
    longest: int
    # Those segments without their edges.
    special_cores: frozenset[str]
    # Predefined words by the words that the segment would be split into, and the numbers of such words by first word.
    phrases: dict[tuple[str, ...], tuple[str, ...]]
    phrase_words: set[str]
    reaches: dict[str, tuple[int, ...]]


@functools.cache
def load_english_tables() -> Mapping[str, Any]:
    """Load the tables of ``english.json``, which names their sources."""
    tables: Mapping[str, Any] = json.loads(Path(__file__).with_name("english.json").read_bytes())
    return tables


@functools.cache
def load_english_set(name: str) -> frozenset[str]:
    return frozenset(load_english_tables()[name])


@functools.cache
def load_rules() -> _EnglishRules:
    tables = load_english_tables()
    special = {entry.replace(" ", ""): tuple(entry.split()) for entry in tables["special"]}
    suffix = re.compile("|".join(f"{suffix}$" for suffix in tables["suffixes"]))
    # The ellipsis is left out: two of them form one suffix.
    starts, ends = (
        frozenset(pattern[-1] for pattern in tables[kind] if len(pattern.removeprefix("\\")) == 1) - {"…"}
        for kind in ("prefixes", "suffixes")
    )
    edges = "".join(starts | ends | {"."})
    rules = _EnglishRules(
        re.compile("|".join(tables["prefixes"])),
        suffix,
        re.compile("|".join(tables["infixes"])),
        re.compile(_URL.replace("@LOWER@", tables["lower"])),
        starts,
        ends,
        edges,
        special,
        max(map(len, special)),
        frozenset(segment.strip(edges) for segment in special),
        {},
        set(),
        {},
    )
    for segment, words in special.items():
        split_words = tuple(_split_segment(segment, rules, {}))
        if len(split_words) > 1 or (rules.prefix.match(segment) and split_words != words):
            rules.phrases[split_words] = words
            rules.phrase_words.update(split_words)
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
    segment: str, rules: _EnglishRules, special: Mapping[str, tuple[str, ...]], before: list[str], after: list[str]
) -> tuple[int, int]:
    """Strip prefixes and suffixes; return the bounds of the rest."""
    start = 0
    stop = len(segment)
    longest = rules.longest
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
        start = inner
        stop = outer
    return start, stop


def _find_prefix_end(segment: str, rules: _EnglishRules, start: int, stop: int) -> int:
    """Return the end of the prefix of ``segment[start:stop]``, or ``start``."""
    first = segment[start]
    if first in rules.starts:
        return start + 1
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
    if last in _INNER_CHARACTERS or (tail.isascii() and last.isalnum() and not _LETTERS_SUFFIX.search(tail)):
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
    words = []
    start = 0
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
    if len(words) == 1 or rules.reaches.keys().isdisjoint(words):
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


@final
class SegmentCache(dict[K, V]):
    """Results of ``split`` by segment, bounded in number and length."""

    def __init__(self, split: Callable[[K], V]) -> None:
        super().__init__()
        self._split: Callable[[K], V] = split

    def __missing__(self, segment: K) -> V:
        words = self._split(segment)
        if len(segment) <= _MAX_CACHED_LENGTH:
            if len(self) >= _MAX_CACHED_SEGMENTS:
                self.clear()
            self[segment] = words
        return words


def _split_any_segment(segment: str) -> tuple[str, ...]:
    rules = load_rules()
    if segment in rules.special:
        return rules.special[segment]
    return tuple(_merge_phrases(_split_segment(segment, rules, rules.special), rules))


def _split_beginning(beginning: str) -> tuple[str, ...] | None:
    """Return the words of the prefixes before a word; None if they depend on it."""
    words = _split_any_segment(beginning + _ANY_WORD)
    return words[:-1] if load_rules().starts.issuperset(beginning) and words[-1] == _ANY_WORD else None


def _split_end(end: str) -> tuple[str, ...] | None:
    """Return the words of the suffixes after a word; None if they depend on it.

    ``end`` may begin with the last characters of the word.
    """
    rules = load_rules()
    segment = _ANY_WORD + end
    word = segment.rstrip(rules.edges)
    words = _split_any_segment(segment)
    is_suffix = rules.ends.issuperset(segment[len(word) :].replace(".", ""))
    return words[1:] if is_suffix and words[0] == word else None


_BEGINNINGS = SegmentCache(_split_beginning)
_ENDS = SegmentCache(_split_end)


def _split_core(core: str, rules: _EnglishRules) -> list[str] | None:
    """Split a segment without edges if no exception and no affix can be in it."""
    if core in rules.special_cores:
        return None
    if core.isalpha():
        return [core]
    if not core.isascii() or _LETTERS_SUFFIX.search(core):
        return None
    if core.isalnum():
        return [core]
    if not _PLAIN_CORE.fullmatch(core):
        return None
    words = _split_infixes(core, rules)
    # Only with its first or last word can an exception reach beyond it.
    return _merge_phrases(words, rules) if rules.phrase_words.isdisjoint((words[0], words[-1])) else None


def split_segment_words(segment: str) -> tuple[str, ...]:
    """Split a segment without white space into words.

    Most have no exception, and prefixes and suffixes that do not depend on the rest.
    """
    rules = load_rules()
    core = segment.strip(rules.edges)
    words = _split_core(core, rules)
    if words is None:
        return _split_any_segment(segment)
    if len(core) == len(segment):
        return tuple(words)
    start = segment.index(core)
    beginning = segment[:start]
    end = segment[start + len(core) :]
    before = _BEGINNINGS[beginning]
    # A dot depends on the two characters before it.
    after = _ENDS[core[-2:] + end if end.startswith(".") else end]
    return _split_any_segment(segment) if before is None or after is None else (*before, *words, *after)


SEGMENT_WORDS = SegmentCache(split_segment_words)


def iter_words(text: str) -> Iterator[str]:
    """Return an iterator over the words of a text."""
    return chain.from_iterable(map(SEGMENT_WORDS.__getitem__, text.split()))


_ODD_SPACE = re.compile(r"^ |  |[^\S ]")
_SPACE_OR_PIECE = re.compile(r"\s+|\S+")


def count_sentences(line: str, most: int) -> int:
    """Count the sentences of a text, up to ``most``.

    A sentence ends with ``. ! ?`` or similar as a word of its own, plus the punctuation that
    follows.
    """
    ends = load_english_set("sentence_ends")
    count = 0
    ended = False
    for word in _iter_words_and_spaces(line):
        count = count or 1
        if word in ends:
            ended = True
        elif ended and not is_punctuation(word):
            count += 1
            ended = False
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
            yield from SEGMENT_WORDS[segment]
        elif match.start() and segment.startswith(" "):
            if len(segment) > 1:
                yield segment[1:]
        else:
            yield segment


@functools.lru_cache(4096)
def is_punctuation(word: str) -> bool:
    """Return whether every character of a word is of Unicode's category P."""
    return all(unicodedata.category(char).startswith("P") for char in word)
