"""Objectives of stored documents other than the next token."""

from typing import Literal, NamedTuple

# Empty for the next token.
ObjectiveName = Literal["", "pairs", "labels", "prompts"]
CHOSEN = 1
REJECTED = 2
GOOD = 3
BAD = 4
PROMPT = 5
SIDE_NAMES = ("", "chosen", "rejected", "good", "bad", "prompt")


class Objective(NamedTuple):
    """Documents of an objective, with their trained part, trainers and reader."""

    contents: str  # plural name of the documents
    layout: str  # content of each document
    trained: str  # what is trained
    trainers: str  # plural name of the trainers that read the documents
    reader: str  # class that reads them
    remedy: str  # preparation of the same records for a loader
    sides: tuple[int, ...]  # sides that ``.pairs`` may name
    carries: bool = False  # the documents carry columns in ``.fields``

    def describe_refusal(self, name: str) -> str:
        """Return the error of a loader for data of this objective."""
        consequence = "train them as texts" if self.carries else f"also train the {SIDE_NAMES[self.sides[-1]]} answers"
        return (
            f"{name} holds {self.contents}: a loader would {consequence}. {self.trainers.capitalize()} read them with "
            f"{self.reader}. {self.remedy}."
        )


OBJECTIVES: dict[str, Objective] = {
    "pairs": Objective(
        contents="preference pairs",
        layout="two documents each, the chosen answer and the rejected one",
        trained="only their answers are trained",
        trainers="preference trainers",
        reader="batchloom.store.PreferencePairs",
        remedy="To train only the chosen answers, prepare the data again with --map prompt=prompt,completion=chosen "
        "(where chosen holds whole conversations --map messages=chosen, whole texts --map text=chosen)",
        sides=(CHOSEN, REJECTED),
    ),
    "labels": Objective(
        contents="labelled answers",
        layout="each document is an answer labelled good or bad",
        trained="only their answers are trained",
        trainers="preference trainers",
        reader="batchloom.store.LabelledAnswers",
        remedy="To train only the good answers, keep only their records and prepare those with --map label=",
        sides=(GOOD, BAD),
    ),
    "prompts": Objective(
        contents="prompts without answers",
        layout="each document is a prompt without its answer, and carries columns",
        trained="prompts are not trained",
        trainers="trainers with rewards",
        reader="batchloom.store.StoredPrompts",
        remedy="To train on answers, prepare the data again without --prompts",
        sides=(PROMPT,),
        carries=True,
    ),
}
