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


def _leave_out_headers(row: Row) -> Row:
    """Return a row whose headers of turns and line ends are not trained."""
    row, in_header, headers = _leave_out_line_ends(row), False, set()
    for number, token in enumerate(row["input_ids"]):
        in_header = in_header or token == CONTROL_IDS["<|im_start|>"]
        if in_header:
            headers.add(number)
        in_header = in_header and token != LINE_END_ID
    adapted = {**row, "labels": [UNTRAINED if n in headers else label for n, label in enumerate(row["labels"])]}
    if "loss_weights" in row:
        weights = zip(row["loss_weights"], adapted["labels"], strict=True)
        adapted["loss_weights"] = [0.0 if label == UNTRAINED else weight for weight, label in weights]
    return adapted


def _train_first_token(row: Row) -> Row:
    """Return a row whose first token is trained; as the first of a document, no token predicts it."""
    return {**row, "labels": [row["input_ids"][0], *row["labels"][1:]]}


DIFFERENCES = {
    "line ends": Difference(
        "the line end after the stop token of an answer is trained there; a model stops before it", _leave_out_line_ends
    ),
    "headers and line ends": Difference(
        "the header of an answer and the line end after it are trained there; a model writes neither",
        _leave_out_headers,
    ),
    "detailed thinking": Difference(
        "its reader of the openai format adds the line 'detailed thinking off' to the system prompt, or a line end if "
        "there are tools; here nothing is added"
    ),
    "earlier answers": Difference(
        "all answers of both conversations are trained there, and the equal ones cancel; here only the last ones are"
    ),
    "first token": Difference("the first token has no label there, and no token predicts it", _train_first_token),
    "alpaca text": Difference(
        "its alpaca has another first sentence and a section of its own for the input, and nothing follows the end token"
    ),
    "text prompts": Difference("a text prompt is continued there; here it is a turn of the user in the chat template"),
    "sender names": Difference("human and gpt are written as roles there; here they are user and assistant"),
}


def find_problem(case: Case, expected: Sequence[Row], actual: Sequence[Row]) -> str:
    """Return how rows differ otherwise than the case says; "" if they do not."""
    if not case.differs:
        return _compare(expected, actual)
    if actual == expected:
        return f"the rows are equal, without the difference {case.differs!r}"
    adapt = DIFFERENCES[case.differs].adapt
    return "" if adapt is None else _compare([adapt(row) for row in expected], actual)


def _compare(expected: Sequence[Row], actual: Sequence[Row]) -> str:
    if len(expected) != len(actual):
        return f"{len(expected)} rows there, {len(actual)} here"
    for number, (there, here) in enumerate(zip(expected, actual, strict=True)):
        for name in there:
            if here.get(name) != there[name]:
                return f"row {number}: {name} is {there[name]} there, {here.get(name)} here"
    return ""
