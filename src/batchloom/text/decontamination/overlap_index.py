"""The index of evaluation sets: sorted hashes of their n-grams, and whose they are.

The file is a header of 64 bytes (``BLOVERLP``, u32 version 1, u32 length of the JSON that follows
it, zeros), that JSON, padded to 64 bytes, and four arrays, little-endian, each padded to 64 bytes:
hashes u64, records u32, sets u16, the sorted hashes of the beginnings of the n-grams (``probe`` words
each) u64, and a bit set whose size is a power of two, where the bits that their first bits count
are set.
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
from batchloom.text.quality import U64

MAX_SETS = 1 << 16

_MAGIC, _VERSION, _ALIGN = b"BLOVERLP", 1, 64
_ARRAY_DTYPES = ("<u8", "<u4", "<u2", "<u8", "u1")
# Of the beginnings that no set has, one in 32 finds its bit set and is looked for.
_BITS_PER_PREFIX = 32
# Records whose n-grams are gathered before they are sorted into the others.
_MAX_PENDING = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class OverlapIndex:
    """N-grams of evaluation sets; read with :meth:`hits`.

    Attributes:
        names: of the sets.
        probe: words of the beginnings, no more than the shortest n-gram has.
        lengths: of the n-grams in words, from the shortest on.
        hashes: sorted, each once, uint64.
        records: the first record that holds each, 0-based, in the first set that does.
        sets: the number of that set.
        beginnings: hashes of the first ``probe`` words, sorted, each once, uint64.
        bits: which first bits of beginnings occur, uint8, eight a byte.
        fingerprint: of all the above, 32 hexadecimal digits.
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
        """The first overlap, of those at one word the longest.

        Args:
            words: their hashes.

        Returns:
            Its first word, its number of words and its entry here.
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
        """Where beginnings stand."""
        numbers = grams.compute_hashes(self.probe, grams.list_positions(self.probe))
        bit_positions = numbers >> np.uint64(64 - _read_log2(self.bits))
        bit_values = self.bits[bit_positions >> np.uint64(3)] >> (bit_positions & np.uint64(7)).astype(np.uint8)
        candidates = np.flatnonzero(bit_values & 1)
        return candidates[_search_sorted(self.beginnings, numbers[candidates]) >= 0] if len(candidates) else candidates

    def iter_chunks(self) -> Iterator[bytes]:
        """The bytes of its file."""
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
    """The index of evaluation sets.

    Of each record the n-grams of ``words`` words are taken across its fields, written one after
    the other; and each field of ``min_words`` words or more, but fewer than ``words``, as a whole.

    Args:
        sets: by name, the records of each, a record being the texts of its fields.
        words: how many words in a row are an overlap.
        min_words: the least a short field must have.

    Raises:
        InputError: a set holds nothing that could be looked for.
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


# Hashes, records, sets and the hashes of the beginnings.
_NgramEntries = tuple[U64, npt.NDArray[np.uint32], npt.NDArray[np.uint16], U64]


def _merge_entries(parts: list[_NgramEntries]) -> _NgramEntries:
    """Sorted by hash, the first of equal ones."""
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
    """The index of a file, mapped.

    Raises:
        InputError: it is no such file, or not a whole one.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            magic, version, size = struct.unpack("<8sII48x", file.read(_ALIGN))
            if (magic, version) != (_MAGIC, _VERSION):
                raise InputError(f"{path} is no index of evaluation sets of version {_VERSION}.")
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
        raise InputError(f"{path} is no index of evaluation sets: {error}") from error
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
    """Where each number stands in sorted ones, of which there are some; -1 where it does not."""
    entries = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
    return np.where(ordered[entries] == numbers, entries, -1)


def _read_log2(bits: npt.NDArray[np.uint8]) -> int:
    return (len(bits) * 8).bit_length() - 1


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pad_bytes(raw: bytes) -> bytes:
    return raw + bytes(_round_up(len(raw)) - len(raw))
