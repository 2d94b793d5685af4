r"""The ``.pairs`` file: pair number and side of each document of a shard.

Layout (little-endian): 8 bytes ``BLMPAIR\0``; u64 version 1; u64 documents D; u64 zero; then the
columns pair u64 [D] and side u8 [D]. Only preference stores have it, for every shard.

In a store of pairs, every even document is a chosen answer and the next one the rejected answer of the same
pair. Labelled answers each have a pair number of their own. Pair numbers ascend.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.store.format.file_header import HEADER, make_wrong_format_error, read_header
from batchloom.store.format.megatron_index import map_file

PreferenceKind = Literal["", "pairs", "labels"]
PREFERENCE_KINDS: tuple[str, ...] = get_args(PreferenceKind)

CHOSEN, REJECTED, GOOD, BAD = 1, 2, 3, 4
SIDE_NAMES = ("", "chosen", "rejected", "good", "bad")

PAIR_ROW_BYTES = 9
MAGIC = b"BLMPAIR\x00"
_RECORD_BITS = 40
_MAX_PARTS = 1 << 23
_REMEDY = "The store is damaged: run batchloom check on it."


@dataclass(frozen=True, slots=True)
class PairIndex:
    """Pair and side of documents, in columns of equal length D.

    Attributes:
        pairs: pair number of each document, uint64 [D].
        sides: ``CHOSEN``, ``REJECTED``, ``GOOD`` or ``BAD``, uint8 [D].
    """

    pairs: NDArray[np.uint64]
    sides: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.sides)

    def to_bytes(self) -> bytes:
        """Return the complete ``.pairs`` file."""
        head = HEADER.pack(MAGIC, 1, len(self), 0)
        return head + self.pairs.astype("<u8").tobytes() + self.sides.astype("u1").tobytes()

    def find_fault(self, preferences: PreferenceKind) -> str:
        """Describe the first fault, or return an empty string; pairs must not be split."""
        allowed_sides = (CHOSEN, REJECTED) if preferences == "pairs" else (GOOD, BAD)
        unknown_sides = np.flatnonzero((self.sides != allowed_sides[0]) & (self.sides != allowed_sides[1]))
        if unknown_sides.size:
            index = int(unknown_sides[0])
            return f"document {index} has side {self.sides[index]}, which is not a side of {preferences}"
        firsts = self.pairs
        if preferences == "pairs":
            if len(self) % 2:
                return f"{len(self):,} documents do not form pairs"
            firsts = self.pairs[::2]
            is_pair = (self.sides[::2] == CHOSEN) & (self.sides[1::2] == REJECTED)
            broken_pairs = np.flatnonzero(~is_pair | (firsts != self.pairs[1::2]))
            if broken_pairs.size:
                index = 2 * int(broken_pairs[0])
                return f"documents {index} and {index + 1} are not the chosen and the rejected answer of one pair"
        if (firsts[1:] <= firsts[:-1]).any():
            return "its pairs are not in ascending order, so one may be repeated"
        return ""


def compute_pair_numbers(parts: NDArray[np.uint32], records: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the pair number of each document, uint64 [D], below 2**63.

    Args:
        parts: index into the manifest's list of parts, uint32 [D].
        records: 0-based number of the record inside its part, uint64 [D].

    Raises:
        InputError: there are too many parts or records.
    """
    if parts.size and (int(parts.max()) >= _MAX_PARTS or int(records.max()) >= 1 << _RECORD_BITS):
        raise InputError(
            f"A store of preferences has at most {_MAX_PARTS:,} parts of at most 2**{_RECORD_BITS} records; give "
            "fewer, larger files."
        )
    return (parts.astype(np.uint64) << np.uint64(_RECORD_BITS)) | records.astype(np.uint64)


def map_pair_index(path: Path, documents: int, preferences: PreferenceKind) -> PairIndex:
    """Map and verify the ``.pairs`` file of a shard; the columns are views of it.

    Args:
        path: path of the file.
        documents: number of documents of the shard.
        preferences: kind of the preferences.

    Raises:
        StoreError: the file is missing, of another type or version, has another number of documents, or a
            document lacks its other side.
    """
    return parse_pair_index(map_file(path), path, documents, preferences)


def parse_pair_index(view: memoryview, path: Path, documents: int, preferences: PreferenceKind) -> PairIndex:
    """Parse the content of a ``.pairs`` file; see :func:`map_pair_index`."""
    count, zero = read_header(view, path, MAGIC)
    if zero:
        raise make_wrong_format_error(path)
    if count != documents or len(view) != HEADER.size + PAIR_ROW_BYTES * documents:
        raise StoreError(
            f"{path} declares {count:,} documents in {len(view):,} bytes; its shard has {documents:,}. {_REMEDY}"
        )
    sides = PairIndex(
        pairs=np.frombuffer(view, "<u8", count, HEADER.size),
        sides=np.frombuffer(view, "u1", count, HEADER.size + 8 * count),
    )
    if fault := sides.find_fault(preferences):
        raise StoreError(f"{path}: {fault}. {_REMEDY}")
    return sides
