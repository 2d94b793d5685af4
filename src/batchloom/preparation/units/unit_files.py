"""Temporary files of a unit: tokens by subset, document rows, media, bad records."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.core.files import PARTIAL_SUFFIX
from batchloom.core.loss_weights import TokenFlags
from batchloom.preparation.dedup.near_duplicates import NO_KEY, compute_signatures
from batchloom.preparation.dedup.sorted_keys import make_key_records, open_key_writer
from batchloom.preparation.documents.chat_encoding import PlacedMedium
from batchloom.preparation.documents.token_encoder import BAD_LABEL, make_duplicate_keys, strip_control_tokens
from batchloom.preparation.settings.recipe import DedupRecipe
from batchloom.preparation.units.unit_columns import FIELD_NAMES, UnitColumns, UnitColumnsWriter
from batchloom.preparation.units.unit_media import UnitMediaWriter, compute_media_salts
from batchloom.preparation.units.unit_rows import (
    MAX_DOCUMENTS,
    concatenate_ranges,
    mark_first_of_records,
    stored_lengths,
    tokens_file_name,
    trained_file_name,
)
from batchloom.preparation.units.work_folder import BAD_NAME, KEYS_NAME, ROWS_NAME, SIGNATURES_NAME
from batchloom.store import BAD, wrap_write_errors
from batchloom.store.format import SUBSETS, compute_pair_numbers, split_pair_numbers

_CHUNK_TOKENS = 1 << 20


@final
class UnitFiles:
    """Writer of a unit's temporary files; ``dedup`` decides which keys are written."""

    def __init__(self, folder: Path, dedup: DedupRecipe) -> None:
        self._folder, self._dedup = folder, dedup
        self._last, self._rows = (-1, -1), 0
        self._last_bad, self._bad_in_order = (-1, -1), True
        self._stack = contextlib.ExitStack()
        self._key = self._stack.enter_context(open_key_writer(folder / KEYS_NAME)) if dedup.mode != "none" else None
        self._open: dict[str, IO[bytes]] = {}
        self._hashes = {name: xxhash.xxh3_128() for name in SUBSETS}
        self._tokens = dict.fromkeys(SUBSETS, 0)
        self._media, self._documents = UnitMediaWriter(folder), 0
        self._field_bytes = 0
        self._columns = UnitColumnsWriter(folder)
        near = [SIGNATURES_NAME] if dedup.mode == "near" else []
        for name in (ROWS_NAME, BAD_NAME, *near, *map(tokens_file_name, SUBSETS)):
            with wrap_write_errors(folder):
                self._open[name] = (folder / name).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*sys.exc_info())
        self._media.close()
        self._columns.close()
        for file in self._open.values():
            # A failed write has raised already; closing would only raise it again.
            with contextlib.suppress(OSError):
                file.close()

    def add(
        self,
        tokens: NDArray[np.generic],
        rows: NDArray[np.void],
        codes: NDArray[np.uint8],
        trained: TokenFlags | None = None,
        *,
        added: tuple[int, int] = (0, 0),
        plain: tuple[NDArray[np.generic], NDArray[np.uint32]] | None = None,
        media: Sequence[Sequence[PlacedMedium]] = (),
    ) -> None:
        """Append documents: tokens of unseen ones (concatenated), rows and subset codes.

        ``trained`` has the flag or weight code of each token; None means that all are trained. ``added`` is the number
        of control tokens before and after the text of each document. ``plain`` has the tokens and lengths of unseen
        documents to compare; None to compare those written. ``media`` has the media of each document; empty if there
        are none.
        """
        lengths = stored_lengths(rows)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        for code, name in enumerate(SUBSETS):
            subset_mask = (codes == code) & (rows["seen"] == 0)
            if subset_mask.any():
                ranges = starts[subset_mask], stops[subset_mask]
                subset_tokens = concatenate_ranges(tokens, *ranges)
                self._hashes[name].update(subset_tokens.data)
                with wrap_write_errors(self._folder):
                    self._open[tokens_file_name(name)].write(subset_tokens.data)
                    if trained is not None or trained_file_name(name) in self._open:
                        flags = np.ones(len(tokens), bool) if trained is None else trained
                        self._write_trained_flags(name, concatenate_ranges(flags, *ranges))
                self._tokens[name] += subset_tokens.size
        if media:
            self._media.add(media, self._documents)
        self._documents += len(rows)
        with wrap_write_errors(self._folder):
            self._open[ROWS_NAME].write(rows.tobytes())
        if self._key is not None and len(rows):
            fresh = mark_first_of_records(rows, self._last)
            self._last = int(rows["part"][-1]), int(rows["record"][-1])
            first = rows[fresh]
            if self._rows + len(rows) > MAX_DOCUMENTS:
                raise InputError(
                    f"A file that cannot be split into units holds more than {MAX_DOCUMENTS:,} documents, too "
                    "many to number; unpack it, split it into several, or set --dedup none."
                )
            numbers = (self._rows + np.flatnonzero(fresh)).astype(np.uint32)
            keys = make_duplicate_keys(first["hash"], first["side"] == BAD)
            self._key(make_key_records(keys, numbers, first["part"].astype(np.uint32)))
            if self._dedup.mode == "near":
                compared_lengths = stored_lengths(rows)
                if plain is not None:
                    tokens = plain[0]
                    compared_lengths[rows["seen"] == 0] = plain[1]
                self._write_signatures(
                    tokens, compared_lengths, rows, fresh, (added, compute_media_salts(media, len(rows)))
                )
            self._rows += len(rows)

    def _write_signatures(
        self,
        tokens: NDArray[np.generic],
        compared_lengths: NDArray[np.int64],
        rows: NDArray[np.void],
        fresh: NDArray[np.bool_],
        how_compared: tuple[tuple[int, int], NDArray[np.uint64]],
    ) -> None:
        """Write the MinHash signatures; documents of one record are hashed as one.

        ``how_compared``: numbers of added control tokens, and salts that distinguish media.
        """
        added, salts = how_compared
        banding = self._dedup.banding
        # Seen texts are exact duplicates already, so they need no signature.
        first = np.flatnonzero(fresh & (rows["seen"] == 0))
        keys = np.full((len(rows), banding.bands), NO_KEY)
        if len(first):
            lengths = np.add.reduceat(compared_lengths, first)
            skipped = int(compared_lengths[: first[0]].sum())
            ids, lengths = strip_control_tokens(tokens[skipped:], lengths, added)
            signatures = compute_signatures(
                ids, lengths, bands=banding.bands, rows=banding.rows, shingle=banding.shingle
            )
            # Answers of one text with different labels are no duplicates.
            salt = np.where(rows["side"][first] == BAD, BAD_LABEL, salts[first])
            needs_salt = (salt != 0)[:, None] & (signatures != NO_KEY)
            keys[first] = np.where(needs_salt, np.maximum(signatures ^ salt[:, None], 1), signatures)
        with wrap_write_errors(self._folder):
            self._open[SIGNATURES_NAME].write(np.ascontiguousarray(keys, "<u8").data)

    def _write_trained_flags(self, subset: str, flags: TokenFlags) -> None:
        """Append flags; tokens before the first flags of a subset count as trained."""
        name = trained_file_name(subset)
        if name not in self._open:
            self._open[name] = (self._folder / name).open("wb")
            for start in range(0, self._tokens[subset], _CHUNK_TOKENS):
                size = min(_CHUNK_TOKENS, self._tokens[subset] - start)
                self._open[name].write(np.ones(size, bool).data)
        self._open[name].write(flags.data)

    def add_fields(self, fields: Sequence[bytes]) -> None:
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
        self._stack.close()
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
