"""Progress events, counters and the result of a run, for its caller."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, final

from batchloom.core.errors import TooManyBadRecordsError
from batchloom.core.wording import format_count
from batchloom.preparation.settings.recipe import count_allowed_bad
from batchloom.preparation.units.unit_report import ReasonCounts, count_reason, describe_bad_records
from batchloom.sources import LeftOutFile
from batchloom.store import Manifest
from batchloom.store.format import StoreCounts, SubsetEntry

Phase = Literal["sample", "tokenize", "read", "write", "look", "convert", "upload"]

# A job stops early only if even this many times the expected records would not bring it below the limit.
_DENSITY_ERROR = 4


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user: a default exclusion, or work that was already done.

    Attributes:
        text: one or more sentences.
        is_warning: whether the data or the store differ from what was asked for; a quiet command prints warnings.
    """

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the job.

    Attributes:
        phase: ``sample`` (learning a tokenizer), ``tokenize`` (reading the input), ``read``
            (reading existing ids) or ``write``; of a conversion ``look`` (inferring column types)
            and ``convert``; of a remote store ``upload``.
        bytes_done: processed bytes of the phase: listed input, token bytes while ids are read and
            written, or store files during an upload.
        bytes_total: total bytes of the phase.
        bytes_found: part of ``bytes_done`` that an earlier run had done.
        documents: documents so far.
        tokens: tokens so far.
        quarantined: bad records so far.
    """

    phase: Phase
    bytes_done: int
    bytes_total: int
    bytes_found: int
    documents: int
    tokens: int
    quarantined: int


Listener = Callable[[Note | Progress], None]

_LOG = logging.getLogger("batchloom")


def log_note(event: Note | Progress) -> None:
    """Log notes to the logger ``batchloom``; the default listener."""
    if isinstance(event, Note):
        _LOG.warning(event.text)


@final
class PrepareLog:
    """Notes and durations of a run.

    Attributes:
        started: time of the start, in UTC.
        began: the same, as ``time.perf_counter`` returns it.
        listener: receives notes and progress.
        notes: all notes so far.
        left_out: the files with data that are not read.
        seconds: duration of each phase.
    """

    def __init__(self, listener: Listener) -> None:
        self.started = datetime.now(UTC)
        self.began = time.perf_counter()
        self.listener = listener
        self.notes: list[str] = []
        self.left_out = tuple[LeftOutFile, ...]()
        self.seconds: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def note(self, text: str) -> None:
        """Report a note."""
        self.report([Note(text)])

    def add_warning(self, text: str) -> None:
        """Report a difference from what was asked for."""
        self.report([Note(text, is_warning=True)])

    def report(self, notes: Iterable[Note]) -> None:
        """Report several notes."""
        for note in notes:
            self.notes.append(note.text)
            self.listener(note)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the duration of the body of a ``with`` statement, also if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


@final
class JobCounters:
    """Counters of a running job, which report progress and limit bad records.

    Attributes:
        records: number of records read, including dropped and bad ones.
        documents: number of documents from these records.
        tokens: number of tokens of these documents.
        quarantined: number of bad records.
        first: description of the first bad record.
    """

    def __init__(self, listener: Listener, max_bad: int | str, bytes_total: int, phase: Phase = "tokenize") -> None:
        self._listener = listener
        self._max_bad = max_bad
        self._bytes_total = bytes_total
        self._phase = phase
        self._bytes_done = self._resumed_bytes = 0
        self.records = self.documents = self.tokens = self.quarantined = 0
        self.first = ""
        self._reasons = ReasonCounts()

    def count_resumed(self, size: int, records: int, documents: int, tokens: int, bad: int) -> None:
        """Count a unit that an earlier run finished."""
        self._resumed_bytes += size
        self._bytes_done += size
        self.records += records
        self.documents += documents
        self.tokens += tokens
        self.quarantined += bad

    def count_read(self, size: int, records: int) -> None:
        """Count input that was read: bytes as listed, and records."""
        self._bytes_done += size
        self.records += records

    def forget(
        self,
        size: int,
        records: int,
        documents: int,
        tokens: int,
        bad: int,
        reasons: Mapping[str, tuple[int, str]] = MappingProxyType({}),
    ) -> None:
        """Subtract the counts of lost work that will be repeated."""
        for count, reason in reasons.values():
            count_reason(self._reasons, reason, -count)
        self._bytes_done -= size
        self.records -= records
        self.documents -= documents
        self.tokens -= tokens
        self.quarantined -= bad

    def count_documents(self, documents: int, tokens: int) -> None:
        """Count tokenized documents and notify the listener."""
        self.documents += documents
        self.tokens += tokens
        self._listener(
            Progress(
                self._phase,
                min(self._bytes_done, self._bytes_total),
                self._bytes_total,
                self._resumed_bytes,
                self.documents,
                self.tokens,
                self.quarantined,
            )
        )

    def count_bad(self, first: str, count: int, reasons: Mapping[str, tuple[int, str]] = MappingProxyType({})) -> None:
        """Count bad records; raise if there are more than the complete job can allow.

        ``first`` describes the first of them; ``reasons`` is (number, reason) by kind of reason.
        """
        self.first = self.first or first
        self.quarantined += count
        for added, reason in reasons.values():
            count_reason(self._reasons, reason, added)
        expected = self.records * self._bytes_total / max(self._bytes_done, 1)
        if self.quarantined > count_allowed_bad(self._max_bad, int(_DENSITY_ERROR * expected)):
            raise self._make_too_many_error(
                f"{format_count(self.quarantined, 'bad record')} in the first {self.records:,}"
            )

    def count_allowed(self) -> int:
        """Count the records that may be bad besides those that are."""
        return count_allowed_bad(self._max_bad, self.records) - self.quarantined

    def check_bad_records(self) -> None:
        """Raise if more of all records are bad than ``max_bad`` allows."""
        if self.quarantined > count_allowed_bad(self._max_bad, self.records):
            raise self._make_too_many_error(f"{self.quarantined:,} of {self.records:,} records are bad")

    def _make_too_many_error(self, fact: str) -> TooManyBadRecordsError:
        first = f" The first: {self.first}." if self.first else ""
        advice = describe_bad_records(self.quarantined, self.records, self._reasons, self.first)
        return TooManyBadRecordsError(
            f"{fact}, more than --max-bad {self._max_bad} allows.{first} {advice[0].upper()}{advice[1:]}."
        )


@dataclass(frozen=True, slots=True)
class SubsetResult:
    """Documents, tokens and shards of one subset."""

    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """A finished store and the counts of its input.

    After an append, ``counts``, ``subsets`` and ``input_*`` cover only the added data.

    Attributes:
        path: folder of the store, or the URL of a remote store.
        counts: records read, documents and tokens in the store, records quarantined, documents
            dropped by reason.
        subsets: result of each subset, by name.
        input_files: number of input files.
        input_bytes: size of the input files on disk, in bytes.
        dtype: dtype of a token on disk.
        tokenizer: name of the tokenizer.
        engine: tokenizer engine, its version, and the reason if it is not the fast one.
        seconds: duration of this call in seconds.
        already_done: whether the same recipe over the same inputs had finished the store before.
        resumed_units: number of units that an earlier, unfinished run had done.
        notes: notes that were reported during the run.
        generation: newest generation of the store; 1 for a store that never changed.
        in_all: documents and tokens of all generations of the store, without removed documents.
    """

    path: Path | str
    counts: StoreCounts
    subsets: dict[str, SubsetResult]
    input_files: int
    input_bytes: int
    dtype: str
    tokenizer: str
    engine: str
    seconds: float
    already_done: bool
    resumed_units: int
    notes: tuple[str, ...]
    generation: int = 1
    in_all: tuple[int, int] = (0, 0)


def make_result(
    out: Path | str,
    manifest: Manifest,
    *,
    engine_note: str = "",
    seconds: float,
    already_done: bool = False,
    resumed_units: int = 0,
    notes: tuple[str, ...] = (),
) -> PrepareResult:
    """Return the result of a finished store from its manifest."""
    engine = f"{manifest.tokenizer.engine} {manifest.tokenizer.engine_version}".strip()
    subsets = manifest.subsets
    return PrepareResult(
        path=out,
        counts=manifest.counts,
        subsets={
            name: SubsetResult(entry.documents, entry.tokens, len(entry.shards)) for name, entry in subsets.items()
        },
        input_files=len(manifest.sources),
        input_bytes=sum(source.bytes for source in manifest.sources),
        dtype=manifest.dtype,
        tokenizer=manifest.tokenizer.name,
        engine=f"{engine} ({engine_note})" if engine_note else engine,
        seconds=seconds,
        already_done=already_done,
        resumed_units=resumed_units,
        notes=notes,
        generation=manifest.generation,
        in_all=(
            sum(entry.remaining_counts[0] for entry in subsets.values()),
            sum(entry.remaining_counts[1] for entry in subsets.values()),
        ),
    )


def subtract_base(result: PrepareResult, base: Manifest) -> PrepareResult:
    """Return the result of an append, without the counts of the previous generation."""
    counts = result.counts
    base_counts = base.counts
    subsets = {name: _subtract_subset(subset, base.subsets.get(name)) for name, subset in result.subsets.items()}
    return replace(
        result,
        counts=StoreCounts(
            records=counts.records - base_counts.records,
            documents=counts.documents - base_counts.documents,
            tokens=counts.tokens - base_counts.tokens,
            quarantined=counts.quarantined - base_counts.quarantined,
            dropped=dict(Counter(counts.dropped) - Counter(base_counts.dropped)),
            further=counts.further - base_counts.further,
            truncated=counts.truncated - base_counts.truncated,
        ),
        subsets={name: subset for name, subset in subsets.items() if subset.documents},
        input_files=result.input_files - len(base.sources),
        input_bytes=result.input_bytes - sum(source.bytes for source in base.sources),
    )


def _subtract_subset(subset: SubsetResult, base_subset: SubsetEntry | None) -> SubsetResult:
    if base_subset is None:
        return subset
    return SubsetResult(
        subset.documents - base_subset.documents,
        subset.tokens - base_subset.tokens,
        subset.shards - len(base_subset.shards),
    )
