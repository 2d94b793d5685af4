"""A case of a comparison: records, the settings of both libraries, and what differs.

The modules of cases hold plain data, because the interpreter of a peer reads them, without batchloom and pytest.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

# Columns of a row of expected values, by what the library makes of the records.
COLUMNS = {
    "sft": ("input_ids", "labels"),
    "weighted": ("input_ids", "labels", "loss_weights"),
    "pairs": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "labels": ("prompt_ids", "completion_ids", "label"),
    "prompts": ("prompt_ids",),
}
Objective = Literal["sft", "weighted", "pairs", "labels", "prompts"]


@dataclass(frozen=True)
class Case:
    """Records that two libraries read.

    Attributes:
        name: unique name in the table of the peer.
        records: records as the peer documents them.
        objective: what both make of the records.
        peer: settings of the peer, as its runner takes them.
        settings: settings of ``batchloom.prepare``.
        differs: known difference of the values (a key of ``known_differences.DIFFERENCES``); "" if they are equal.
    """

    name: str
    records: list[dict[str, Any]]
    objective: Objective = "sft"
    peer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    differs: str = ""
