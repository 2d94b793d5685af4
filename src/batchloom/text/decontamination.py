"""Decontamination: documents that share words with an evaluation set are dropped.

The method is that of GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix C): texts are in lower
case and without punctuation, and a document that shares any 13 consecutive words with a record of a set
is contaminated. Shorter fields must match completely; they have at least 8 words, the minimum
that GPT-3 used.

The index of the sets holds the sorted hashes of their n-grams, and their origin, in an Arrow file.
"""

import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import xxhash

from batchloom.core.errors import InputError
from batchloom.core.settings import coerce_int_fields, is_text, quote_value, raise_problems
from batchloom.text.english_words import SegmentCache
from batchloom.text.normalization import normalize
from batchloom.text.steps import CleanFunction, DroppedText

OVERLAP_REASON: Final = "decontaminate: shares words with {}"

_CHUNK_CHARACTERS = 1 << 20
_SPACE_PATTERN = re.compile(r"\s")
WordPositions = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_SEPARATOR_TABLE = bytes(code if code >= 128 or chr(code).isalnum() else 32 for code in range(256))
# Han, kana and their extensions, whose words are not separated by spaces.
_UNSPACED_RANGES = (
    r"\u3005-\u3007\u3021-\u3029\u3031-\u3035\u303b\u303c\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff"
    r"\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
_MULTIPLIER = 0xD6E8FEB86659FD93
_SALT = 0x9E3779B97F4A7C15
_U64_MASK = (1 << 64) - 1
MAX_SETS = 1 << 16

_HEADER_KEY = b"overlap_index"
# One in 32 of the prefixes that no set has passes the bit set and is searched for.
_BITS_PER_PREFIX = 32
# Maximum number of pending n-gram arrays before they are merged.
_MAX_PENDING = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecontaminationSettings:
    """Settings of the step ``decontaminate``.

    Attributes:
        sets: file or folder with the records of each evaluation set, by name.
        words: number of consecutive words that are an overlap.
        min_words: minimum length of a field with fewer than ``words`` words, which must match
            completely; shorter ones are not searched for.
        index: path of the index of the sets. Preparation sets it; leave it out.
    """

    sets: dict[str, str] = field(default_factory=dict)
    words: int = 13
    min_words: int = 8
    index: str | None = None

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, {"words": (1, 64), "min_words": (1, 64)})
        is_valid = isinstance(self.sets, dict) and all(map(is_text, [*self.sets, *self.sets.values()]))
        if not is_valid or not 1 <= len(self.sets) <= MAX_SETS:
            problems.append(
                f"sets: {quote_value(self.sets)} names no evaluation set; give a name and a file for each, "
                "such as {gsm8k: evaluation/gsm8k.jsonl}, in a recipe file (--recipe)"
            )
        raise_problems(problems)


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


def _hash_segment_words(segment: bytes) -> tuple[int, ...]:
    words = (word.encode("utf-8", "surrogatepass") for word in _split_words(segment))
    return tuple(map(xxhash.xxh3_64_intdigest, words))


_WORD_HASHES = SegmentCache(_hash_segment_words)


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
        return np.arange(max(0, self._words - n + 1))

    def compute_hashes(self, n: int, positions: WordPositions) -> U64:
        """Return the hash of the n words from each position on."""
        hashes = np.full(len(positions), n * _SALT & _U64_MASK, np.uint64)
        size = 0
        for bit in range(n.bit_length()):
            step = 1 << bit
            if n & step:
                power = np.uint64(pow(_MULTIPLIER, step, 1 << 64))
                hashes = hashes * power + self._power_of_two(step)[positions + size]
                size += step
        return hashes

    def _power_of_two(self, size: int) -> U64:
        if size not in self._doubled:
            half = self._power_of_two(size >> 1)
            step = size >> 1
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
        candidates = self._find_beginnings(grams)
        best = None
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
        bit_positions = numbers >> np.uint64(65 - (len(self.bits) * 8).bit_length())
        bit_values = self.bits[bit_positions >> np.uint64(3)] >> (bit_positions & np.uint64(7)).astype(np.uint8)
        candidates = np.flatnonzero(bit_values & 1)
        return candidates[_search_sorted(self.beginnings, numbers[candidates]) >= 0] if len(candidates) else candidates

    def serialize(self) -> memoryview:
        """Return the index as an Arrow file, with one list per array."""
        import pyarrow as pa

        arrays: list[npt.NDArray[Any]] = [self.hashes, self.records, self.sets, self.beginnings, self.bits]
        columns = [pa.LargeListArray.from_arrays([0, len(array)], pa.array(array)) for array in arrays]
        header = {"names": self.names, "probe": self.probe, "lengths": self.lengths, "fingerprint": self.fingerprint}
        table = pa.table(columns, names=["hashes", "records", "sets", "beginnings", "bits"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema.with_metadata({_HEADER_KEY: json.dumps(header)})) as writer:
            writer.write_table(table)
        return memoryview(sink.getvalue())


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
    for array, kind in ((hashes, "<u8"), (records, "<u4"), (sets, "<u2")):
        digest.update(np.ascontiguousarray(array, kind).tobytes())
    return OverlapIndex(names, probe, lengths, hashes, records, sets, probes, packed, digest.hexdigest())


def load_index(path: str) -> OverlapIndex:
    """Memory-map the index in a file; raise InputError if it is invalid or truncated."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as source:
            table = pa.ipc.open_file(source).read_all()
        header = json.loads(table.schema.metadata[_HEADER_KEY])
        names = tuple(header["names"])
        lengths = tuple(header["lengths"])
        hashes, records, sets, beginnings, bits = (column.chunk(0).values.to_numpy() for column in table.columns)
        return OverlapIndex(
            names, header["probe"], lengths, hashes, records, sets, beginnings, bits, header["fingerprint"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not an index of evaluation sets ({error}); make it again.") from error
    except OSError as error:
        raise InputError(f"The index of evaluation sets cannot be read: {error}") from error


def _search_sorted(ordered: U64, numbers: U64) -> WordPositions:
    """Return the index of each number in a non-empty sorted array, or -1."""
    entries = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
    return np.where(ordered[entries] == numbers, entries, -1)


def make_decontamination_step(settings: DecontaminationSettings) -> CleanFunction:
    """Return a function that drops texts that share words with a set.

    The index is memory-mapped, so workers share its pages. Raises InputError if it is missing or invalid.
    """
    if settings.index is None:
        raise InputError(
            "decontaminate: there is no index of the evaluation sets yet; make one with "
            "batchloom.preparation.identity.build_overlap_index(settings, folder)."
        )
    return make_step_with_index(load_index(settings.index))


def make_step_with_index(index: OverlapIndex) -> CleanFunction:
    return functools.partial(_clean_text, index)


def _clean_text(index: OverlapIndex, text: str) -> str | DroppedText:
    """Search a text in chunks, each with the last words of the previous one."""
    carry_limit = index.lengths[-1] - 1
    words = np.zeros(0, np.uint64)
    preceding_words = 0
    for chunk in _iter_chunks(text, _CHUNK_CHARACTERS):
        carry = words[max(0, len(words) - carry_limit) :]
        preceding_words += len(words) - len(carry)
        words = np.concatenate((carry, hash_words(chunk)))
        match = index.find_first(words)
        if match:
            position, n, entry = match
            name = index.names[int(index.sets[entry])]
            record = int(index.records[entry]) + 1
            shared_words = " ".join(_read_words_at(text, preceding_words + position, n))
            return DroppedText(OVERLAP_REASON.format(name), f"record {record:,} of {name}: {shared_words!r}")
    return text


def _read_words_at(text: str, start: int, count: int) -> list[str]:
    words = chain.from_iterable(map(split_normal_words, _iter_chunks(text, _CHUNK_CHARACTERS)))
    return list(islice(words, start, start + count))


def _iter_chunks(text: str, size: int) -> Iterator[str]:
    """Yield chunks of at least ``size`` characters of a text, split at white space."""
    start = 0
    while start < len(text):
        space = _SPACE_PATTERN.search(text, start + size)
        stop = space.start() if space else len(text)
        yield text[start:stop]
        start = stop
