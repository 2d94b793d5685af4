"""Facts that ``doctor`` reports, and the counters they are made of."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.sampling import DocumentPreview
from batchloom.analysis.inspection import Inspection
from batchloom.core.addresses import is_url, redact_url
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import MediumKind
from batchloom.core.settings import to_plain
from batchloom.preparation.documents import PlacedMedium, RecordParser, iter_texts
from batchloom.preparation.units import PartCounts
from batchloom.sources.files import Source
from batchloom.store.format import SIDE_NAMES, get_facts_kind
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


class SideCount(NamedTuple):
    """Documents of one side, and their trained tokens."""

    documents: int
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """One source, or several that are read alike.

    Attributes:
        name: name of the source; of several, of the first.
        path: path or URL of that source.
        files: number of sources; estimated in a sample.
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
        sides: of an objective, by side (``chosen``, ``good`` ...) the number of documents and of their trained
            tokens; otherwise empty, as without a tokenizer.
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
    sides: dict[str, SideCount]
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
class PackingFacts:
    """Packing at one ``seq_len`` with the plan's packer.

    Attributes:
        seq_len: tokens of a sequence.
        packing: the packing strategy.
        fill: tokens / (sequences x seq_len), 0 to 1.
        bound: upper bound of ``fill`` over all packings of these documents, 0 to 1.
        sequences: sequences of an epoch.
        steps: steps of an epoch; None without a global batch size.
        global_batch_size: sequences of a step; None if it was not given.
        longer: documents longer than ``seq_len``, which a loader cuts, or drops (not counted here then).
        longer_tokens: their tokens.
        is_dropped: whether a loader drops them.
        keeping: (percent of the documents, ``seq_len`` into which they fit), ascending.
    """

    seq_len: int
    packing: str
    fill: float
    bound: float
    sequences: int
    steps: int | None
    global_batch_size: int | None
    longer: int
    longer_tokens: int
    is_dropped: bool
    keeping: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FeedEstimate:
    """Estimated resources of one way to feed a run, on a rank with the full batch.

    Attributes:
        way: ``prepare`` or ``stream``.
        start_seconds: seconds until the first batch; for ``prepare`` including the preparation, on one core.
        memory_bytes: memory of the loader, without the interpreter and its libraries.
        disk_bytes: bytes written to disk.
        lanes: lanes of a stream; None for a store.
        steps: steps of an epoch; None for a stream, whose number of steps must be given.
    """

    way: Literal["prepare", "stream"]
    start_seconds: float
    memory_bytes: int
    disk_bytes: int
    lanes: int | None
    steps: int | None


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    """A store, a Megatron prefix, or a flat file of ids.

    Attributes:
        path: path or URL, as it was given.
        kind: ``store``, ``prefix`` or ``ids``.
        inspection: result of :func:`batchloom.inspect`; None if it cannot be opened, and for a flat
            file, which does not record document boundaries.
        checked: whether every byte was verified (``full``).
        faults: errors found in it.
        preview: the first documents of a store; empty for a prefix, which does not name its tokenizer.
        import_options: options that a file of ids makes necessary.
    """

    path: str
    kind: str
    inspection: Inspection | None
    checked: bool
    faults: tuple[str, ...]
    preview: tuple[DocumentPreview, ...]
    import_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of :func:`doctor`. Counts are estimates if ``exact`` is False.

    Attributes:
        inputs: inputs as they were given, URLs without credentials.
        exact: whether everything was read; otherwise a sample.
        files, bytes: number of files and bytes of the complete input, without prepared inputs.
        read_bytes: number of those bytes that were read.
        sources: one entry per source; with more than 20, one per group that is read alike.
        prepared: stores and prefixes among the inputs.
        tokenizer: the tokenizer; None without one.
        documents: number of documents in all sources.
        tokens: number of their tokens; None without a tokenizer.
        trained_tokens: number of trained tokens; None without a tokenizer.
        duplicates: repeated documents; None if there is nothing to read.
        bad: ten bad records, of as many files as possible.
        bad_seen: number of bad records that were read.
        packing: how full sequences are; None without a tokenizer or documents, and for documents that no loader takes.
        seconds: estimated time of ``prepare`` on this machine; None without a tokenizer.
        store_bytes: estimated size of the store; None without a tokenizer.
        ways: resources of a run on prepared data and on streamed data; empty if the resulting documents
            are unknown.
        faults: errors in the input; empty if it is sound.
        warnings: warnings for the user.
        notes: omitted inputs, and how inputs were interpreted.
        commands: command lines that prepare the input, quoted for a shell; empty if something must be fixed first.
    """

    inputs: tuple[str, ...]
    exact: bool = True
    files: int = 0
    bytes: int = 0
    read_bytes: int = 0
    sources: tuple[SourceFacts, ...] = ()
    prepared: tuple[PreparedFacts, ...] = ()
    tokenizer: TokenizerFacts | None = None
    documents: int = 0
    tokens: int | None = None
    trained_tokens: int | None = None
    duplicates: DuplicateFacts | None = None
    bad: tuple[BadFacts, ...] = ()
    bad_seen: int = 0
    packing: PackingFacts | None = None
    seconds: float | None = None
    store_bytes: int | None = None
    ways: tuple[FeedEstimate, ...] = ()
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True if there are no faults."""
        return not self.faults

    def plain(self) -> dict[str, Any]:
        """Return all fields and ``sound`` as plain JSON values."""
        return {"sound": self.sound, **to_plain(self)}


def _zero_sides() -> NDArray[np.int64]:
    return np.zeros(len(SIDE_NAMES), np.int64)


@dataclass(slots=True)
class SourceGroup:
    """Counters of one source, or of several that are read alike.

    Lengths are counted exactly: documents of n bytes in total have at most sqrt(2 n) different
    lengths, so the counters stay small.
    """

    # None if the schema cannot be determined; then ``fault`` says why, and ``suggestion`` is the --map that would help.
    record_parser: RecordParser | None
    fault: str = ""
    suggestion: str | None = None
    sources: list[Source] = field(default_factory=list)
    # Whether each source is one record.
    has_file_documents: bool = True
    # Listed bytes the sources stand for, and how many of them were read.
    bytes: float = 0.0
    read_bytes: float = 0.0
    # Listed files that the sources stand for.
    files: float = 0.0
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
    truncated: int = 0
    characters: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    media: dict[MediumKind, MediaCount] = field(default_factory=dict)
    media_bytes: int = 0
    _media_digests: set[object] = field(default_factory=set)
    side_documents: NDArray[np.int64] = field(default_factory=_zero_sides)
    side_tokens: NDArray[np.int64] = field(default_factory=_zero_sides)

    def count_characters(self, record_kind: str, documents: Sequence[Any]) -> None:
        """Count the lengths of documents in characters."""
        if record_kind == "text":
            self.characters.update(map(len, documents))
        elif record_kind != "tokens":
            self.characters.update([sum(map(len, iter_texts(document))) for document in documents])

    def count_tokens(self, lengths: NDArray[np.uint32], sides: NDArray[np.uint8], flags: LossFlags) -> None:
        """Count lengths in tokens and trained tokens, in total and by side."""
        self.lengths.update(lengths.tolist())
        self.masked |= not flags.is_plain
        self.trained += flags.count_trained()
        if not flags.is_plain:
            self.side_documents += np.bincount(sides, minlength=len(SIDE_NAMES))
            self.side_tokens += np.bincount(np.repeat(sides, lengths)[flags.trained], minlength=len(SIDE_NAMES))

    def count_part(self, counts: PartCounts) -> None:
        """Add the counts of a part that was read."""
        self.records += counts.records
        self.documents += counts.documents
        self.tokens += counts.tokens
        self.empty += counts.empty
        self.bad += counts.bad
        self.truncated += counts.truncated
        self.dropped.update(counts.dropped)

    def count_media(self, documents: Sequence[Sequence[PlacedMedium]]) -> None:
        """Count the media of documents, and the bytes a store would hold of them."""
        for document_media in documents:
            tokens_by_kind: dict[MediumKind, list[int]] = {}
            for placed_medium in document_media:
                data = placed_medium.medium.data
                info = placed_medium.medium.info
                if info is None:
                    continue
                tokens_by_kind.setdefault(get_facts_kind(info.facts), []).append(placed_medium.tokens)
                # A store holds equal media once.
                if data is not None and info.digest not in self._media_digests:
                    self._media_digests.add(info.digest)
                    self.media_bytes += len(data)
            for kind, tokens in tokens_by_kind.items():
                media, count, total = self.media.get(kind, (0, 0, 0))
                self.media[kind] = MediaCount(media + len(tokens), count + 1, total + sum(tokens))

    @property
    def scale(self) -> float:
        """Factor from the counts of what was read to the complete input."""
        return self.bytes / self.read_bytes if self.read_bytes else 1.0

    def scale_count(self, count: int) -> int:
        return round(count * self.scale)

    def scale_records(self, count: int) -> int:
        """Estimate a number of records or documents: those of whole files by their number."""
        if self.has_file_documents and self.sources and self.records == len(self.sources):
            return round(count * self.files / len(self.sources))
        return self.scale_count(count)

    def estimate_store_bytes(self, token_bytes: int) -> float:
        """Estimate the bytes of its documents in a store."""
        mask = self.tokens / 8 if self.masked else 0
        media_table_bytes = sum(count.media for count in self.media.values()) * _TABLE_BYTES_PER_MEDIUM
        index_bytes = self.documents * _INDEX_BYTES_PER_DOCUMENT
        return self.scale * (self.tokens * token_bytes + mask + index_bytes + media_table_bytes + self.media_bytes)

    def make_facts(
        self, preview: tuple[DocumentPreview, ...], unused: tuple[str, ...], *, tokenized: bool
    ) -> SourceFacts:
        first = self.sources[0]
        record_parser = self.record_parser
        return SourceFacts(
            name=first.name,
            path=redact_url(first.file) if is_url(first.file) else first.file,
            files=round(self.files),
            format=first.kind,
            compression=first.compression,
            bytes=round(self.bytes),
            way=record_parser.record_kind if record_parser else "",
            detected=record_parser.detected if record_parser else "",
            mapping=dict(record_parser.columns) if record_parser else {},
            unused=unused,
            fault=self.fault,
            suggestion=self.suggestion,
            records=self.scale_records(self.records),
            documents=self.scale_records(self.documents),
            empty=self.scale_records(self.empty),
            bad=self.scale_records(self.bad),
            dropped={rule: self.scale_count(count) for rule, count in self.dropped.items()},
            total_tokens=self.scale_count(self.tokens) if tokenized else None,
            trained_tokens=self.scale_count(self.trained) if tokenized else None,
            characters=_compute_length_facts(self.characters),
            tokens=_compute_length_facts(self.lengths),
            media={kind: MediaCount(*map(self.scale_count, count)) for kind, count in self.media.items()},
            sides={
                name: SideCount(self.scale_count(documents), self.scale_count(tokens))
                for name, documents, tokens in zip(SIDE_NAMES, self.side_documents, self.side_tokens, strict=True)
                if name and documents
            },
            preview=preview,
        )


def _compute_length_facts(counts: Counter[int]) -> LengthFacts | None:
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
