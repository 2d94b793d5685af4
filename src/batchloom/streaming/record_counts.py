"""Record statistics of a lane, to explain why it has no document."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.wording import format_count
from batchloom.preparation.units import UnitFacts
from batchloom.store.format import SUBSETS

_BAD_PREFIX, _EMPTY_REASON, _SHARE_PREFIX = "bad", "empty", "for "


@final
@dataclass(slots=True)
class RecordCounts:
    """Counts of an epoch of a lane.

    Attributes:
        records: number of records read.
        reasons: number of records without a train document, by reason.
    """

    records: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, facts: UnitFacts, shares: NDArray[np.int64]) -> None:
        """Add a range group's records, and its number of documents per subset."""
        for part in facts.parts:
            self.records += part.records
            self.reasons.update({_BAD_PREFIX: part.bad, _EMPTY_REASON: part.empty, **part.dropped})
        for name, count in zip(SUBSETS[1:], shares[1:].tolist(), strict=True):
            self.reasons[_SHARE_PREFIX + name] += count

    def explain_no_document(self, bad: Sequence[str]) -> tuple[str, str]:
        """Return why there is no document, and a remedy.

        ``bad`` holds the messages about the first bad records.
        """
        nonzero_reasons = [(reason, count) for reason, count in self.reasons.most_common() if count > 0]
        if not nonzero_reasons:
            return "the lane received no record of the input", "Give more input"
        reason_text = ", ".join(f"{count:,} {reason}" for reason, count in nonzero_reasons)
        first = f". The first bad record: {bad[0]}" if bad else ""
        why = f"no document to train on remains of {format_count(self.records, 'record')}: {reason_text}{first}"
        return why, _suggest_remedy(nonzero_reasons[0][0])


def _suggest_remedy(reason: str) -> str:
    if reason == _BAD_PREFIX:
        return "Fix the input, or name another"
    if reason == _EMPTY_REASON:
        return "Name other inputs"
    if reason.startswith(_SHARE_PREFIX):
        return f"Give a smaller {reason.removeprefix(_SHARE_PREFIX)}_fraction"
    return "Leave fewer out (clean=, max_tokens=, train_on=), or name other inputs"
