"""Reading of imported files: every id is checked and hashed once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import xxhash

from batchloom.preparation.imports.token_files import (
    EdgeTokens,
    TokenBatch,
    TokenFile,
    VocabularyCheck,
    iter_token_batches,
)
from batchloom.preparation.report.progress import Listener, Phase, Progress


@dataclass(slots=True)
class ImportedFile:
    """An imported file with the XXH3-128 of its ids and its document edges."""

    file: TokenFile
    subset: str
    checksum: str = ""
    edges: EdgeTokens = field(default_factory=EdgeTokens)


@final
class ImportReader:
    """Reader of the documents of all files, which reports progress."""

    def __init__(self, files: Sequence[ImportedFile], check: VocabularyCheck, phase: Phase, listener: Listener) -> None:
        self._check = check
        self._phase = phase
        self._listener = listener
        self._bytes_total = sum(imported_file.file.tokens.nbytes for imported_file in files)
        self._bytes = self._documents = self._tokens = 0

    def iter_batches(self, imported_file: ImportedFile) -> Iterator[TokenBatch]:
        """Yield the documents of a file; fill in its checksum and edges."""
        digest = xxhash.xxh3_128()
        for batch in iter_token_batches(imported_file.file):
            self._check.check(imported_file.file, batch)
            imported_file.edges.add(batch)
            digest.update(np.ascontiguousarray(batch.tokens).data)
            yield batch
            self._bytes += batch.tokens.nbytes
            self._documents += len(batch.lengths)
            self._tokens += batch.tokens.size
            progress = Progress(self._phase, self._bytes, self._bytes_total, 0, self._documents, self._tokens, 0)
            self._listener(progress)
        imported_file.checksum = digest.hexdigest()
