"""Word statistics of a text for the quality rules: arrays with one entry per word."""

import functools
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import numpy.typing as npt

from batchloom.text.english_words import load_english_tables, split_segment_words

U64 = npt.NDArray[np.uint64]

# A text is processed in chunks of about this many characters to bound memory.
_CHUNK_CHARACTERS = 1 << 18
_SPACE_PATTERN = re.compile(r"\s")
# Tables above these sizes, some tens of MiB, are replaced by empty ones.
_MAX_CACHED_SEGMENTS = 1 << 17
_MAX_CACHED_WORDS = 1 << 17
_MAX_CACHED_LENGTH = 64

_U64_MASK = (1 << 64) - 1
_HASH_BASE = 0x9E3779B97F4A7C15
_SYMBOL, _LETTER = 1, 2


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
    if len(raw) > 1024:
        return _hash_long_word(raw)
    value = 0
    for byte in raw:
        value = (value * _HASH_BASE + _BYTE_KEYS[byte]) & _U64_MASK
    return value, pow(_HASH_BASE, len(raw), 1 << 64)


def _hash_long_word(raw: bytes) -> tuple[int, int]:
    powers = np.full(len(raw), _HASH_BASE, np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)[::-1]
    keys = np.array(_BYTE_KEYS, np.uint64)[np.frombuffer(raw, np.uint8)]
    return int((keys * powers).sum()), pow(_HASH_BASE, len(raw), 1 << 64)


@functools.cache
def load_punctuation() -> frozenset[str]:
    """Return the characters of datatrove's ``PUNCTUATION_SET``."""
    return frozenset(load_english_tables()["punctuation"])


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
        """Return whether the table should be replaced."""
        return len(self._numbers_by_segment) > _MAX_CACHED_SEGMENTS or len(self._words) > _MAX_CACHED_WORDS

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
            symbol = not letter and load_punctuation().issuperset(word)
            self._lengths.append(len(word))
            self._hashes.append(value)
            self._powers.append(power)
            self._flags.append(symbol * _SYMBOL | letter * _LETTER)
        return number


_WORD_TABLES = [_WordTable()]


def _iter_chunks(text: str) -> Iterator[str]:
    """Yield chunks of a text, split at white space."""
    start = 0
    while start < len(text):
        space = _SPACE_PATTERN.search(text, start + _CHUNK_CHARACTERS)
        stop = space.start() if space else len(text)
        yield text[start:stop]
        start = stop


@functools.lru_cache(1)
def compute_word_statistics(text: str) -> WordStatistics:
    """Compute word statistics; the last text is cached for the next rule."""
    rows = []
    for chunk in _iter_chunks(text):
        if _WORD_TABLES[0].is_full():
            _WORD_TABLES[0] = _WordTable()
        rows.append(_WORD_TABLES[0].rows(chunk))
    if len(rows) != 1:
        rows = [tuple(map(np.concatenate, zip(_WordTable().rows(""), *rows, strict=True)))]
    lengths, hashes, powers, flags = rows[0]
    symbols, letters = (flags & _SYMBOL).view(np.bool_), (flags & _LETTER) != 0
    return WordStatistics(lengths, hashes, powers, symbols, letters)
