"""Index of evaluation sets: sorted hashes of their n-grams, and their origin.

The file has a header of 64 bytes (``BLOVERLP``, u32 version 1, u32 length of the JSON after
it, zeros), that JSON, padded to 64 bytes, and five arrays, little-endian, each padded to 64 bytes:
hashes u64, records u32, sets u16, the sorted hashes of the prefixes of the n-grams (``probe`` words
each) u64, and a bit set whose size is a power of two, with the bits set that the leading bits of
these hashes number.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from batchloom.core.errors import InputError
from batchloom.text.decontamination.ngrams import NgramHashes, WordPositions, hash_words
from batchloom.text.quality.word_statistics import U64

MAX_SETS = 1 << 16

_MAGIC, _VERSION, _ALIGN = b"BLOVERLP", 1, 64
_ARRAY_DTYPES = ("<u8", "<u4", "<u2", "<u8", "u1")
# One in 32 of the prefixes that no set has passes the bit set and is searched for.
_BITS_PER_PREFIX = 32
# Maximum number of pending n-gram arrays before they are merged.
_MAX_PENDING = 1 << 16


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
