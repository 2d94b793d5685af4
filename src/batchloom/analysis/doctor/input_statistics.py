"""Counters of an examination, per source or per group of sources read alike."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.findings import LengthFacts, SourceFacts
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
