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
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

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
U64 = npt.NDArray[np.uint64]
K = TypeVar("K", str, bytes)
V = TypeVar("V")

# A text is processed in chunks of about this many characters to bound memory.
_CHUNK_CHARACTERS = 1 << 18
_SPACE_PATTERN = re.compile(r"\s")
# Tables above these sizes, some tens of MiB, are replaced by empty ones.
_MAX_TABLE_SEGMENTS = 1 << 17
_MAX_TABLE_WORDS = 1 << 17
_U64_MASK = (1 << 64) - 1
_HASH_BASE = 0x9E3779B97F4A7C15
_SYMBOL, _LETTER = 1, 2


@final
@dataclass(frozen=True, slots=True)
class _EnglishRules:
    """Compiled rules of ``english.json``."""

    prefix: re.Pattern[str]
    suffix: re.Pattern[str]
    infix: re.Pattern[str]
    url: re.Pattern[str]
    # ASCII characters that are a suffix in any context.
    ends: frozenset[str]
    # Segments with predefined words, and the characters of the longest.
    special: Mapping[str, tuple[str, ...]]
    longest: int
    # Predefined words by the words that the segment would be split into, and the numbers of such words by first word.
    phrases: dict[tuple[str, ...], tuple[str, ...]]
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
        max(map(len, special)),
        {},
        {},
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
    segment: str, rules: _EnglishRules, special: Mapping[str, tuple[str, ...]], before: list[str], after: list[str]
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
class SegmentCache(dict[K, tuple[V, ...]]):
    """Results of ``split`` by segment, bounded in number and length."""

    def __init__(self, split: Callable[[K], tuple[V, ...]]) -> None:
        super().__init__()
        self._split: Callable[[K], tuple[V, ...]] = split

    def __missing__(self, segment: K) -> tuple[V, ...]:
        words = self._split(segment)
        if len(segment) <= _MAX_CACHED_LENGTH:
            if len(self) >= _MAX_CACHED_SEGMENTS:
                self.clear()
            self[segment] = words
        return words


_SEGMENT_WORDS = SegmentCache(split_segment_words)


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
    ends, count, ended = load_english_set("sentence_ends"), 0, False
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


@functools.lru_cache(4096)
def is_punctuation(word: str) -> bool:
    """Return whether every character of a word is of Unicode's category P."""
    return all(unicodedata.category(char).startswith("P") for char in word)


@final
@dataclass(frozen=True, slots=True)
class WordStatistics:
    """Statistics of the words of a text.

    The hash of a word w of bytes b is the sum of key(b[i]) base^(len(w) - 1 - i), modulo 2^64, so
    ``hashes[i] * powers[i + 1] + hashes[i + 1]`` is the hash of two concatenated words.

    Attributes:
        lengths: characters of each word, int64.
        hashes: hash of each word, uint64; equal for equal words.
        powers: base^len(w), uint64.
        symbols: whether a word consists of punctuation, bool.
        letters: whether it has a letter, bool.
    """

    lengths: npt.NDArray[np.int64]
    hashes: U64
    powers: U64
    symbols: npt.NDArray[np.bool_]
    letters: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lengths)


def _make_byte_keys() -> list[int]:
    """Return a 64-bit key for each byte: SplitMix64 (Steele, Lea, Flood 2014)."""
    keys, state = [], 0
    for _ in range(256):
        state = (state + _HASH_BASE) & _U64_MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _U64_MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _U64_MASK
        keys.append(mixed ^ (mixed >> 31))
    return keys


_BYTE_KEYS = _make_byte_keys()
# Hash and power of " ": joined with it, "a bc" and "ab c" differ.
SPACE_HASH = np.uint64(_BYTE_KEYS[32])
SPACE_POWER = np.uint64(_HASH_BASE)


def hash_word(word: str) -> tuple[int, int]:
    """Return the hash of a word and its power, base^(length in bytes)."""
    raw = word.encode("utf-8", "surrogatepass")
    value = 0
    for byte in raw:
        value = (value * _HASH_BASE + _BYTE_KEYS[byte]) & _U64_MASK
    return value, pow(_HASH_BASE, len(raw), 1 << 64)


@final
class _WordTable:
    """Cache of words and segments by number; its content affects speed only."""

    def __init__(self) -> None:
        self._numbers_by_segment: dict[str, tuple[int, ...]] = {}
        self._words: dict[str, int] = {}
        self._lengths, self._hashes, self._powers = array("q"), array("Q"), array("Q")
        self._flags = array("B")
        # An empty array has no buffer.
        self._number("")

    def rows(self, text: str) -> tuple[npt.NDArray[Any], ...]:
        """Return lengths, hashes, powers and flags of the words of a text."""
        numbers_by_segment, segments = self._numbers_by_segment, text.split()
        try:
            segment_numbers = [numbers_by_segment[segment] for segment in segments]
        except KeyError:
            segment_numbers = [numbers_by_segment.get(segment) or self._add_segment(segment) for segment in segments]
        numbers = np.fromiter(chain.from_iterable(segment_numbers), np.int64)
        return (
            np.frombuffer(self._lengths, np.int64)[numbers],
            np.frombuffer(self._hashes, np.uint64)[numbers],
            np.frombuffer(self._powers, np.uint64)[numbers],
            np.frombuffer(self._flags, np.uint8)[numbers],
        )

    def is_full(self) -> bool:
        return len(self._numbers_by_segment) > _MAX_TABLE_SEGMENTS or len(self._words) > _MAX_TABLE_WORDS

    def _add_segment(self, segment: str) -> tuple[int, ...]:
        numbers = tuple([self._number(word) for word in split_segment_words(segment)])
        if len(segment) <= _MAX_CACHED_LENGTH:
            self._numbers_by_segment[segment] = numbers
        return numbers

    def _number(self, word: str) -> int:
        number = self._words.get(word)
        if number is None:
            number = self._words[word] = len(self._words)
            value, power = hash_word(word)
            letter = word.isalpha() or any(map(str.isalpha, word))
            symbol = not letter and load_english_set("punctuation").issuperset(word)
            self._lengths.append(len(word))
            self._hashes.append(value)
            self._powers.append(power)
            self._flags.append(symbol * _SYMBOL | letter * _LETTER)
        return number


_WORD_TABLES = [_WordTable()]


def iter_chunks(text: str, size: int) -> Iterator[str]:
    """Yield chunks of at least ``size`` characters of a text, split at white space."""
    start = 0
    while start < len(text):
        space = _SPACE_PATTERN.search(text, start + size)
        stop = space.start() if space else len(text)
        yield text[start:stop]
        start = stop


@functools.lru_cache(1)
def compute_word_statistics(text: str) -> WordStatistics:
    """Compute word statistics; the last text is cached for the next rule."""
    rows = []
    for chunk in iter_chunks(text, _CHUNK_CHARACTERS):
        if _WORD_TABLES[0].is_full():
            _WORD_TABLES[0] = _WordTable()
        rows.append(_WORD_TABLES[0].rows(chunk))
    if len(rows) != 1:
        rows = [tuple(map(np.concatenate, zip(_WordTable().rows(""), *rows, strict=True)))]
    lengths, hashes, powers, flags = rows[0]
    symbols, letters = (flags & _SYMBOL).view(np.bool_), (flags & _LETTER) != 0
    return WordStatistics(lengths, hashes, powers, symbols, letters)
