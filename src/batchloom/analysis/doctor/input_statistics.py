"""Counting what an examination reads: by source, or by group of sources that are read alike."""

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

# Bytes of a document in a store beside its tokens: .idx, .docs and lengths.u32.
_INDEX_BYTES_PER_DOCUMENT = 20 + 36 + 4
# Of a medium: its row and its place.
_TABLE_BYTES_PER_MEDIUM = 96 + 32


@dataclass(slots=True)
class SourceGroup:
    """What was read of one source, or of several that are read alike.

    Lengths are counted one by one: of documents of n bytes together there are at most sqrt(2 n)
    different ones, so this stays small.

    Attributes:
        reading: how they are read; None where that cannot be told.
        sources: those that were looked at.
        fault: why they cannot be read, else empty.
        suggestion: the ``--map`` that would make it work.
        bytes: listed bytes they stand for.
        read: how many of those were read.
        seconds: the time that took, and what was done with them.
    """

    reading: RecordParser | None
    sources: list[Source] = field(default_factory=list)
    fault: str = ""
    suggestion: str | None = None
    bytes: float = 0.0
    read: float = 0.0
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
    held: int = 0
    _counted: set[str] = field(default_factory=set)

    def count_media(self, documents: Sequence[Sequence[PlacedMedium]]) -> None:
        """Count the media of documents, and the bytes that a store would hold of them."""
        for some in documents:
            kinds: Counter[MediumKind] = Counter()
            tokens: Counter[MediumKind] = Counter()
            for one in some:
                if one.medium.seen is not None:
                    kind = get_facts_kind(one.medium.seen.facts)
                    kinds[kind] += 1
                    tokens[kind] += one.tokens
            for kind, count in kinds.items():
                had = self.media.get(kind, MediaCount(0, 0, 0))
                more = count, 1, tokens[kind]
                self.media[kind] = MediaCount(*map(sum, zip(had, more, strict=True)))
            for one in some:
                data, seen = one.medium.data, one.medium.seen
                # A store holds equal ones once.
                if data is not None and seen is not None and seen.digest.hex() not in self._counted:
                    self._counted.add(seen.digest.hex())
                    self.held += len(data)

    @property
    def scale(self) -> float:
        """What a count of what was read is to be multiplied by."""
        return self.bytes / self.read if self.read else 1.0

    def whole(self, count: int) -> int:
        """A count of what was read as one of all."""
        return round(count * self.scale)

    def store_bytes(self, token_bytes: int) -> float:
        """About how many bytes of a store its documents take."""
        mask = self.tokens / 8 if self.masked else 0
        named = sum(count.media for count in self.media.values()) * _TABLE_BYTES_PER_MEDIUM
        return self.scale * (
            self.tokens * token_bytes
            + mask
            + self.documents * _INDEX_BYTES_PER_DOCUMENT
            + named
            + self.held
        )

    def facts(
        self, preview: tuple[DocumentPreview, ...], unused: tuple[str, ...], *, tokenized: bool
    ) -> SourceFacts:
        """The same for people."""
        first, reading = self.sources[0], self.reading
        return SourceFacts(
            name=first.name,
            path=redact_url(first.file) if is_url(first.file) else first.file,
            files=len(self.sources),
            format=first.kind,
            compression=first.compression,
            bytes=round(self.bytes),
            way=reading.way if reading else "",
            detected=reading.detected if reading else "",
            mapping=dict(reading.columns) if reading else {},
            unused=unused,
            fault=self.fault,
            suggestion=self.suggestion,
            records=self.whole(self.records),
            documents=self.whole(self.documents),
            empty=self.whole(self.empty),
            bad=self.whole(self.bad),
            dropped={rule: self.whole(count) for rule, count in self.dropped.items()},
            total_tokens=self.whole(self.tokens) if tokenized else None,
            trained_tokens=self.whole(self.trained) if tokenized else None,
            characters=compute_length_facts(self.characters),
            tokens=compute_length_facts(self.lengths),
            media={kind: MediaCount(*map(self.whole, count)) for kind, count in self.media.items()},
            preview=preview,
        )


def compute_length_facts(counts: Counter[int]) -> LengthFacts | None:
    """Mean, median, 95th percentile and maximum of counted lengths; None where there are none."""
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
    """All lengths in tokens, ascending, and how many documents of the input each stands for."""
    weights: Counter[int] = Counter()
    for group in groups:
        for length, count in group.lengths.items():
            weights[length] += count * group.scale  # type: ignore[assignment]  # a share of documents
    lengths = sorted(weights)
    return np.array(lengths, np.int64), np.array([weights[one] for one in lengths], np.float64)


def distribute_unread_bytes(
    groups: Sequence[SourceGroup], sources: Sequence[Source], looks: InputSample
) -> None:
    """Give each group the bytes it stands for: its own, and a share of those nobody looked at."""

    def form(source: Source) -> tuple[str, str | None, bool]:
        return source.kind, source.compression, looks.is_small(source)

    total: Counter[object] = Counter()
    looked: Counter[object] = Counter()
    for source in sources:
        total[form(source)] += source.size
    for group in groups:
        for source in group.sources:
            looked[form(source)] += source.size
    for group in groups:
        group.bytes = sum(
            source.size * total[form(source)] / looked[form(source)] for source in group.sources
        )
        if looks.whole:
            group.read = group.bytes
