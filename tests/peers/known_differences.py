"""Known differences between the rows of batchloom and those of peers, each with its reason."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from peers.cases import Case
from peers.gpt2_folder import CONTROL_IDS, LINE_END_ID

Row = dict[str, Any]
UNTRAINED = -100
_STOP_IDS = {CONTROL_IDS["<|im_end|>"], CONTROL_IDS["<|endoftext|>"]}


class Difference(NamedTuple):
    """What a peer does otherwise; ``adapt`` turns its rows into those of batchloom, if a rule can."""

    reason: str
    adapt: Callable[[Row], Row] | None = None


def _leave_out_line_ends(row: Row) -> Row:
    """Return a row whose line ends after the stop token of an answer are not trained."""
    pairs = zip([None, *row["input_ids"]], row["input_ids"], row["labels"], strict=False)
    labels = [UNTRAINED if token == LINE_END_ID and before in _STOP_IDS else label for before, token, label in pairs]
    return {**row, "labels": labels}


DIFFERENCES = {
    "line ends": Difference(
        "the line end after the stop token of an answer is trained there; a model stops before it", _leave_out_line_ends
    ),
    "sender names": Difference("human and gpt are written as roles there; here they are user and assistant"),
}


def check_rows(case: Case, expected: Sequence[Row], actual: Sequence[Row]) -> None:
    """Assert that the rows are equal, or differ as the case says."""
    if not case.differs:
        assert actual == expected
        return
    # Otherwise the case has no difference to list.
    assert actual != expected
    adapt = DIFFERENCES[case.differs].adapt
    if adapt is not None:
        assert actual == [adapt(row) for row in expected]
