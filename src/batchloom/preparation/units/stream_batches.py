"""Batches that a stream has read and cached: a part of a unit, or several parts."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.files import read_regular_file
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.encoded_batch import EncodedBatch
from batchloom.preparation.units.unit_columns import UnitColumnsWriter
from batchloom.preparation.units.unit_media import UnitMediaWriter, read_placed_media, read_unit_media
from batchloom.preparation.units.unit_rows import ROW
from batchloom.preparation.units.work_folder import (
    BAD_NAME,
    UnitFacts,
    attempt_folder,
    move_into_place,
    translate_read_errors,
)
from batchloom.store import wrap_write_errors, write_file
from batchloom.store.write import make_folder, sync_folder

STREAM_BATCHES_FOLDER = "stretches"
_FACTS_FILE = "stretch.json"
_TOKENS = "tokens.bin"
_ROWS = "documents.rows"
_FLAGS = "trained.bool"


class StreamBatchFacts(msgspec.Struct, frozen=True):
    """Facts of a stream batch, with one part per section; ``place`` is its index."""

    place: int
    last: bool
    # For each section, the number of its part in the unit, and whether it is the complete part.
    parts: list[tuple[int, bool]]
    # For each call of ``add``, the number of documents and of tokens, and whether there are flags.
    batches: list[tuple[int, int, bool]]
    dtype: str
    # Number of documents of the train subset.
    train: int
    facts: UnitFacts


@final
class StreamBatchWriter:
    """Writer of one stream batch.

    Args:
        final_folder: folder of the complete batch.
        attempt: suffix that keeps the files of this attempt apart from those of other attempts.
    """

    def __init__(self, final_folder: Path, attempt: str) -> None:
        self._final_folder = final_folder
        self._folder = attempt_folder(final_folder, attempt)
        self._batches: list[tuple[int, int, bool]] = []
        self._documents = 0
        self._dtype = "<u2"
        self._train = 0
        make_folder(self._folder)
        self._media = UnitMediaWriter(self._folder)
        self._columns = UnitColumnsWriter(self._folder)
        self._open: dict[str, IO[bytes]] = {}
        with wrap_write_errors(self._folder):
            for name in (_TOKENS, _ROWS, _FLAGS, BAD_NAME):
                self._open[name] = (self._folder / name).open("wb")

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        if batch.media:
            self._media.add(batch.media, self._documents)
        self._documents += len(rows)
        self._dtype = batch.ids.dtype.str
        self._train += int((codes == 0).sum())
        with wrap_write_errors(self._folder):
            self._open[_TOKENS].write(np.ascontiguousarray(batch.ids).data)
            self._open[_ROWS].write(rows.tobytes())
            if not batch.flags.is_plain:
                self._open[_FLAGS].write(np.ascontiguousarray(batch.flags.codes).data)
        self._batches.append((len(rows), len(batch.ids), not batch.flags.is_plain))

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        self._columns.add(part, columns)

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        with wrap_write_errors(self._folder):
            for bad in bad_records:
                self._open[BAD_NAME].write(msgspec.json.encode((part, bad)) + b"\n")

    def finish(self, number: int, parts: list[tuple[int, bool]], facts: UnitFacts, *, last: bool) -> None:
        with wrap_write_errors(self._folder):
            for file in self._open.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
        for further in (self._media, self._columns):
            further.sync()
            further.close()
        batch_facts = StreamBatchFacts(number, last, parts, self._batches, self._dtype, self._train, facts)
        write_file(self._folder / _FACTS_FILE, msgspec.json.encode(batch_facts))
        sync_folder(self._folder)
        move_into_place(self._folder, self._final_folder)

    def abandon(self) -> None:
        """Delete the files of a batch that was not read to its end."""
        for close in (self._media.close, self._columns.close, *(file.close for file in self._open.values())):
            with contextlib.suppress(OSError):
                close()
        shutil.rmtree(self._folder, ignore_errors=True)


def read_stream_batches(folder: Path) -> list[StreamBatchFacts] | None:
    """Read the facts of a unit's batches, in order; None if one is missing."""
    stream_batches: list[StreamBatchFacts] = []
    while not stream_batches or not stream_batches[-1].last:
        path = folder / f"{len(stream_batches):06d}" / _FACTS_FILE
        if not path.exists():
            return None
        with translate_read_errors(path):
            stream_batches.append(msgspec.json.decode(read_regular_file(path), type=StreamBatchFacts))
    return stream_batches


def iter_stream_documents(
    folder: Path, stream_batch: StreamBatchFacts
) -> Iterator[tuple[EncodedBatch, NDArray[np.void]]]:
    """Yield the documents of a batch with their tokens, flags and media."""
    with (
        translate_read_errors(folder / _ROWS),
        (folder / _ROWS).open("rb") as rows_file,
        (folder / _TOKENS).open("rb") as tokens_file,
        (folder / _FLAGS).open("rb") as flags_file,
    ):
        media = read_unit_media(folder)
        first = 0
        for documents, tokens, flagged in stream_batch.batches:
            rows = np.fromfile(rows_file, ROW, documents)
            ids = np.fromfile(tokens_file, stream_batch.dtype, tokens)
            flags = LossFlags(tokens, np.fromfile(flags_file, np.uint8, tokens) if flagged else None)
            placed_media = read_placed_media(media, first, documents)
            yield EncodedBatch(ids, rows["length"], flags, media=placed_media), rows
            first += documents
