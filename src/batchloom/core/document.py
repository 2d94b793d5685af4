"""Records between source and tokenization: columns of values, conversations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import Medium


class JsonObject(dict[str, Any]):
    """Object that a table holds as JSON, whose nulls Arrow did not add."""


MESSAGE_ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used and goes to the quarantine file.

    Attributes:
        record: 0-based index of the record in its part of the source.
        offset: byte offset of the record in the (decompressed) source.
        column: 1-based column of the fault, None for the full record.
        reason: the fault and its remedy, one sentence.
        snippet: first characters of the record, for recognition.
        line: 1-based line of the fault in the source, if the reader counts lines
            that are not records; else None.
    """

    record: int
    offset: int
    column: int | None
    reason: str
    snippet: str
    line: int | None = None


@dataclass(slots=True)
class Records:
    """Records of one source, in columns of equal length, in source order.

    Attributes:
        values: text (str) of each record, if the source is text or a text field was
            named; else the complete row (``dict[str, Any]``) with unchanged values.
        records: 0-based index of each record in its part of the source.
        offsets: byte offset of each record in the (decompressed) source; for a columnar source,
            of the row group or record batch that holds it.
        bad: records of the same range that cannot be used.
        records_read: number of records read in this range: good, bad and empty ones, and those left out.
        left_out: number of records that the source or a sample of the input leaves out, by reason.
        weights: weight of the loss of each text; empty if all are 1.
        untrained: indices of the texts of weight 0, which are not among the values.
        columns: values of a record to store beside its text, by record index. Bad and dropped records have some, too.
    """

    values: list[Any] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    records_read: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    untrained: list[int] = field(default_factory=list)
    columns: dict[int, dict[str, Any]] = field(default_factory=dict)

    def select(self, positions: Sequence[int]) -> None:
        """Keep only the records at these positions."""
        if len(positions) != len(self.values):
            self.values = [self.values[position] for position in positions]
            self.records = [self.records[position] for position in positions]
            self.offsets = [self.offsets[position] for position in positions]
            self.weights = [self.weights[position] for position in positions] if self.weights else []

    def convert(self, convert_value: Callable[[Any], Any], excerpt: Callable[[Any], str]) -> None:
        """Convert the values; an UnusableRecordError makes a bad record with an excerpt."""
        values = self.values
        records = self.records
        offsets = self.offsets
        self.values = []
        self.records = []
        self.offsets = []
        weights: list[float] = []
        for value, record, offset in zip(values, records, offsets, strict=True):
            try:
                converted_value = convert_value(value)
            except UnusableRecordError as error:
                self.bad.append(BadRecord(record, offset, None, error.reason, excerpt(value)))
                continue
            weight = 1.0
            if isinstance(converted_value, WeightedText):
                converted_value, weight = converted_value
                if not weight:
                    self.untrained.append(record)
                    continue
            weights.append(weight)
            self.values.append(converted_value)
            self.records.append(record)
            self.offsets.append(offset)
        self.weights = weights if any(weight != 1 for weight in weights) else []

    def add(self, record: int, offset: int, value: Any) -> None:
        """Add the value of a record, or its BadRecord; ``records_read`` stays unchanged."""
        if isinstance(value, BadRecord):
            self.bad.append(value)
            return
        self.values.append(value)
        self.records.append(record)
        self.offsets.append(offset)


class WeightedText(NamedTuple):
    """A text, and the weight of its loss."""

    text: str
    weight: float


class ContentRange(NamedTuple):
    """Characters of a message's content, and the weight of their loss."""

    start: int
    stop: int
    weight: float


class TurnWeight(NamedTuple):
    """Weighted loss of a message.

    Attributes:
        trained: whether the record marks the message as trained; None if ``train_on`` decides.
        weight: weight of the loss of the turn, if it is trained.
        ranges: weights of ranges of the content, relative to ``weight``. The content between them and the text of
            the turn before it are not trained; () if the complete turn has one weight.
        stop_weight: weight of its stop token; None for that of the turn.
    """

    trained: bool | None
    weight: float = 1.0
    ranges: tuple[ContentRange, ...] = ()
    stop_weight: float | None = None


TrainFlag = bool | TurnWeight | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation with all its turns, unchanged.

    Attributes:
        messages: turns as Hugging Face chat templates take them: dicts with ``role`` and
            ``content`` (a string or typed parts), and all other fields of the record
            (``tool_calls``, ``name``, ``reasoning_content``, ...).
        tools: tools for the template, None if the record has none.
        trained: for each message, whether the record itself marks it as trained (a ``train``
            flag, a ``weight``); None if it does not, and ``train_on`` decides. A ``TurnWeight`` if it also
            weights the loss.
        completion: index of the first message of the completion, for prompt-completion records;
            None for others. If it is the number of messages, the conversation is a prompt, and its text ends
            with the beginning of the answer.
        media: media of the typed content parts, in their order.
        template_args: variables of the chat template, which override those of the job; None without any.
        weight: weight of the loss of the record.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    trained: list[TrainFlag] = field(default_factory=list)
    completion: int | None = None
    media: list[Medium] = field(default_factory=list)
    template_args: dict[str, Any] | None = None
    weight: float = 1.0

    @property
    def is_prompt(self) -> bool:
        """True if the completion is still to be written."""
        return self.completion == len(self.messages)


@dataclass(frozen=True, slots=True)
class SegmentedText:
    """A text in segments that are tokenized separately, without a template.

    Attributes:
        texts: text of each segment; control tokens that it spells are control tokens.
        trained: whether each segment is trained; or the weight of its loss, 0 if it is not trained.
        weight: weight of the loss of the record.
    """

    texts: list[str]
    trained: list[bool] | list[float]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class InterleavedText:
    """A text with embedded media.

    Attributes:
        texts: texts before, between and after the media, one more than there are media; ``""`` if empty.
        media: media in their order.
        weight: weight of the loss of the record.
    """

    texts: list[str]
    media: list[Medium] = field(default_factory=list)
    weight: float = 1.0


SideT_co = TypeVar("SideT_co", bound=Conversation | str, covariant=True)


@dataclass(frozen=True, slots=True)
class PreferencePair(Generic[SideT_co]):
    """Two answers to one prompt, stored as two documents that share a pair id.

    Attributes:
        chosen: the preferred answer; a text if the record holds two texts and no prompt.
        rejected: the rejected answer, of the same type as ``chosen``.
    """

    chosen: SideT_co
    rejected: SideT_co


@dataclass(frozen=True, slots=True)
class LabelledConversation:
    """A conversation labelled good or bad (KTO's unpaired preference).

    Attributes:
        conversation: the conversation, with the start of the judged answer.
        label: True for good.
    """

    conversation: Conversation
    label: bool


@dataclass(frozen=True, slots=True)
class CarryingPrompt:
    """A prompt without its answer, and the columns that its document carries.

    Attributes:
        conversation: the prompt (:attr:`Conversation.is_prompt`).
        fields: JSON object of the messages (``prompt``) and the carried columns, in UTF-8.
    """

    conversation: Conversation
    fields: bytes
