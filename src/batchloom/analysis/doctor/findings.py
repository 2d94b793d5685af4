"""Findings of an examination: counters per group of sources, and exported facts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.preview import DocumentPreview
from batchloom.analysis.doctor.sampling import InputSample
from batchloom.core.addresses import is_url, redact_url
from batchloom.core.medium import MediumKind
from batchloom.preparation.documents import PlacedMedium, RecordParser
from batchloom.sources.files import Source
from batchloom.store.format import get_facts_kind
from batchloom.store.read import MediaCount

# Bytes of a document in a store besides its tokens: .idx, .docs and lengths.u32.
_INDEX_BYTES_PER_DOCUMENT = 20 + 36 + 4
# Bytes of a media item in a store: its table row and its path.
_TABLE_BYTES_PER_MEDIUM = 96 + 32


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
    """Result of an examination; ``Diagnosis`` describes the other fields.

    Attributes:
        tokenizer_missing: whether the tokenizer is not available here.
        lengths: tokens of a document, ascending [N] int64.
        weights: estimated number of documents with each length in the complete input [N] float64.
        held_bytes: bytes of media embedded in records, equal ones counted once.
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


@dataclass(slots=True)
class SourceGroup:
    """Counters of one source, or of several that are read alike.

    Lengths are counted exactly: documents of n bytes in total have at most sqrt(2 n) different
    lengths, so the counters stay small.

    Attributes:
        record_parser: parser of the group; None if its schema cannot be determined.
        sources: sources that were sampled.
        fault: why they cannot be read; otherwise empty.
        suggestion: the ``--map`` that would make them readable.
        bytes: listed bytes they stand for.
        read_bytes: number of those bytes that were read.
        seconds: time spent on reading and encoding.
    """

    record_parser: RecordParser | None
    sources: list[Source] = field(default_factory=list)
    fault: str = ""
    suggestion: str | None = None
    bytes: float = 0.0
    read_bytes: float = 0.0
    seconds: float = 0.0
    records: int = 0
    documents: int = 0
    empty: int = 0
    bad: int = 0
    tokens: int = 0
    trained: int = 0
    masked: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    altered: Counter[str] = field(default_factory=Counter)
    characters: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    media: dict[MediumKind, MediaCount] = field(default_factory=dict)
    media_bytes: int = 0
    _media_digests: set[str] = field(default_factory=set)

    def count_media(self, documents: Sequence[Sequence[PlacedMedium]]) -> None:
        """Count the media of documents, and the bytes a store would hold of them."""
        for document_media in documents:
            kinds: Counter[MediumKind] = Counter()
            tokens: Counter[MediumKind] = Counter()
            for placed_medium in document_media:
                if placed_medium.medium.info is not None:
                    kind = get_facts_kind(placed_medium.medium.info.facts)
                    kinds[kind] += 1
                    tokens[kind] += placed_medium.tokens
            for kind, count in kinds.items():
                previous_count = self.media.get(kind, MediaCount(0, 0, 0))
                more = count, 1, tokens[kind]
                self.media[kind] = MediaCount(*map(sum, zip(previous_count, more, strict=True)))
            for placed_medium in document_media:
                data, info = placed_medium.medium.data, placed_medium.medium.info
                # A store holds equal media once.
                if data is not None and info is not None and info.digest.hex() not in self._media_digests:
                    self._media_digests.add(info.digest.hex())
                    self.media_bytes += len(data)

    @property
    def scale(self) -> float:
        """Factor from the counts of what was read to the complete input."""
        return self.bytes / self.read_bytes if self.read_bytes else 1.0

    def scale_count(self, count: int) -> int:
        """Scale a count to the complete input."""
        return round(count * self.scale)

    def estimate_store_bytes(self, token_bytes: int) -> float:
        """Estimate the bytes of its documents in a store."""
        mask = self.tokens / 8 if self.masked else 0
        media_table_bytes = sum(count.media for count in self.media.values()) * _TABLE_BYTES_PER_MEDIUM
        return self.scale * (
            self.tokens * token_bytes
            + mask
            + self.documents * _INDEX_BYTES_PER_DOCUMENT
            + media_table_bytes
            + self.media_bytes
        )

    def make_facts(
        self, preview: tuple[DocumentPreview, ...], unused: tuple[str, ...], *, tokenized: bool
    ) -> SourceFacts:
        """Convert the counters to exported facts."""
        first, record_parser = self.sources[0], self.record_parser
        return SourceFacts(
            name=first.name,
            path=redact_url(first.file) if is_url(first.file) else first.file,
            files=len(self.sources),
            format=first.kind,
            compression=first.compression,
            bytes=round(self.bytes),
            way=record_parser.record_kind if record_parser else "",
            detected=record_parser.detected if record_parser else "",
            mapping=dict(record_parser.columns) if record_parser else {},
            unused=unused,
            fault=self.fault,
            suggestion=self.suggestion,
            records=self.scale_count(self.records),
            documents=self.scale_count(self.documents),
            empty=self.scale_count(self.empty),
            bad=self.scale_count(self.bad),
            dropped={rule: self.scale_count(count) for rule, count in self.dropped.items()},
            total_tokens=self.scale_count(self.tokens) if tokenized else None,
            trained_tokens=self.scale_count(self.trained) if tokenized else None,
            characters=compute_length_facts(self.characters),
            tokens=compute_length_facts(self.lengths),
            media={kind: MediaCount(*map(self.scale_count, count)) for kind, count in self.media.items()},
            preview=preview,
        )


def compute_length_facts(counts: Counter[int]) -> LengthFacts | None:
    """Compute mean, median, 95th percentile and maximum of lengths; None if empty."""
    if not counts:
        return None
    lengths = np.array(sorted(counts), np.int64)
    numbers = np.array([counts[length] for length in lengths.tolist()], np.int64)
    ends = np.cumsum(numbers)
    total = int(ends[-1])
    median, p95 = lengths[np.searchsorted(ends, [-(-total // 2), -(-95 * total // 100)])].tolist()
    mean = float((lengths * numbers).sum() / total)
    return LengthFacts(total, mean, median, p95, int(lengths[-1]))


def weight_lengths(groups: Sequence[SourceGroup]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return all token lengths, ascending int64 [N], and their weights, float64 [N].

    A weight is the estimated number of documents with this length in the complete input.
    """
    weights: Counter[int] = Counter()
    for group in groups:
        for length, count in group.lengths.items():
            weights[length] += count * group.scale  # type: ignore[assignment]  # a share of documents
    lengths = sorted(weights)
    return np.array(lengths, np.int64), np.array([weights[document_length] for document_length in lengths], np.float64)


def distribute_unread_bytes(groups: Sequence[SourceGroup], sources: Sequence[Source], sample: InputSample) -> None:
    """Assign each group the bytes it represents, including unsampled sources."""

    def form(source: Source) -> tuple[str, str | None, bool]:
        return source.kind, source.compression, sample.is_small(source)

    total: Counter[object] = Counter()
    sampled_bytes: Counter[object] = Counter()
    for source in sources:
        total[form(source)] += source.size
    for group in groups:
        for source in group.sources:
            sampled_bytes[form(source)] += source.size
    for group in groups:
        group.bytes = sum(source.size * total[form(source)] / sampled_bytes[form(source)] for source in group.sources)
        if sample.complete:
            group.read_bytes = group.bytes
