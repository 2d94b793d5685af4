"""Facts that ``doctor`` reports."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from batchloom.analysis.doctor.sampling import DocumentPreview
from batchloom.analysis.inspection import Inspection
from batchloom.core.medium import MediumKind
from batchloom.core.settings import to_plain
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
    """

    seq_len: int
    packing: str
    fill: float
    bound: float
    sequences: int
    steps: int | None
    global_batch_size: int | None
    longer: int


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
    """

    path: str
    kind: str
    inspection: Inspection | None
    checked: bool
    faults: tuple[str, ...]
    preview: tuple[DocumentPreview, ...]


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
        bad: the first ten bad records.
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
