"""Words of a batch of texts as arrays.

Arrow splits the texts at white space and finds the distinct segments. In most of them, prefixes and suffixes surround
letters and digits that are a word. Arrow splits these, too;
:func:`~batchloom.text.english_words.split_segment_words` splits the others.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchloom.text.english_words import BEGINNINGS, ENDS, SEGMENT_WORDS, load_english_set, load_rules

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
_N = TypeVar("_N", np.int64, np.uint64)

# Arrow strings have no lone surrogates. No rule tells these characters of private use from them.
_SURROGATE_STANDINS = {code: 0x100000 + code for code in range(0xD800, 0xE000)}
# A word of ASCII, unless it ends with a unit after a digit.
_ASCII_WORD, _UNIT_END = "^[a-zA-Z0-9_]+$", "[0-9][a-zA-Z]+$"
_HASH_BASE = 0x9E3779B97F4A7C15
# Strings that are processed at once. Each takes some hundred bytes meanwhile.
_SLICE_STRINGS = 1 << 16
# Length of the beginnings that are compared before n-grams are.
_BEGINNING_BYTES = 16
_INVERSE_BASE = pow(_HASH_BASE, -1, 1 << 64)


@final
@dataclass(frozen=True, slots=True)
class BatchWords:
    """Words of the texts of a batch, one text after the other.

    Attributes:
        bounds: index of the first word of each text, and the number of words [T + 1].
        numbers: index of each word in ``vocabulary`` [W].
        offsets: index of the first byte of each word in ``data`` [W].
        lengths: characters of each word [W].
        symbols: whether a word consists of punctuation [W].
        letters: whether a word has a letter [W].
        vocabulary: words, some more than once.
        data: UTF-8 of the texts without white space.
    """

    bounds: I64
    numbers: I64
    offsets: I64
    lengths: I64
    symbols: Flags
    letters: Flags
    vocabulary: pa.StringArray
    data: npt.NDArray[np.uint8]

    def select(self, texts: list[int]) -> "BatchWords":
        """Return the words of some of the texts."""
        counts = np.diff(self.bounds)[texts]
        indices = list_ranges(self.bounds[texts], counts)
        return BatchWords(
            cumulate(counts),
            self.numbers[indices],
            self.offsets[indices],
            self.lengths[indices],
            self.symbols[indices],
            self.letters[indices],
            self.vocabulary,
            self.data,
        )

    def get_ends(self, text: int) -> list[int]:
        """Return the characters before each word of a text, and those of all words."""
        ends: list[int] = cumulate(self.lengths[self.bounds[text] : self.bounds[text + 1]]).tolist()
        return ends

    def make_ngrams(self) -> "Ngrams":
        return Ngrams(self)

    def add_by_text(self, values: npt.NDArray[Any]) -> list[int]:
        """Return the sum of the values of the words of each text."""
        sums: list[int] = np.diff(cumulate(values)[self.bounds]).tolist()
        return sums


@final
class Ngrams:
    """N-grams of the words of each text of a batch, compared by hashes.

    An n-gram is named by its first word. Words are joined without spaces. Some n-grams go beyond the end of their text,
    so the results are bounds from above.

    Attributes:
        bounds: as of the words.
        texts: text of each word [W].
    """

    def __init__(self, words: BatchWords) -> None:
        self.texts = np.repeat(np.arange(len(words.bounds) - 1), np.diff(words.bounds))
        self.bounds, self._words = words.bounds, words
        self._text_keys = self.texts.view(np.uint64) * _KEYS[0]
        sizes = _measure(words.vocabulary)
        self._ends = cumulate(words.lengths)
        self._byte_ends = cumulate(sizes[words.numbers])
        # Powers of the bytes before each word.
        powers, inverses = np.ones((2, len(self.texts) + 1), np.uint64)
        for base, products in ((_HASH_BASE, powers), (_INVERSE_BASE, inverses)):
            table = _list_powers(base, int(sizes.max(initial=0)) + 1)
            np.multiply.accumulate(table[sizes[words.numbers]], out=products[1:])
        self._inverses, self._hash_sums = inverses[:-1], np.zeros(len(self.texts) + 1, np.uint64)
        np.cumsum(_hash_strings(words.vocabulary)[words.numbers] * powers[:-1], out=self._hash_sums[1:])

    def measure(self, n: int) -> I64:
        """Return the length in characters of the n-gram of each word [W]."""
        return self._subtract(self._ends, n)

    def measure_union(self, n: int, first_words: I64) -> I64:
        """Return the characters of each text in at least one of the n-grams [T]."""
        stops = np.minimum(first_words + n, np.append(first_words[1:], len(self.texts)))
        lengths = self._ends[stops] - self._ends[first_words]
        return np.bincount(self.texts[first_words], lengths, len(self.bounds) - 1).astype(np.int64)

    def count(self, n: int, is_counted: Flags) -> I64:
        """Return how often each counted n-gram occurs in its text among them, else 0 [W]."""
        order, is_new = self._group(n, np.flatnonzero(is_counted))
        counts, run_lengths = np.zeros(len(self.texts), np.int64), np.diff(np.flatnonzero(is_new), append=len(order))
        counts[order] = np.repeat(run_lengths, run_lengths)
        return counts

    def find_repeats(self, n: int) -> tuple[I64, I64]:
        """Return repeated n-grams: without the first of each text, and with it."""
        # A long n-gram repeats only if another one begins with the same bytes.
        is_candidate = self._is_shared | (self._subtract(self._byte_ends, n) < _BEGINNING_BYTES)
        order, is_new = self._group(n, np.flatnonzero(is_candidate))
        is_single = is_new & np.append(is_new[1:], True)[: len(order)]
        return np.sort(order[~is_new]), np.sort(order[~is_single])

    @functools.cached_property
    def _is_shared(self) -> Flags:
        """Words that begin like others of their text, together with what follows [W]."""
        data, offsets = np.concatenate((self._words.data, np.zeros(_BEGINNING_BYTES, np.uint8))), self._words.offsets
        halves = np.ndarray(len(data) - 7, "<u8", data, strides=(1,))
        keys = halves[offsets] * _KEYS[2] + halves[offsets + 8] * _KEYS[3] + self._text_keys
        order, is_new = _group(keys, np.arange(len(keys)))
        is_shared = np.empty(len(order), bool)
        is_shared[order] = ~(is_new & np.append(is_new[1:], True))
        return is_shared

    def _group(self, n: int, first_words: I64) -> tuple[I64, Flags]:
        """Order n-grams with equal ones of a text in a row, and mark the first of each."""
        stops = np.minimum(first_words + n, len(self.texts))
        hashes = (self._hash_sums[stops] - self._hash_sums[first_words]) * self._inverses[first_words]
        hashes += self._text_keys[first_words]
        return _group(hashes, first_words)

    def _subtract(self, sums: npt.NDArray[_N], n: int) -> npt.NDArray[_N]:
        """Return what the words of each n-gram add to sums [W]."""
        differences: npt.NDArray[_N] = np.append(sums[n:], np.full(min(n, len(sums)) - 1, sums[-1])) - sums[:-1]
        return differences


def _group(keys: U64, numbers: I64) -> tuple[I64, Flags]:
    """Return the numbers in an order with equal keys in a row, and the first of each.

    The numbers are in order. Some bits of the keys are ignored.
    """
    bits = np.uint64(int(numbers[-1:].sum()).bit_length())
    # Sorting values is several times as fast as sorting indices.
    keys = keys * _KEYS[1]
    keys >>= bits
    keys <<= bits
    keys |= numbers.view(np.uint64)
    keys.sort()
    order = (keys & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
    keys >>= bits
    return order, np.append(True, keys[1:] != keys[:-1])[: len(keys)]


def _hash_strings(strings: pa.StringArray) -> U64:
    """Return the sum of key(b[i]) HASH_BASE^i over the bytes b of each string."""
    return np.concatenate(list(map(_hash_slice, _iter_slices(strings))))


def _hash_slice(strings: pa.StringArray) -> U64:
    offsets = _get_offsets(strings)
    data = np.frombuffer(strings.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(_KEYS[data] * _list_powers(_HASH_BASE, len(data)), out=sums[1:])
    hashes: U64 = (sums[offsets[1:]] - sums[offsets[:-1]]) * _list_powers(_INVERSE_BASE, len(data) + 1)[offsets[:-1]]
    return hashes


def _list_powers(base: int, count: int) -> U64:
    """Return the powers of a base from 0 on, modulo 2^64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers, out=powers)


def _make_byte_keys() -> U64:
    """Return a 64-bit key for each byte: SplitMix64 (Steele, Lea, Flood 2014)."""
    keys = np.arange(1, 257, dtype=np.uint64) * np.uint64(_HASH_BASE)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


_KEYS = _make_byte_keys()


def split_words(texts: Sequence[str]) -> BatchWords:
    """Split texts into the words of :func:`~batchloom.text.english_words.iter_words`."""
    # After white space at the end of its buffer, Arrow reads on, and does not split if what follows is not UTF-8.
    stripped_texts = list(map(str.strip, texts))
    try:
        strings = pa.array(stripped_texts, pa.string())
    except UnicodeEncodeError:
        strings = pa.array([text.translate(_SURROGATE_STANDINS) for text in stripped_texts], pa.string())
    segments = pc.utf8_split_whitespace(strings)
    encoded = segments.values.dictionary_encode()
    codes = encoded.indices.to_numpy()
    vocabulary, segment_words, counts = _split_segments(encoded.dictionary)
    segment_counts = counts[codes]
    numbers = segment_words[list_ranges(cumulate(counts)[codes], segment_counts)]
    symbols = _measure(pc.utf8_trim(vocabulary, "".join(load_english_set("punctuation")))) == 0
    lengths = pc.utf8_length(vocabulary).to_numpy().astype(np.int64)
    return BatchWords(
        cumulate(segment_counts)[segments.offsets.to_numpy()],
        numbers,
        cumulate(_measure(vocabulary)[numbers])[:-1],
        lengths[numbers],
        symbols[numbers],
        _find_letters(vocabulary)[numbers],
        vocabulary,
        np.frombuffer(segments.values.buffers()[2] or b"", np.uint8),
    )


def _split_segments(segments: pa.StringArray) -> tuple[pa.StringArray, I64, I64]:
    """Return a vocabulary, the numbers of all words in it, and counts by segment."""
    slices = map(_split_slice, _iter_slices(segments))
    vocabularies, numbers, counts = zip(*slices, strict=True)
    firsts = cumulate(np.array(list(map(len, vocabularies))))
    shifted_numbers = [slice_numbers + first for slice_numbers, first in zip(numbers, firsts[:-1], strict=True)]
    return pa.concat_arrays(vocabularies), np.concatenate(shifted_numbers), np.concatenate(counts)


def _split_slice(segments: pa.StringArray) -> tuple[pa.StringArray, I64, I64]:
    rules, count = load_rules(), len(segments)
    cores = pc.utf8_trim(segments, rules.edges)
    sizes, core_sizes = _measure(segments), _measure(cores)
    starts = sizes - _measure(pc.utf8_ltrim(segments, rules.edges))
    stops = starts + core_sizes
    # A dot depends on the two characters before it.
    is_dotted = _to_numpy(pc.starts_with(_slice_strings(segments, stops, sizes), "."))
    stops -= is_dotted * _measure(pc.utf8_slice_codeunits(cores, -2))
    beginnings = _slice_strings(segments, 0 * starts, starts).dictionary_encode()
    ends = _slice_strings(segments, stops, sizes).dictionary_encode()
    beginning_words = list(map(BEGINNINGS.__getitem__, beginnings.dictionary.to_pylist()))
    end_words = list(map(ENDS.__getitem__, ends.dictionary.to_pylist()))
    is_split = _find_words(cores)
    for affixes, words in ((beginnings, beginning_words), (ends, end_words)):
        is_split &= np.array([parts is not None for parts in words], bool)[affixes.indices.to_numpy()]
    others = np.flatnonzero(~is_split)
    other_words = map(SEGMENT_WORDS.__getitem__, segments.take(pa.array(others)).to_pylist())

    # A segment has the words of three pieces: its beginning, its core, and its end; or nothing, all, and nothing.
    pieces = [(), *(words or () for words in chain(beginning_words, end_words)), *other_words]
    places = np.empty((count, 3), np.int64)
    places[:, 0] = count + 1 + beginnings.indices.to_numpy()
    places[:, 1] = np.arange(count)
    places[:, 2] = count + 1 + len(beginning_words) + ends.indices.to_numpy()
    places[others] = count
    places[others, 1] += 1 + len(beginning_words) + len(end_words) + np.arange(len(others))
    piece_counts = np.concatenate((np.ones(count, np.int64), np.fromiter(map(len, pieces), np.int64, len(pieces))))
    piece_words = pa.array(chain.from_iterable(pieces), pa.string()).dictionary_encode()
    numbers = np.concatenate((np.arange(count), count + piece_words.indices.to_numpy()))
    counts = piece_counts[places]
    segment_words = numbers[list_ranges(cumulate(piece_counts)[places].ravel(), counts.ravel())]
    return pa.concat_arrays([cores, piece_words.dictionary]), segment_words, counts.sum(axis=1)


def _find_words(cores: pa.StringArray) -> Flags:
    """Return which segments without edges are one word."""
    is_word = _check_strings(
        cores,
        lambda others: pc.and_not(
            pc.match_substring_regex(others, _ASCII_WORD), pc.match_substring_regex(others, _UNIT_END)
        ),
        str.isalpha,
    )
    is_word &= ~_to_numpy(pc.is_in(cores, pa.array(load_rules().special_cores)))
    return is_word


def _find_letters(words: pa.StringArray) -> Flags:
    """Return which words have a letter."""
    return _check_strings(
        words, lambda others: pc.match_substring_regex(others, "[a-zA-Z]"), lambda word: any(map(str.isalpha, word))
    )


def _check_strings(
    strings: pa.StringArray, check_ascii: Callable[[pa.StringArray], pa.BooleanArray], check: Callable[[str], bool]
) -> Flags:
    """Check strings: ASCII by Arrow (letters alone pass), others by Python."""
    flags = _to_numpy(pc.ascii_is_alpha(strings)).copy()
    others = np.flatnonzero(~flags)
    other_strings = strings.take(pa.array(others))
    flags[others] = _to_numpy(check_ascii(other_strings))
    # Arrow may have another version of Unicode than Python.
    is_foreign = ~_to_numpy(pc.string_is_ascii(other_strings))
    foreign = other_strings.filter(pa.array(is_foreign)).to_pylist()
    flags[others[is_foreign]] = np.fromiter(map(check, foreign), bool, len(foreign))
    return flags


def _iter_slices(strings: pa.StringArray) -> Iterator[pa.StringArray]:
    """Yield slices of strings, at least one."""
    for start in range(0, max(len(strings), 1), _SLICE_STRINGS):
        yield strings.slice(start, _SLICE_STRINGS)


def _slice_strings(strings: pa.StringArray, starts: I64, stops: I64) -> pa.StringArray:
    """Return the bytes from a start to a stop of each string."""
    counts = stops - starts
    at = list_ranges(_get_offsets(strings)[:-1] + starts, counts)
    data = np.frombuffer(strings.buffers()[2] or b"", np.uint8)[at]
    offsets = cumulate(counts).astype(np.int32)
    sliced: pa.StringArray = pa.StringArray.from_buffers(len(strings), pa.py_buffer(offsets), pa.py_buffer(data))
    return sliced


def _get_offsets(strings: pa.StringArray) -> npt.NDArray[np.int32]:
    return np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1]


def _measure(strings: pa.StringArray) -> I64:
    """Return the bytes of each string."""
    return np.diff(_get_offsets(strings)).astype(np.int64)


def _to_numpy(flags: pa.BooleanArray) -> Flags:
    array: Flags = flags.to_numpy(zero_copy_only=False)
    return array


def cumulate(counts: npt.NDArray[Any]) -> I64:
    """Return the sum of the values before each, and of all [N + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def list_ranges(starts: npt.NDArray[np.integer[Any]], counts: npt.NDArray[np.integer[Any]]) -> I64:
    """Return the numbers of ranges, one range after the other."""
    sums = cumulate(counts)
    numbers = np.arange(sums[-1])
    numbers += np.repeat(starts - sums[:-1], counts)
    return numbers
