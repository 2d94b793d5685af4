"""What has come in so far: progress as plain events, and the budget of bad records."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, final

from batchloom.core.errors import TooManyBadRecordsError
from batchloom.core.wording import format_count
from batchloom.preparation.settings import count_allowed_bad
from batchloom.preparation.units import ReasonCounts, count_reason, describe_bad_records

Phase = Literal["sample", "tokenize", "read", "write", "look", "convert", "upload"]

# A job stops early only when even so many times the expected records could not save it.
_DENSITY_ERROR = 4


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the user: what is left out by default, what was found done."""

    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is.

    Attributes:
        phase: ``sample`` (learning a tokenizer), ``tokenize`` (reading the input), ``read``
            (looking at ids that are there already) or ``write``; of a conversion ``look`` (the types
            of its columns) and ``convert``; of a store that lies elsewhere ``upload``.
        bytes_done: of the phase's bytes: listed input, or tokens while reading and writing them,
            files of the store while they are sent.
        bytes_total: the phase's bytes.
        bytes_found: how many of ``bytes_done`` an earlier run had done.
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
    """The listener of a job that nobody listens to: notes go to the log ``batchloom``."""
    if isinstance(event, Note):
        _LOG.warning(event.text)


@final
class JobCounters:
    """Counts of a running job; tells the listener, and stops the job that is beyond saving.

    Attributes:
        records: records read, of any fate.
        documents: documents that came of them.
        tokens: tokens of those.
        quarantined: bad records.
        first: what is said of the first bad record seen.
    """

    def __init__(
        self,
        listener: Listener,
        max_bad: int | str,
        bytes_total: int,
        phase: Phase = "tokenize",
    ) -> None:
        self._listener, self._max_bad, self._bytes_total = listener, max_bad, bytes_total
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
        """Count input that was read: bytes as listed, and its records."""
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
        """Take back what was counted of work that was lost and is done again."""
        for count, reason in reasons.values():
            count_reason(self._reasons, reason, -count)
        self._bytes_done -= size
        self.records -= records
        self.documents -= documents
        self.tokens -= tokens
        self.quarantined -= bad

    def count_documents(self, documents: int, tokens: int) -> None:
        """Count documents that were tokenized, and tell the listener."""
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
        """Count bad records.

        Args:
            first: what is wrong with the first of them.
            count: their number.
            reasons: their numbers by kind of reason.

        Raises:
            TooManyBadRecordsError: there are more than the whole job can possibly allow.
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

    def check_bad_records(self) -> None:
        """The judgement over all records.

        Raises:
            TooManyBadRecordsError: more of them are bad than ``max_bad`` allows.
        """
        if self.quarantined > count_allowed_bad(self._max_bad, self.records):
            raise self._make_too_many_error(f"{self.quarantined:,} of {self.records:,} records are bad")

    def _make_too_many_error(self, fact: str) -> TooManyBadRecordsError:
        first = f" The first: {self.first}." if self.first else ""
        advice = describe_bad_records(self.quarantined, self.records, self._reasons, self.first)
        return TooManyBadRecordsError(
            f"{fact}, more than --max-bad {self._max_bad} allows.{first} {advice[0].upper()}{advice[1:]}."
        )
