"""What an examination of inputs finds, as values that are plain JSON in other words."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.preview import DocumentPreview
from batchloom.core.medium import MediumKind
from batchloom.store.read import MediaCount


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Lengths of documents, those that were read.

    Attributes:
        documents: how many were measured.
        mean, median, p95, longest: of their lengths; 95 of 100 are at most ``p95``.
    """

    documents: int
    mean: float
    median: int
    p95: int
    longest: int


@dataclass(frozen=True, slots=True)
class BadFacts:
    """A record that cannot be used.

    Attributes:
        file: the source.
        line: 1-based line, None where lines have no meaning or were not counted.
        row: 1-based row, likewise.
        column: 1-based column of the fault, None where it is the record as a whole.
        offset: byte of the (decompressed) source where the record begins.
        reason: what is wrong and how to mend it.
        snippet: how the record begins.
        sentence: all of it for people.
    """

    file: str
    line: int | None
    row: int | None
    column: int | None
    offset: int
    reason: str
    snippet: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """One source, or several that are read alike.

    Attributes:
        name: of the source; of several, of the first.
        path: where that lies.
        files: how many sources were looked at.
        format: ``jsonl``, ``json``, ``csv``, ``tsv``, ``parquet``, ``arrow``, ``text`` or ``code``.
        compression: what they are packed with, None for plain ones.
        bytes: listed bytes they stand for.
        way: ``text``, ``conversation``, ``tokens`` ...; what a record becomes.
        detected: the schema in one line; empty for text files.
        mapping: for each role the columns that hold it.
        unused: columns, and keys of messages as ``messages[].key``, that nothing reads.
        fault: why it cannot be read, or not to its end; else empty.
        suggestion: the ``--map`` that would make it work; None where there is no guess.
        records: records; with the next four estimated where not everything was read.
        documents: documents that come of them.
        empty: records that say nothing.
        bad: records that cannot be used.
        dropped: documents left out, by reason.
        total_tokens: tokens of the documents; None without a tokenizer.
        trained_tokens: how many of those are trained; None without a tokenizer.
        characters: lengths of documents in characters; None where there are none.
        tokens: lengths of documents in tokens; None without a tokenizer.
        media: images, sounds and frames of videos, by kind: how many, in how many documents, and how many tokens
            stand for them; empty where none are read.
        preview: the first documents, as a model will see them.
    """

    name: str
    path: str
    files: int
    format: str
    compression: str | None
    bytes: int
    way: str
    detected: str
    mapping: dict[str, tuple[str, ...]]
    unused: tuple[str, ...]
    fault: str
    suggestion: str | None
    records: int
    documents: int
    empty: int
    bad: int
    dropped: dict[str, int]
    total_tokens: int | None
    trained_tokens: int | None
    characters: LengthFacts | None
    tokens: LengthFacts | None
    media: dict[MediumKind, MediaCount]
    preview: tuple[DocumentPreview, ...]


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What makes ids of text.

    Attributes:
        name: as ``--tokenizer`` names it.
        vocab_size: one more than the largest id.
        engine: what encodes here.
        template: the chat template that is used; None where there are no conversations.
        lossy: whether characters it does not know leave no trace.
        dtype: of a token on disk.
    """

    name: str
    vocab_size: int
    engine: str
    template: str | None
    lossy: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class DuplicateFacts:
    """Documents that are there more than once, by a 128-bit hash of their content.

    Attributes:
        documents: how many were compared.
        repeated: how many of them have an earlier one that is equal.
        share: repeated / documents, 0 to 1.
        exact: whether every document was compared; a sample sees only few of the duplicates.
        left_out: whether ``prepare`` leaves them out where nobody says otherwise.
    """

    documents: int
    repeated: int
    share: float
    exact: bool
    left_out: bool


@dataclass(frozen=True, slots=True)
class ExaminationResult:
    """What was found in the inputs before any work is done on them.

    Attributes:
        inputs: as they were given, URLs without credentials.
        exact: whether everything was read; else counts are estimates from a sample.
        files, bytes: of the whole input, as listed.
        read_bytes: how many of those bytes were read.
        sources: one for each source, or group of sources that are read alike.
        tokenizer: None where there is none.
        tokenizer_missing: whether that is because it cannot be had here.
        duplicates: documents that are there more than once.
        bad: the first of the bad records.
        bad_seen: how many bad records were read.
        lengths: tokens of a document, ascending [N] int64.
        weights: how many documents of the whole input each of these lengths stands for [N] float64.
        seconds: about how long preparing takes on this machine; None without a tokenizer.
        store_bytes: about how large the store becomes; None without a tokenizer.
        held_bytes: of media that stand in records, equal ones once.
        faults, warnings, notes: sentences for people.
    """

    inputs: tuple[str, ...]
    exact: bool
    files: int
    bytes: int
    read_bytes: int
    sources: tuple[SourceFacts, ...]
    tokenizer: TokenizerFacts | None
    tokenizer_missing: bool
    duplicates: DuplicateFacts
    bad: tuple[BadFacts, ...]
    bad_seen: int
    lengths: NDArray[np.int64]
    weights: NDArray[np.float64]
    seconds: float | None
    store_bytes: int | None
    held_bytes: int
    faults: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds_media(self) -> bool:
        """Whether some documents hold images or audio."""
        return any(source.media for source in self.sources)
