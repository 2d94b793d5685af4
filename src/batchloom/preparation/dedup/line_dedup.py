"""Deduplication of lines or paragraphs within texts.

A line ends at a line feed; blank lines separate paragraphs. Comparison ignores the white space at
both ends of a segment. Segments are numbered through all texts of a unit. Blank ones count too, so
that counting again finds the same segments.
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
# Segment numbers whose drops are in memory at once.
_CHUNK_NUMBERS = 1 << 22
_CACHE_CHARACTERS = 1 << 14


def count_segments(text: str, repeat_unit: RepeatUnit) -> int:
    """Return the number of segments of a text; an empty text has one."""
    if repeat_unit == "lines":
        return text.count("\n") + 1
    return sum(1 for _ in _BLANK_LINE.finditer(text)) + 1


def hash_segments(
    texts: Sequence[str], parts: Sequence[int], start: int, repeat_unit: RepeatUnit
) -> tuple[NDArray[np.void], int]:
    """Return the keys of the segments that are not blank, KEY, and the next number.

    A key is the XXH3-128 of the segment's UTF-8 without the white space at its ends.

    Args:
        texts: texts of the next documents of a unit.
        parts: index of each text's file part in the unit.
        start: number of the first segment: the number of earlier segments in the unit.
        repeat_unit: ``lines`` or ``paragraphs``.

    Raises:
        InputError: a unit has more segments than can be numbered.
    """
    digests: list[bytes] = []
    non_blank_masks = [np.zeros(0, bool)]
    for text_batch in _iter_text_batches(texts):
        segments = _split_segments(text_batch, repeat_unit)
        encoded = map(str.encode, filter(None, segments))
        digests.append(b"".join(map(xxhash.xxh3_128_digest, encoded)))
        non_blank_masks.append(np.fromiter(map(bool, segments), bool, len(segments)))
    numbers = np.flatnonzero(np.concatenate(non_blank_masks))
    stop = start + sum(map(len, non_blank_masks))
    if stop > _MAX_SEGMENTS:
        raise InputError(
            f"One unit of input has more than {_MAX_SEGMENTS:,} {repeat_unit}, too many to number; split its file "
            "into several."
        )
    records = np.empty(len(numbers), KEY)
    # A digest is big-endian, its high half first.
    halves = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    records["high"], records["low"] = halves[:, 0], halves[:, 1]
    counts = [count_segments(text, repeat_unit) for text in texts]
    records["part"] = np.repeat(np.asarray(parts, np.uint32), counts)[numbers]
    records["number"] = numbers + start
    return records, stop


def _iter_text_batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield batches of texts whose segments fit into the cache of a core."""
    first = size = 0
    for index, text in enumerate(texts):
        size += len(text)
        if size >= _CACHE_CHARACTERS:
            yield texts[first : index + 1]
            first = index + 1
            size = 0
    if first < len(texts):
        yield texts[first:]


def _split_segments(texts: Sequence[str], repeat_unit: RepeatUnit) -> list[str]:
    """Return the segments of texts, stripped of white space."""
    if repeat_unit == "lines":
        return list(map(str.strip, "\n".join(texts).split("\n")))
    return [segment.strip() for text in texts for segment in _BLANK_LINE.split(text)]


def remove_segments(
    texts: Sequence[str], dropped: NDArray[np.integer], start: int, repeat_unit: RepeatUnit
) -> tuple[list[str | None], int]:
    """Return the texts without the dropped segments, and the next segment number.

    The line feed or the blank lines after a segment are dropped with it; all other text is unchanged.
    A text is None if segments were dropped and only white space remains. ``dropped`` is ascending and
    may hold numbers outside these texts.
    """
    bounds = start + np.cumsum([0, *(count_segments(text, repeat_unit) for text in texts)])
    drop_bounds = np.searchsorted(dropped, bounds).tolist()
    remaining_texts: list[str | None] = list(texts)
    for text_index in np.flatnonzero(np.diff(drop_bounds)).tolist():
        dropped_segments = (
            dropped[drop_bounds[text_index] : drop_bounds[text_index + 1]] - bounds[text_index]
        ).tolist()
        remaining_text = _drop_segments(texts[text_index], dropped_segments, repeat_unit)
        remaining_texts[text_index] = remaining_text if remaining_text.strip() else None
    return remaining_texts, int(bounds[-1])


def _drop_segments(text: str, dropped_segments: list[int], repeat_unit: RepeatUnit) -> str:
    dropped_set = set(dropped_segments)
    if repeat_unit == "lines":
        return "\n".join([line for index, line in enumerate(text.split("\n")) if index not in dropped_set])
    segments_and_separators = _PARAGRAPH_SEPARATOR.split(text)
    kept_indices = [index for index in range(0, len(segments_and_separators), 2) if index // 2 not in dropped_set]
    # The text ends with its last remaining paragraph, without the separator after it.
    kept_paragraphs = [
        segments_and_separators[index] + segments_and_separators[index + 1] for index in kept_indices[:-1]
    ]
    return "".join([*kept_paragraphs, *(segments_and_separators[index] for index in kept_indices[-1:])])


@final
class LineDeduplicator:
    """Removal of repeated segments from the texts of one unit, in their order.

    Args:
        files: files of :func:`~batchloom.preparation.dedup.search_duplicates`.
        unit: number of the unit.
        repeat_unit: ``lines`` or ``paragraphs``.
    """

    def __init__(self, files: Sequence[Path], unit: int, repeat_unit: RepeatUnit) -> None:
        self._files = files
        self._unit = unit
        self.repeat_unit = repeat_unit
        self._next = self._loaded_stop = 0
        self._dropped = np.zeros(0, np.uint32)

    def __call__(self, texts: Sequence[str]) -> list[str | None]:
        """Return the next texts of the unit without repeats; see :func:`remove_segments`."""
        stop = self._next + sum(count_segments(text, self.repeat_unit) for text in texts)
        if stop > self._loaded_stop:
            self._loaded_stop = stop + _CHUNK_NUMBERS
            rows = read_unit_duplicates(self._files, self._unit, self._next, self._loaded_stop)
            self._dropped = rows["number"].copy()
        remaining_texts, self._next = remove_segments(texts, self._dropped, self._next, self.repeat_unit)
        return remaining_texts
