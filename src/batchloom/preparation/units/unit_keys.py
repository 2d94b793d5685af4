"""Keys and signatures of a unit's documents, by which duplicates are found."""

import contextlib
import os
import sys
from pathlib import Path
from typing import IO, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.preparation.dedup.near_duplicates import NO_KEY, compute_signatures
from batchloom.preparation.dedup.sorted_keys import make_key_records, open_key_writer
from batchloom.preparation.documents.document_facts import BAD_LABEL, make_duplicate_keys
from batchloom.preparation.documents.encode_text import strip_control_tokens
from batchloom.preparation.documents.encoded_batch import EncodedBatch
from batchloom.preparation.settings.recipe import DedupRecipe
from batchloom.preparation.units.unit_media import compute_media_salts
from batchloom.preparation.units.unit_rows import MAX_DOCUMENTS, mark_first_of_records, stored_lengths
from batchloom.preparation.units.work_folder import KEYS_NAME, SIGNATURES_NAME
from batchloom.store import BAD, wrap_write_errors


@final
class UnitKeysWriter:
    """Writer of what ``dedup`` compares: hashes, signatures, or nothing."""

    def __init__(self, folder: Path, dedup: DedupRecipe) -> None:
        self._folder = folder
        self._dedup = dedup
        self._last = (-1, -1)
        self._documents = 0
        self._stack = contextlib.ExitStack()
        self._add_keys = (
            self._stack.enter_context(open_key_writer(folder / KEYS_NAME)) if dedup.mode != "none" else None
        )
        self._signature_file: IO[bytes] | None = None
        if dedup.mode == "near":
            with wrap_write_errors(folder):
                self._signature_file = (folder / SIGNATURES_NAME).open("wb")

    def add(self, batch: EncodedBatch, rows: NDArray[np.void]) -> None:
        """Append the documents that :meth:`UnitFiles.add` takes."""
        if self._add_keys is None or not len(rows):
            return
        if self._documents + len(rows) > MAX_DOCUMENTS:
            raise InputError(
                f"A file that cannot be split into units holds more than {MAX_DOCUMENTS:,} documents, too "
                "many to number; unpack it, split it into several, or set --dedup none."
            )
        fresh = mark_first_of_records(rows, self._last)
        self._last = int(rows["part"][-1]), int(rows["record"][-1])
        first = rows[fresh]
        numbers = (self._documents + np.flatnonzero(fresh)).astype(np.uint32)
        keys = make_duplicate_keys(first["hash"], first["side"] == BAD)
        self._add_keys(make_key_records(keys, numbers, first["part"].astype(np.uint32)))
        if self._signature_file is not None:
            self._write_signatures(self._signature_file, batch, rows, fresh)
        self._documents += len(rows)

    def _write_signatures(
        self, signature_file: IO[bytes], batch: EncodedBatch, rows: NDArray[np.void], fresh: NDArray[np.bool_]
    ) -> None:
        """Write the MinHash signatures; documents of one record are hashed as one."""
        tokens = batch.ids
        compared_lengths = stored_lengths(rows)
        if batch.plain is not None:
            tokens, unseen_lengths = batch.plain
            compared_lengths[rows["seen"] == 0] = unseen_lengths
        salts = compute_media_salts(batch.media, len(rows))
        banding = self._dedup.banding
        # Seen texts are exact duplicates already, so they need no signature.
        first = np.flatnonzero(fresh & (rows["seen"] == 0))
        keys = np.full((len(rows), banding.bands), NO_KEY)
        if len(first):
            lengths = np.add.reduceat(compared_lengths, first)
            skipped = int(compared_lengths[: first[0]].sum())
            ids, lengths = strip_control_tokens(tokens[skipped:], lengths, batch.added)
            signatures = compute_signatures(
                ids, lengths, bands=banding.bands, rows=banding.rows, shingle=banding.shingle
            )
            # Answers of one text with different labels are no duplicates.
            salt = np.where(rows["side"][first] == BAD, BAD_LABEL, salts[first])
            needs_salt = (salt != 0)[:, None] & (signatures != NO_KEY)
            keys[first] = np.where(needs_salt, np.maximum(signatures ^ salt[:, None], 1), signatures)
        with wrap_write_errors(self._folder):
            signature_file.write(np.ascontiguousarray(keys, "<u8").data)

    def sync(self) -> None:
        """Complete the files and flush them to disk."""
        self._stack.close()
        if self._signature_file is not None:
            with wrap_write_errors(self._folder):
                self._signature_file.flush()
                os.fsync(self._signature_file.fileno())

    def close(self) -> None:
        # As for other files, a failed write has raised already.
        self._stack.__exit__(*sys.exc_info())
        if self._signature_file is not None:
            with contextlib.suppress(OSError):
                self._signature_file.close()
