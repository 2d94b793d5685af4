"""64-bit hashes of n-grams of normalized words, for the detection of overlaps."""

import functools
import re
import unicodedata
from itertools import chain, groupby
from typing import final

import numpy as np
import numpy.typing as npt
import xxhash

from batchloom.text.normalization import normalize
from batchloom.text.quality.word_statistics import U64

WordPositions = npt.NDArray[np.int64]

_SEPARATOR_TABLE = bytes(code if code >= 128 or chr(code).isalnum() else 32 for code in range(256))
# Han, kana and their extensions, whose words are not separated by spaces.
_UNSPACED_RANGES = (
    r"\u3005-\u3007\u3021-\u3029\u3031-\u3035\u303b\u303c\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff"
    r"\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
_MULTIPLIER = 0xD6E8FEB86659FD93
_SALT = 0x9E3779B97F4A7C15
_U64_MASK = (1 << 64) - 1
_MAX_CACHED_SEGMENTS, _MAX_CACHED_LENGTH = 1 << 16, 64


def _split_segments(text: str) -> list[bytes]:
    """Split UTF-8 text at all ASCII characters except letters and digits."""
    return text.encode("utf-8", "surrogatepass").translate(_SEPARATOR_TABLE).split()


def _split_words(segment: bytes) -> list[str]:
    text = segment.decode("utf-8", "surrogatepass")
    if text.isascii():
        return [text.lower()]
    return _make_word_pattern().findall(normalize(text).lower())


def split_normal_words(text: str) -> list[str]:
    """Split into words in NFC and lower case: runs of letters, marks and digits.

    All other characters, including punctuation, only separate words. Each character of Han
    and kana is a word.
    """
    return list(chain.from_iterable(map(_split_words, _split_segments(text))))


@functools.cache
def _make_word_pattern() -> re.Pattern[str]:
    marks = [code for code in range(0x20000) if unicodedata.category(chr(code))[0] == "M"]
    ranges = []
    for _, run in groupby(enumerate(marks), key=lambda pair: pair[1] - pair[0]):
        codes = [code for _, code in run]
        ranges.append(f"\\U{codes[0]:08x}-\\U{codes[-1]:08x}")
    spaced = rf"[^\W_{_UNSPACED_RANGES}]"
    return re.compile(rf"[{_UNSPACED_RANGES}]|{spaced}+(?:[{''.join(ranges)}]+{spaced}*)*")


@final
class _WordHashCache(dict[bytes, tuple[int, ...]]):
    """Lazy cache of the word hashes of each segment."""

    def __missing__(self, segment: bytes) -> tuple[int, ...]:
        words = [word.encode("utf-8", "surrogatepass") for word in _split_words(segment)]
        hashes = tuple(map(xxhash.xxh3_64_intdigest, words))
        if len(segment) <= _MAX_CACHED_LENGTH:
            if len(self) >= _MAX_CACHED_SEGMENTS:
                self.clear()
            self[segment] = hashes
        return hashes


_WORD_HASHES = _WordHashCache()


def hash_words(text: str) -> U64:
    """Return a 64-bit hash of each word from :func:`split_normal_words`."""
    return np.fromiter(chain.from_iterable(map(_WORD_HASHES.__getitem__, _split_segments(text))), np.uint64)


@final
class NgramHashes:
    """64-bit hashes of the n-grams of a text; n is part of the hash.

    ``words`` are the hashes of the words.
    """

    def __init__(self, words: U64) -> None:
        self._words = len(words)
        self._doubled = {1: words}

    def list_positions(self, n: int) -> WordPositions:
        """Return the start positions of n-grams."""
        return np.arange(max(0, self._words - n + 1))

    def compute_hashes(self, n: int, positions: WordPositions) -> U64:
        """Return the hash of the n words from each position on."""
        hashes, size = np.full(len(positions), n * _SALT & _U64_MASK, np.uint64), 0
        for bit in range(n.bit_length()):
            step = 1 << bit
            if n & step:
                power = np.uint64(pow(_MULTIPLIER, step, 1 << 64))
                hashes = hashes * power + self._power_of_two(step)[positions + size]
                size += step
        return hashes

    def _power_of_two(self, size: int) -> U64:
        if size not in self._doubled:
            half, step = self._power_of_two(size >> 1), size >> 1
            power = np.uint64(pow(_MULTIPLIER, step, 1 << 64))
            self._doubled[size] = half[:-step] * power + half[step:]
        return self._doubled[size]
