"""Results of an examination of inputs, convertible to plain JSON."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.preview import DocumentPreview
from batchloom.core.medium import MediumKind
from batchloom.store.read import MediaCount


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Lengths of the documents that were read.

    Attributes:
        documents: number of documents measured.
        mean, median, p95, longest: statistics of their lengths; ``p95`` is the 95th percentile.
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
        file: name of the source.
        line: 1-based line; None if lines have no meaning or were not counted.
        row: 1-based row; None likewise.
        column: 1-based column of the fault; None if the record as such is at fault.
        offset: byte offset of the record in the (decompressed) source.
        reason: description of the fault and its remedy.
        snippet: beginning of the record.
        sentence: the complete message.
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
        name: name of the source; of several, of the first.
        path: path or URL of that source.
        files: number of sources that were sampled.
        format: ``jsonl``, ``json``, ``csv``, ``tsv``, ``parquet``, ``arrow``, ``text`` or ``code``.
        compression: compression format; None if uncompressed.
        bytes: listed bytes they stand for.
        way: record kind: ``text``, ``conversation``, ``tokens`` ...
        detected: the schema in one line; empty for text files.
        mapping: columns of each role.
        unused: columns that are not read, and message keys as ``messages[].key``.
        fault: why it cannot be read, or not to its end; otherwise empty.
        suggestion: the ``--map`` that would make it readable; None without a guess.
        records: number of records; an estimate, like the next four, if not everything was read.
        documents: number of documents made from them.
        empty: number of records without content.
        bad: number of records that cannot be used.
        dropped: number of documents left out, by reason.
        total_tokens: tokens of the documents; None without a tokenizer.
        trained_tokens: number of trained tokens; None without a tokenizer.
        characters: document lengths in characters; None without documents.
        tokens: document lengths in tokens; None without a tokenizer.
        media: by kind (image, audio, video) the number of items, of documents with some and of placeholder tokens;
            empty if none are read.
        preview: the first documents as the model receives them.
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
    """The tokenizer of an examination.

    Attributes:
        name: name as given to ``--tokenizer``.
        vocab_size: largest id plus one.
        engine: name and version of the encoding library.
        template: chat template in use; None without conversations.
        lossy: whether unknown characters are dropped.
        dtype: dtype of a token on disk.
    """

    name: str
    vocab_size: int
    engine: str
    template: str | None
    lossy: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class DuplicateFacts:
    """Repeated documents, found by a 128-bit hash of their content.

    Attributes:
        documents: number of documents compared.
        repeated: number of them that equal an earlier one.
        share: repeated / documents, 0 to 1.
        exact: whether every document was compared; a sample contains only few of the duplicates.
        left_out: whether ``prepare`` leaves them out by default.
    """

    documents: int
    repeated: int
    share: float
    exact: bool
    left_out: bool


@dataclass(frozen=True, slots=True)
class ExaminationResult:
    """Result of an examination of inputs.

    Attributes:
        inputs: inputs as they were given, URLs without credentials.
        exact: whether everything was read; otherwise counts are estimates from a sample.
        files, bytes: number of files and bytes of the complete input, as listed.
        read_bytes: number of those bytes that were read.
        sources: one entry per source, or per group of sources that are read alike.
        tokenizer: the tokenizer; None without one.
        tokenizer_missing: whether the tokenizer is not available here.
        duplicates: repeated documents.
        bad: the first bad records.
        bad_seen: number of bad records that were read.
        lengths: tokens of a document, ascending [N] int64.
        weights: estimated number of documents with each length in the complete input [N] float64.
        seconds: estimated preparation time on this machine; None without a tokenizer.
        store_bytes: estimated size of the store; None without a tokenizer.
        held_bytes: bytes of media embedded in records, equal ones counted once.
        faults, warnings, notes: messages for the user.
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
        """True if some documents hold images or audio."""
        return any(source.media for source in self.sources)
