"""External sort of a unit's bad records into input order; there may be millions."""

import heapq
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from batchloom.core.document import BadRecord
from batchloom.core.files import PARTIAL_SUFFIX

# Bytes sorted in memory at once, and bytes buffered per sorted run during the merge.
_RUN_BYTES = 8 << 20
_BLOCK_BYTES = 16 << 10
_LINE_DECODER = msgspec.json.Decoder(tuple[int, BadRecord])


def sort_bad_records(path: Path) -> None:
    """Stably sort a file of bad records by part and record.

    The file is overwritten in place, so open descriptors stay valid. Each line is a JSON list of the number of a
    part and a bad record of it.
    """
    runs_path, bounds = path.with_name(path.name + PARTIAL_SUFFIX), [0]
    with path.open("r+b") as file, runs_path.open("w+b") as sorted_chunks:
        while lines := file.readlines(_RUN_BYTES):
            lines.sort(key=_record_position)
            sorted_chunks.writelines(lines)
            bounds.append(sorted_chunks.tell())
            # Free the run before the next one is read.
            del lines
        file.seek(0)
        run_iterators = [_iter_lines(sorted_chunks, a, b) for a, b in pairwise(bounds)]
        merged: Iterator[bytes] = heapq.merge(*run_iterators, key=_record_position)
        file.writelines(merged)
    runs_path.unlink()


def _record_position(line: bytes) -> tuple[int, int]:
    part, bad = _LINE_DECODER.decode(line)
    return part, bad.record


def _iter_lines(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines of a byte range of a file whose position others move, too."""
    while start < stop:
        file.seek(start)
        # One byte less, because readlines reads another line when the total equals the hint.
        lines = file.readlines(max(1, min(_BLOCK_BYTES, stop - start) - 1))
        start += sum(map(len, lines))
        yield from lines
