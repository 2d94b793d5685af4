"""Bad records of a unit in the order of the input, sorted in files: where all may be bad, they are millions."""

import heapq
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from batchloom.core.document import BadRecord
from batchloom.core.partial_files import PARTIAL_SUFFIX

# Lines that are sorted in memory at once, and of each such run what is held while they are merged.
_RUN_BYTES = 8 << 20
_BLOCK_BYTES = 16 << 10
_LINE_DECODER = msgspec.json.Decoder(tuple[int, BadRecord])


def sort_bad_records(path: Path) -> None:
    """Sort a file of bad records by part and record; those of one record stay as they follow each other.

    The file is written over in place, so who has it open goes on with it.

    Args:
        path: lines of JSON, each the number of a part and a bad record of it.

    Raises:
        OSError: it cannot be read or written.
    """
    runs_path, bounds = path.with_name(path.name + PARTIAL_SUFFIX), [0]
    with path.open("r+b") as file, runs_path.open("w+b") as runs:
        while lines := file.readlines(_RUN_BYTES):
            lines.sort(key=_record_position)
            runs.writelines(lines)
            bounds.append(runs.tell())
            # The next run takes its room.
            del lines
        file.seek(0)
        run_iterators = [_iter_lines(runs, a, b) for a, b in pairwise(bounds)]
        merged: Iterator[bytes] = heapq.merge(*run_iterators, key=_record_position)
        file.writelines(merged)
    runs_path.unlink()


def _record_position(line: bytes) -> tuple[int, int]:
    part, bad = _LINE_DECODER.decode(line)
    return part, bad.record


def _iter_lines(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """The lines of a stretch of a file in which others read, too."""
    while start < stop:
        file.seek(start)
        # One byte less: lines that are as long as asked for together do not end it.
        lines = file.readlines(max(1, min(_BLOCK_BYTES, stop - start) - 1))
        start += sum(map(len, lines))
        yield from lines
