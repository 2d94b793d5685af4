"""Encoded batches of documents, and the records that give none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.media_tokens import PlacedMedium
from batchloom.preparation.settings.recipe import ChatRecipe


class OverlongError(InputError):
    """A conversation has more tokens than allowed, and the policy is ``error``.

    Attributes:
        number: index of the conversation in its batch.
        reason: its length, and the remedy.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"conversation {number} {reason}")
        self.number = number
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[int, str]]:
        return type(self), (self.number, self.reason)


# Drop reason of a document without a trained token.
UNTRAINED_RULE = "nothing to train"
# Note of a job with rounded loss weights.
ROUNDED_WEIGHTS = "Loss weights are rounded to the nearest of 256 values"


class EncodeFault(NamedTuple):
    """Conversation, or a part of one, that gives no document."""

    number: int  # Index of the conversation in the batch
    reason: str
    snippet: str = ""  # Beginning of the content, to help a person find it

    @property
    def rule(self) -> str:
        """The rule that dropped a document: the reason without the numbers."""
        return self.reason.partition(":")[0]


# Tokens of all documents, concatenated, and the length of each.
PlainTokens = tuple[NDArray[np.generic], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Encoded batch of documents.

    Attributes:
        ids: token ids of all documents, concatenated [tokens].
        lengths: tokens of each document [documents].
        flags: loss flags of the tokens.
        numbers: index of each document in the input [documents], repeated if one was split; None if all are
            included.
        faults: documents that cannot be used.
        dropped: documents dropped by rule: nothing to train, or overlong.
        sides: side of each document, as in ``.pairs``; empty without an objective.
        altered: index of each conversation that the template changed, by kind of change.
        added: number of control tokens added before and after the text of each document.
        moved: number of texts changed by fill-in-the-middle.
        plain: tokens and lengths of the texts before fill-in-the-middle, if documents are compared.
        media: media of each document; empty if none has any.
        fields: JSON of the columns that each document carries; empty if none carries any.
        truncated: index of each input whose documents were cut by ``truncate`` or ``truncate-left``.
    """

    ids: NDArray[np.generic]
    lengths: NDArray[np.uint32]
    flags: LossFlags
    numbers: NDArray[np.int64] | None = None
    faults: list[EncodeFault] = field(default_factory=list)
    dropped: list[EncodeFault] = field(default_factory=list)
    sides: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    altered: dict[str, list[int]] = field(default_factory=dict)
    added: tuple[int, int] = (0, 0)
    moved: int = 0
    plain: PlainTokens | None = None
    media: Sequence[Sequence[PlacedMedium]] = ()
    fields: Sequence[bytes] = ()
    truncated: Sequence[int] = ()


@dataclass(slots=True)
class EncodedBatchBuilder:
    """Collector of the documents, faults and drops of a batch."""

    ids: list[NDArray[np.generic]] = field(default_factory=list)
    flags: list[LossFlags] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    faults: list[EncodeFault] = field(default_factory=list)
    dropped: list[EncodeFault] = field(default_factory=list)
    altered: dict[str, list[int]] = field(default_factory=dict)
    media: list[list[PlacedMedium]] = field(default_factory=list)
    fields: list[bytes] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)

    def add(
        self,
        number: int,
        ids: NDArray[np.generic],
        flags: LossFlags,
        media: Sequence[PlacedMedium] = (),
        side: int | None = None,
        fields: bytes | None = None,
    ) -> None:
        """Add a document of input ``number``."""
        self.ids.append(ids)
        self.flags.append(flags)
        self.numbers.append(number)
        self.media.append(list(media))
        if side is not None:
            self.sides.append(side)
        if fields is not None:
            self.fields.append(fields)

    def drop(self, number: int, reason: str) -> None:
        """Note that a rule drops a document of input ``number``."""
        self.dropped.append(EncodeFault(number, reason))

    def refuse(self, number: int, reason: str) -> None:
        """Note that input ``number`` cannot be used."""
        self.faults.append(EncodeFault(number, reason))

    def note_altered(self, number: int, changes: Iterable[str]) -> None:
        """Note the changes that the template made to input ``number``."""
        for change in dict.fromkeys(changes):
            self.altered.setdefault(change, []).append(number)

    def build(self, dtype: np.dtype[np.generic]) -> EncodedBatch:
        return EncodedBatch(
            ids=np.concatenate([np.zeros(0, np.uint32), *self.ids]).astype(dtype),
            lengths=np.array([ids.size for ids in self.ids], np.uint32),
            flags=LossFlags.join(self.flags),
            numbers=np.array(self.numbers, np.int64),
            faults=sorted(self.faults),
            dropped=sorted(self.dropped),
            sides=np.array(self.sides, np.uint8),
            altered=self.altered,
            media=self.media if any(self.media) else [],
            fields=self.fields,
            truncated=self.truncated,
        )


def describe_excess(tokens: int, number: int, chat: ChatRecipe) -> str:
    """Describe by how much a document is too long, else ""; raise if that is an error."""
    if chat.max_tokens is None or tokens <= chat.max_tokens:
        return ""
    excess = f"{tokens:,} tokens where {chat.max_tokens:,} are allowed"
    if chat.overlong == "error":
        raise OverlongError(number, f"has {excess}: allow more, or drop it (--overlong drop)")
    return excess
