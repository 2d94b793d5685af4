"""Temporary files of a unit: tokens by subset, document rows, media, bad records."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.files import PARTIAL_SUFFIX
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.encoded_batch import EncodedBatch
from batchloom.preparation.settings.recipe import DedupRecipe
from batchloom.preparation.units.unit_columns import FIELD_NAMES, UnitColumns, UnitColumnsWriter
from batchloom.preparation.units.unit_keys import UnitKeysWriter
from batchloom.preparation.units.unit_media import UnitMediaWriter
from batchloom.preparation.units.unit_rows import (
    concatenate_ranges,
    select_flag_ranges,
    stored_lengths,
    tokens_file_name,
    trained_file_name,
)
from batchloom.preparation.units.work_folder import BAD_NAME, ROWS_NAME
from batchloom.store import wrap_write_errors
from batchloom.store.format import SUBSETS, compute_pair_numbers, split_pair_numbers

_CHUNK_TOKENS = 1 << 20


@final
class UnitFiles:
    """Writer of a unit's temporary files; ``dedup`` decides which keys are written."""

    def __init__(self, folder: Path, dedup: DedupRecipe) -> None:
        self._folder = folder
        self._last_bad = (-1, -1)
        self._bad_in_order = True
        self._keys = UnitKeysWriter(folder, dedup)
        self._open: dict[str, IO[bytes]] = {}
        self._hashes = {name: xxhash.xxh3_128() for name in SUBSETS}
        self._tokens = dict.fromkeys(SUBSETS, 0)
        self._media = UnitMediaWriter(folder)
        self._documents = 0
        self._field_bytes = 0
        self._columns = UnitColumnsWriter(folder)
        for name in (ROWS_NAME, BAD_NAME, *map(tokens_file_name, SUBSETS)):
            with wrap_write_errors(folder):
                self._open[name] = (folder / name).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._keys.close()
        self._media.close()
        self._columns.close()
        for file in self._open.values():
            # A failed write has raised already; closing would only raise it again.
            with contextlib.suppress(OSError):
                file.close()

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        """Append documents: a batch of the unseen ones, and rows and subset codes of all."""
        lengths = stored_lengths(rows)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        for code, name in enumerate(SUBSETS):
            subset_mask = (codes == code) & (rows["seen"] == 0)
            if subset_mask.any():
                ranges = starts[subset_mask], stops[subset_mask]
                subset_tokens = concatenate_ranges(batch.ids, *ranges)
                self._hashes[name].update(subset_tokens.data)
                with wrap_write_errors(self._folder):
                    self._open[tokens_file_name(name)].write(subset_tokens.data)
                    if not batch.flags.is_plain or trained_file_name(name) in self._open:
                        self._write_flags(name, select_flag_ranges(batch.flags, *ranges))
                self._tokens[name] += subset_tokens.size
        if batch.media:
            self._media.add(batch.media, self._documents)
        self._documents += len(rows)
        self._write_fields(batch.fields)
        with wrap_write_errors(self._folder):
            self._open[ROWS_NAME].write(rows.tobytes())
        self._keys.add(batch, rows)

    def _write_flags(self, subset: str, flags: LossFlags) -> None:
        """Append flags; tokens before the first flags of a subset count as trained."""
        name = trained_file_name(subset)
        if name not in self._open:
            self._open[name] = (self._folder / name).open("wb")
            for start in range(0, self._tokens[subset], _CHUNK_TOKENS):
                size = min(_CHUNK_TOKENS, self._tokens[subset] - start)
                self._open[name].write(np.ones(size, bool).data)
        self._open[name].write(flags.codes.data)

    def _write_fields(self, fields: Sequence[bytes]) -> None:
        """Append the JSON of carried columns: all documents of a job carry some, or none."""
        if not fields:
            return
        ends = self._field_bytes + np.cumsum([len(text) for text in fields], dtype=np.uint64)
        self._field_bytes = int(ends[-1])
        with wrap_write_errors(self._folder):
            for name, data in zip(FIELD_NAMES, (ends.astype("<u8").tobytes(), b"".join(fields)), strict=True):
                if name not in self._open:
                    self._open[name] = (self._folder / name).open("wb")
                self._open[name].write(data)

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Append columns of records of a part; all parts have the same names and types."""
        self._columns.add(part, columns)

    def move_columns(self, columns: "UnitColumns", parts: NDArray[np.uint32], shift: NDArray[np.uint64]) -> None:
        """Append columns of a stream batch under other numbers of parts and records."""
        local_parts, records = split_pair_numbers(columns.keys)
        keys = compute_pair_numbers(parts[local_parts], records + shift[local_parts])
        self._columns.write(UnitColumns(keys, columns.table))

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        with wrap_write_errors(self._folder):
            for bad in bad_records:
                self._open[BAD_NAME].write(msgspec.json.encode((part, bad)) + b"\n")
                position = part, bad.record
                self._bad_in_order &= self._last_bad <= position
                self._last_bad = position

    def sync(self) -> None:
        """Flush the files to disk, bad records in input order."""
        self._keys.sync()
        self._media.sync()
        self._columns.sync()
        with wrap_write_errors(self._folder):
            for file in self._open.values():
                file.flush()
                os.fsync(file.fileno())
            # The order of discovery depends on timing.
            if not self._bad_in_order:
                sort_bad_records(self._folder / BAD_NAME)

    def checksums(self) -> dict[str, str]:
        return {name: value.hexdigest() for name, value in self._hashes.items()}


_LINE_DECODER = msgspec.json.Decoder(tuple[int, BadRecord])
_LINE_INDEX = np.dtype([("part", np.uint32), ("record", np.uint64), ("size", np.uint64)])


def _iter_line_positions(file: Iterable[bytes]) -> Iterator[tuple[int, int, int]]:
    """Yield part, record and size of each line of a file of bad records."""
    for line in file:
        part, bad = _LINE_DECODER.decode(line)
        yield part, bad.record, len(line)


def sort_bad_records(path: Path) -> None:
    """Stably sort a file of bad records by part and record, with an index in memory."""
    with path.open("rb") as file:
        index = np.fromiter(_iter_line_positions(file), _LINE_INDEX)
        stops = np.cumsum(index["size"])
        sorted_path = path.with_name(path.name + PARTIAL_SUFFIX)
        with sorted_path.open("wb") as sorted_file:
            for number in np.lexsort((index["record"], index["part"])):
                file.seek(int(stops[number] - index["size"][number]))
                sorted_file.write(file.readline())
            sorted_file.flush()
            os.fsync(sorted_file.fileno())
    sorted_path.replace(path)
