"""Index of evaluation sets: sorted hashes of their n-grams, and their origin.

The file has a header of 64 bytes (``BLOVERLP``, u32 version 1, u32 length of the JSON after
it, zeros), that JSON, padded to 64 bytes, and five arrays, little-endian, each padded to 64 bytes:
hashes u64, records u32, sets u16, the sorted hashes of the prefixes of the n-grams (``probe`` words
each) u64, and a bit set whose size is a power of two, with the bits set that the leading bits of
these hashes number.
"""

import functools
import json
import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from batchloom.core.errors import InputError
from batchloom.text.english_words import U64
from batchloom.text.normalization import normalize

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
MAX_SETS = 1 << 16

_MAGIC, _VERSION, _ALIGN = b"BLOVERLP", 1, 64
_ARRAY_DTYPES = ("<u8", "<u4", "<u2", "<u8", "u1")
# One in 32 of the prefixes that no set has passes the bit set and is searched for.
_BITS_PER_PREFIX = 32
# Maximum number of pending n-gram arrays before they are merged.
_MAX_PENDING = 1 << 16


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


@final
@dataclass(frozen=True, slots=True)
class OverlapIndex:
    """N-grams of evaluation sets; searched with :meth:`find_first`.

    Attributes:
        names: names of the sets.
        probe: number of words of a prefix, at most that of the shortest n-gram.
        lengths: lengths of the n-grams in words, ascending.
        hashes: distinct n-gram hashes, sorted, uint64.
        records: 0-based number of the first record with each n-gram, in the first set with it.
        sets: number of that set.
        beginnings: distinct hashes of the prefixes of ``probe`` words, sorted, uint64.
        bits: bit set of the leading bits of ``beginnings``, packed in uint8.
        fingerprint: hash of all the above, 32 hexadecimal digits.
    """

    names: tuple[str, ...]
    probe: int
    lengths: tuple[int, ...]
    hashes: U64
    records: npt.NDArray[np.uint32]
    sets: npt.NDArray[np.uint16]
    beginnings: U64
    bits: npt.NDArray[np.uint8]
    fingerprint: str

    def find_first(self, words: U64) -> tuple[int, int, int] | None:
        """Return the first overlap, the longest at its position, or None.

        Args:
            words: hashes of the words.

        Returns:
            Position of its first word, number of words, and index of its entry.
        """
        grams = NgramHashes(words)
        candidates, best = self._find_beginnings(grams), None
        if not len(candidates):
            return None
        for n in reversed(self.lengths):
            positions = candidates[candidates <= len(words) - n]
            entries = _search_sorted(self.hashes, grams.compute_hashes(n, positions))
            hits = np.flatnonzero(entries >= 0)
            if len(hits) and (best is None or positions[hits[0]] < best[0]):
                best = (int(positions[hits[0]]), n, int(entries[hits[0]]))
        return best

    def _find_beginnings(self, grams: NgramHashes) -> WordPositions:
        """Return the positions of known prefixes."""
        numbers = grams.compute_hashes(self.probe, grams.list_positions(self.probe))
        bit_positions = numbers >> np.uint64(64 - _read_log2(self.bits))
        bit_values = self.bits[bit_positions >> np.uint64(3)] >> (bit_positions & np.uint64(7)).astype(np.uint8)
        candidates = np.flatnonzero(bit_values & 1)
        return candidates[_search_sorted(self.beginnings, numbers[candidates]) >= 0] if len(candidates) else candidates

    def iter_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the index file."""
        header = {
            "names": self.names,
            "probe": self.probe,
            "lengths": self.lengths,
            "hashes": len(self.hashes),
            "beginnings": len(self.beginnings),
            "bits": len(self.bits) * 8,
            "fingerprint": self.fingerprint,
        }
        text = json.dumps(header).encode()
        yield struct.pack("<8sII48x", _MAGIC, _VERSION, len(text))
        yield _pad_bytes(text)
        for array, kind in zip(self._arrays(), _ARRAY_DTYPES, strict=True):
            yield _pad_bytes(np.ascontiguousarray(array, kind).tobytes())

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.hashes, self.records, self.sets, self.beginnings, self.bits


def build_index(sets: Mapping[str, Iterable[Sequence[str]]], *, words: int = 13, min_words: int = 8) -> OverlapIndex:
    """Build the index of evaluation sets.

    The n-grams of ``words`` words of a record span its concatenated fields. Each field of
    ``min_words`` words or more, but fewer than ``words``, is added as one n-gram.

    Args:
        sets: records of each set, by name; a record is the texts of its fields.
        words: number of consecutive words that are an overlap.
        min_words: minimum number of words of a short field.

    Raises:
        InputError: a set has no text that is long enough.
    """
    probe = min(words, min_words)
    pending: list[_NgramEntries] = []
    lengths: set[int] = set()
    for number, (name, records) in enumerate(sets.items()):
        empty = True
        for record, fields in enumerate(records):
            for n, grams, at in _iter_record_ngrams(fields, words, min_words):
                lengths.add(n)
                owner = np.full(len(at), record, np.uint32), np.full(len(at), number, np.uint16)
                pending.append((grams.compute_hashes(n, at), *owner, grams.compute_hashes(probe, at)))
                empty = False
            if len(pending) > _MAX_PENDING:
                pending = [_merge_entries(pending)]
        if empty:
            raise InputError(
                f"The evaluation set {name!r} holds no text of {probe} words or more; name the file of its records."
            )
    return _build_from_entries(tuple(sets), probe, tuple(sorted(lengths)), _merge_entries(pending))


def _iter_record_ngrams(
    fields: Sequence[str], words: int, least: int
) -> Iterator[tuple[int, NgramHashes, WordPositions]]:
    hashes_by_field = [hash_words(text) for text in fields]
    record_grams = NgramHashes(np.concatenate([np.zeros(0, np.uint64), *hashes_by_field]))
    positions = record_grams.list_positions(words)
    if len(positions):
        yield words, record_grams, positions
    for field_hashes in hashes_by_field:
        if least <= len(field_hashes) < words:
            yield len(field_hashes), NgramHashes(field_hashes), np.zeros(1, np.int64)


# Hashes, records, sets and prefix hashes.
_NgramEntries = tuple[U64, npt.NDArray[np.uint32], npt.NDArray[np.uint16], U64]


def _merge_entries(parts: list[_NgramEntries]) -> _NgramEntries:
    """Merge entries sorted by hash, keeping the first of equal ones."""
    hashes = np.concatenate([part[0] for part in parts])
    _, first_indices = np.unique(hashes, return_index=True)
    records = np.concatenate([part[1] for part in parts])
    sets = np.concatenate([part[2] for part in parts])
    probes = np.concatenate([part[3] for part in parts])
    return hashes[first_indices], records[first_indices], sets[first_indices], probes[first_indices]


def _build_from_entries(
    names: tuple[str, ...], probe: int, lengths: tuple[int, ...], entries: _NgramEntries
) -> OverlapIndex:
    hashes, records, sets, probes = entries
    probes = np.unique(probes)
    log2 = max(10, (len(probes) * _BITS_PER_PREFIX - 1).bit_length())
    bits = np.zeros(1 << log2, np.bool_)
    bits[probes >> np.uint64(64 - log2)] = True
    packed = np.packbits(bits, bitorder="little")
    digest = xxhash.xxh3_128(json.dumps([names, probe, lengths]).encode())
    for array, kind in zip(entries[:3], _ARRAY_DTYPES, strict=False):
        digest.update(np.ascontiguousarray(array, kind).tobytes())
    return OverlapIndex(names, probe, lengths, hashes, records, sets, probes, packed, digest.hexdigest())


def load_index(path: str) -> OverlapIndex:
    """Memory-map the index in a file; raise InputError if it is invalid or truncated."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            magic, version, size = struct.unpack("<8sII48x", file.read(_ALIGN))
            if (magic, version) != (_MAGIC, _VERSION):
                raise InputError(f"{path} is not an index of evaluation sets of version {_VERSION}.")
            header = json.loads(file.read(size))
            file.seek(0, 2)
            file_size = file.tell()
        offset, arrays = _ALIGN + _round_up(size), []
        counts = (header["hashes"],) * 3 + (header["beginnings"], header["bits"] // 8)
        for kind, count in zip(_ARRAY_DTYPES, counts, strict=True):
            bytes_ = count * np.dtype(kind).itemsize
            if offset + bytes_ > file_size:
                raise InputError(f"{path} is cut off at byte {file_size:,}; make the index again.")
            arrays.append(_map_array(path, kind, offset, count))
            offset += _round_up(bytes_)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not an index of evaluation sets: {error}") from error
    except OSError as error:
        raise InputError(f"The index of evaluation sets cannot be read: {error}") from error
    names, lengths = tuple(header["names"]), tuple(header["lengths"])
    hashes, records, sets, beginnings, bits = arrays
    probe, fingerprint = header["probe"], header["fingerprint"]
    return OverlapIndex(names, probe, lengths, hashes, records, sets, beginnings, bits, fingerprint)


def _map_array(path: str, kind: str, offset: int, count: int) -> npt.NDArray[Any]:
    if not count:
        return np.zeros(0, kind)
    return np.asarray(np.memmap(path, kind, "r", offset, (count,)))


def _search_sorted(ordered: U64, numbers: U64) -> WordPositions:
    """Return the index of each number in a non-empty sorted array, or -1."""
    entries = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
    return np.where(ordered[entries] == numbers, entries, -1)


def _read_log2(bits: npt.NDArray[np.uint8]) -> int:
    return (len(bits) * 8).bit_length() - 1


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pad_bytes(raw: bytes) -> bytes:
    return raw + bytes(_round_up(len(raw)) - len(raw))
