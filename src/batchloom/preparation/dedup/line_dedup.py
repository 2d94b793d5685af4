"""Lines or paragraphs that stood before: their keys, and texts without them.

A line ends at a line feed; paragraphs are parted by blank lines. Both are compared without the
white space at their ends. Pieces are numbered through the texts of a unit, blank ones too, so that
the same count finds them again.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.preparation.dedup.duplicate_search import read_unit_duplicates
from batchloom.preparation.dedup.sorted_keys import KEY

RepeatUnit = Literal["lines", "paragraphs"]

_BLANK_LINE = re.compile(r"\n\s*\n")
_PARAGRAPH_SEPARATOR = re.compile(r"(\n\s*\n)")
_MAX_SEGMENTS = 1 << 32
# Numbers whose drops are in memory at once.
_CHUNK_NUMBERS = 1 << 22
_CACHE_CHARACTERS = 1 << 14


def count_segments(text: str, pieces: RepeatUnit) -> int:
    """How many pieces a text has; an empty one has one."""
    if pieces == "lines":
        return text.count("\n") + 1
    return sum(1 for _ in _BLANK_LINE.finditer(text)) + 1


def hash_segments(
    texts: Sequence[str], parts: Sequence[int], start: int, pieces: RepeatUnit
) -> tuple[NDArray[np.void], int]:
    """The keys of the pieces of texts, KEY [pieces that are not blank], and the number after the last.

    A key is the XXH3-128 of the piece's UTF-8 without the white space at its ends.

    Args:
        texts: of the next documents of a unit.
        parts: the place of each text's file part in the unit.
        start: the number of the first piece, which is that of the pieces before it in the unit.
        pieces: ``lines`` or ``paragraphs``.

    Raises:
        InputError: a unit has more pieces than can be numbered.
    """
    digests: list[bytes] = []
    shown = [np.zeros(0, bool)]
    for some in _iter_text_batches(texts):
        split = _split_segments(some, pieces)
        encoded = map(str.encode, filter(None, split))
        digests.append(b"".join(map(xxhash.xxh3_128_digest, encoded)))
        shown.append(np.fromiter(map(bool, split), bool, len(split)))
    numbers = np.flatnonzero(np.concatenate(shown))
    stop = start + sum(map(len, shown))
    if stop > _MAX_SEGMENTS:
        raise InputError(
            f"One unit of input has more than {_MAX_SEGMENTS:,} {pieces}, too many to number; cut the file it "
            f"comes from into "
            "several."
        )
    records = np.empty(len(numbers), KEY)
    # A digest is big-endian, its high half first.
    halves = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    records["high"], records["low"] = halves[:, 0], halves[:, 1]
    counts = [count_segments(text, pieces) for text in texts]
    records["part"] = np.repeat(np.asarray(parts, np.uint32), counts)[numbers]
    records["number"] = numbers + start
    return records, stop


def _iter_text_batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Stretches of texts whose pieces stay in a core's cache together."""
    first = size = 0
    for place, text in enumerate(texts):
        size += len(text)
        if size >= _CACHE_CHARACTERS:
            yield texts[first : place + 1]
            first, size = place + 1, 0
    if first < len(texts):
        yield texts[first:]


def _split_segments(texts: Sequence[str], pieces: RepeatUnit) -> list[str]:
    """The pieces of texts without the white space at their ends."""
    if pieces == "lines":
        return list(map(str.strip, "\n".join(texts).split("\n")))
    return [piece.strip() for text in texts for piece in _BLANK_LINE.split(text)]


def remove_segments(
    texts: Sequence[str], dropped: NDArray[np.integer], start: int, pieces: RepeatUnit
) -> tuple[list[str | None], int]:
    """Texts without the pieces that go, and the number after their last piece.

    A piece goes with the line feed or the blank lines behind it; everything else stays as it is.

    Args:
        texts: of the next documents of a unit, as :func:`hash_segments` was given them.
        dropped: numbers of the pieces that go, ascending; others than those of these texts do not matter.
        start: the number of the first piece.
        pieces: ``lines`` or ``paragraphs``.

    Returns:
        For each text what is left, None where pieces went and nothing but white space is left.
    """
    bounds = start + np.cumsum([0, *(count_segments(text, pieces) for text in texts)])
    places = np.searchsorted(dropped, bounds).tolist()
    left: list[str | None] = list(texts)
    for at in np.flatnonzero(np.diff(places)).tolist():
        going = (dropped[places[at] : places[at + 1]] - bounds[at]).tolist()
        rest = _drop_segments(texts[at], going, pieces)
        left[at] = rest if rest.strip() else None
    return left, int(bounds[-1])


def _drop_segments(text: str, going: list[int], pieces: RepeatUnit) -> str:
    gone = set(going)
    if pieces == "lines":
        return "\n".join([line for place, line in enumerate(text.split("\n")) if place not in gone])
    both = _PARAGRAPH_SEPARATOR.split(text)
    stay = [place for place in range(0, len(both), 2) if place // 2 not in gone]
    # The text ends with its last paragraph, without what parted that from the next.
    kept = [both[place] + both[place + 1] for place in stay[:-1]]
    return "".join([*kept, *(both[place] for place in stay[-1:])])


@final
class LineDeduplicator:
    """Takes the pieces that were found twice out of the texts of one unit, in their order.

    Args:
        files: what :func:`~batchloom.preparation.dedup.find` wrote.
        unit: the number of the unit.
        pieces: ``lines`` or ``paragraphs``.
    """

    def __init__(self, files: Sequence[Path], unit: int, pieces: RepeatUnit) -> None:
        self._files, self._unit, self.pieces = files, unit, pieces
        self._next = self._known = 0
        self._dropped = np.zeros(0, np.uint32)

    def __call__(self, texts: Sequence[str]) -> list[str | None]:
        """What is left of the next texts of the unit; see :func:`remove_segments`.

        Raises:
            OutputError: a file cannot be read, or was cut.
        """
        stop = self._next + sum(count_segments(text, self.pieces) for text in texts)
        if stop > self._known:
            self._known = stop + _CHUNK_NUMBERS
            rows = read_unit_duplicates(self._files, self._unit, self._next, self._known)
            self._dropped = rows["number"].copy()
        left, self._next = remove_segments(texts, self._dropped, self._next, self.pieces)
        return left
