"""Counts of the words of a text, and its frequent and repeated n-grams.

The native library of ``words.c`` and Python give the same results; The Python version is the
specification.
"""

import ctypes
import functools
import operator
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, chain
from typing import Any, NamedTuple, final

from batchloom.core.native import WORDS_SOURCE, find_library
from batchloom.text.english_words import SegmentCache, iter_words, load_english_set, load_rules, split_segment_words

# Kinds of words, as in words.c.
_SYMBOL = 1
_HAS_LETTER = 2
# words.c indexes the bytes of a text by 32 bits.
_MAX_NATIVE_BYTES = 1 << 30
# As in words.c.
_OUT_OF_MEMORY = -2
# Characters by which longer n-grams are compared first.
_BEGINNING_LENGTH = 16

# The state of words.c is that of the process.
_STATE_LOCK = threading.Lock()
# A process is forked only between two uses of the state.
os.register_at_fork(before=_STATE_LOCK.acquire, after_in_parent=_STATE_LOCK.release, after_in_child=_STATE_LOCK.release)


class WordCounts(NamedTuple):
    """Number of the words of a text, and of those of each kind."""

    words: int
    # Words that consist of punctuation.
    symbols: int
    letter_words: int
    # Characters of the words that are not symbols.
    characters: int


class NgramExcess(NamedTuple):
    """N-grams of more than a share of the characters of their text."""

    n: int
    share: float
    characters: int
    # The most frequent n-gram and how often it occurs; "" and 0 for all repeated n-grams.
    ngram: str = ""
    times: int = 0


# (n, share) pairs with distinct n.
NgramLimits = tuple[tuple[int, float], ...]


def count_words(text: str) -> WordCounts:
    """Count the words of :func:`~batchloom.text.english_words.iter_words`."""
    kernel = find_word_kernel()
    return count_words_in_python(text) if kernel is None else kernel.count_words(text)


def find_excess(text: str, top_limits: NgramLimits, duplicate_limits: NgramLimits) -> NgramExcess | None:
    """Find the first share of the characters of a text that its n-grams exceed.

    Args:
        text: a text that is not empty.
        top_limits: limits of the most frequent n-gram, whose words are joined by spaces, by ascending n. Of n-grams
            that are as frequent, the first one counts.
        duplicate_limits: limits of all n-grams that occurred before, without spaces, as counted by datatrove's
            ``find_all_duplicate``, by ascending n: the words of a repeated n-gram are skipped, and n-grams that begin
            in them are not recorded.
    """
    kernel = find_word_kernel()
    find = find_excess_in_python if kernel is None else kernel.find_excess
    return find(text, top_limits, duplicate_limits)


def count_words_in_python(text: str) -> WordCounts:
    """Count words as :func:`count_words`, without the library."""
    words = symbols = letter_words = characters = 0
    for word, times in Counter(iter_words(text)).items():
        kind = _WORD_KINDS[word]
        words += times
        if kind & _HAS_LETTER:
            letter_words += times
        if kind & _SYMBOL:
            symbols += times
        else:
            characters += times * len(word)
    return WordCounts(words, symbols, letter_words, characters)


def _classify_word(word: str) -> int:
    is_symbol = load_english_set("punctuation").issuperset(word)
    return _SYMBOL * is_symbol | _HAS_LETTER * any(map(str.isalpha, word))


_WORD_KINDS = SegmentCache(_classify_word)


def find_excess_in_python(text: str, top_limits: NgramLimits, duplicate_limits: NgramLimits) -> NgramExcess | None:
    """Find n-grams as :func:`find_excess`, without the library."""
    words = list(iter_words(text))
    letters = "".join(words)
    ends = list(accumulate(map(len, words), initial=0))
    times = len(words)
    for n, share in top_limits:
        # An n-gram occurs at most as often as the most frequent shorter one. The margin is for rounding.
        longest = max(map(operator.sub, ends[n:], ends), default=0) + n - 1
        if n > len(words) or times * longest < share * len(text) * (1 - 1e-9):
            continue
        ngram, times = Counter(zip(*(words[start:] for start in range(n)), strict=False)).most_common(1)[0]
        characters = times * len(" ".join(ngram))
        if characters / len(text) > share:
            return NgramExcess(n, share, characters, " ".join(ngram), times)
    candidates = _list_candidates(letters, ends, duplicate_limits[0][0]) if duplicate_limits else []
    for n, share in duplicate_limits:
        characters = _measure_repeated_ngrams(letters, ends, n, candidates)
        if characters / len(text) > share:
            return NgramExcess(n, share, characters)
    return None


def _list_candidates(letters: str, ends: list[int], n: int) -> list[int]:
    """List the words that n-grams, of at least ``n`` words, may be repeated from.

    A long n-gram repeats only if another one begins with the same characters.
    """
    beginnings = [letters[start : start + _BEGINNING_LENGTH] for start in ends[:-1]]
    counts = Counter(beginnings)
    sizes = map(operator.sub, ends[n:], ends)
    return [
        word
        for word, (beginning, size) in enumerate(zip(beginnings, sizes, strict=False))
        if counts[beginning] > 1 or size < _BEGINNING_LENGTH
    ]


def _measure_repeated_ngrams(letters: str, ends: list[int], n: int, candidates: list[int]) -> int:
    ngrams = set[str]()
    characters = 0
    free = 0
    for word in candidates:
        if word < free or word + n >= len(ends):
            continue
        ngram = letters[ends[word] : ends[word + n]]
        if ngram in ngrams:
            characters += len(ngram)
            free = word + n
        else:
            ngrams.add(ngram)
    return characters


@final
class WordKernel:
    """The functions of a library of ``words.c``, whose state is that of the process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        text = ctypes.c_char_p
        address = ctypes.c_void_p
        number = ctypes.c_int64
        functions: list[tuple[Any, list[Any]]] = [
            (library.batchloom_set_rules, [text] * 4),
            (library.batchloom_split, [text, number, number, address]),
            (library.batchloom_define, [text, number, text]),
            (library.batchloom_find_excess, [number, number, number, text, text, address]),
        ]
        for function, arguments in functions:
            function.argtypes = arguments
            function.restype = number
            function.errcheck = _check_memory
        library.batchloom_get_unknown.argtypes, library.batchloom_get_unknown.restype = [], address
        library.batchloom_get_word.argtypes, library.batchloom_get_word.restype = [number, address], address
        self._numbers = (number * 4)()
        self._address = ctypes.addressof(self._numbers)
        rules = load_rules()
        # An exception begins with its first two characters. If one of them is no affix, it has a reserved word.
        pairs = {segment[:2] for segment in rules.special if len(segment) > 1}
        reserved_words = {*rules.special_cores, *rules.phrase_words} - {""}
        with _STATE_LOCK:
            library.batchloom_set_rules(
                _join_ascii(rules.starts),
                _join_ascii(rules.ends),
                _join_ascii(pairs),
                _join_ascii(reserved_words, "\n"),
            )

    def count_words(self, text: str) -> WordCounts:
        """Count words as the function :func:`count_words`."""
        with _STATE_LOCK:
            return WordCounts(*self._numbers) if self._split(text) else count_words_in_python(text)

    def find_excess(self, text: str, top_limits: NgramLimits, duplicate_limits: NgramLimits) -> NgramExcess | None:
        """Find n-grams as the function :func:`find_excess`."""
        with _STATE_LOCK:
            if not self._split(text):
                return find_excess_in_python(text, top_limits, duplicate_limits)
            limits = top_limits + duplicate_limits
            number = self._library.batchloom_find_excess(
                len(text), len(top_limits), len(limits), *_pack_limits(limits), self._address
            )
            if number < 0:
                return None
            characters, times, first, _ = self._numbers
            n, share = limits[number]
            if number >= len(top_limits):
                return NgramExcess(n, share, characters)
            return NgramExcess(n, share, characters, " ".join(map(self._get_word, range(first, first + n))), times)

    def _split(self, text: str) -> bool:
        """Split a text and set ``_numbers`` to its counts; False if it is too long."""
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > _MAX_NATIVE_BYTES:
            return False
        split = self._library.batchloom_split
        is_new = True
        while unknown_bytes := split(data, len(data), is_new, self._address):
            self._define(ctypes.string_at(self._library.batchloom_get_unknown(), unknown_bytes))
            is_new = False
        return True

    def _define(self, unknown: bytes) -> None:
        """Define the words of segments that each end with a space."""
        segments = set(unknown.decode("utf-8", "surrogatepass").split(" ")) - {""}
        words_by_segment = list(map(split_segment_words, segments))
        lines = "".join(f"{' '.join(words)} \n" for words in words_by_segment).encode("utf-8", "surrogatepass")
        kinds = bytes(map(_classify_word, chain.from_iterable(words_by_segment)))
        self._library.batchloom_define(lines, len(lines), kinds)

    def _get_word(self, index: int) -> str:
        address = self._library.batchloom_get_word(index, self._address)
        return ctypes.string_at(address, self._numbers[0]).decode("utf-8", "surrogatepass")


def _join_ascii(strings: Iterable[str], end: str = "") -> bytes:
    return "".join(f"{string}{end}" for string in strings if string.isascii()).encode()


def _check_memory(result: int, _function: object, _arguments: object) -> int:
    if result == _OUT_OF_MEMORY:
        raise MemoryError
    return result


@functools.lru_cache(16)
def _pack_limits(limits: NgramLimits) -> tuple[bytes, bytes]:
    """Return the sizes and shares of limits as arrays."""
    sizes = [n for n, _ in limits]
    shares = [share for _, share in limits]
    return struct.pack(f"={len(limits)}q", *sizes), struct.pack(f"={len(limits)}d", *shares)


@functools.cache
def find_word_kernel() -> WordKernel | None:
    """Return the library of this installation; None without a usable one.

    The reason is logged, once.
    """
    library = find_library(WORDS_SOURCE, "Words are counted by Python, which is slower and gives the same results")
    return None if library is None else WordKernel(library)
