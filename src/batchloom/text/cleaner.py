"""Steps of cleaning over lists of texts, with what each let through."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from batchloom.text.language import LanguageStep
from batchloom.text.registry import make_clean_function
from batchloom.text.steps import CleanStep, DroppedText


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What one step was given and what it gave.

    Attributes:
        documents_in: documents it was given.
        documents_out: documents it let through.
        changed: of these, those whose text is another.
        bytes_in: of the documents it was given, as UTF-8.
        bytes_out: of the documents it let through.
    """

    documents_in: int = 0
    documents_out: int = 0
    changed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(
            self.documents_in + other.documents_in,
            self.documents_out + other.documents_out,
            self.changed + other.changed,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
        )


@dataclass(slots=True)
class CleanResult:
    """What became of a list of texts.

    Attributes:
        texts: those kept.
        indices: of each of these, its number in the list that was given.
        drops: (number in that list, number of the step, the drop), by the order of the steps.
        counts: of each step.
        languages: of each kept text, where a step told it; else empty.
    """

    texts: list[str]
    indices: list[int]
    drops: list[tuple[int, int, DroppedText]] = field(default_factory=list)
    counts: tuple[StepCounts, ...] = ()
    languages: list[str] = field(default_factory=list)


@final
class TextCleaner:
    """Steps, one after the other, over lists of texts.

    It is pickled as its steps alone and made anew where it arrives.

    Raises:
        SettingsError: a step's name or settings are wrong.
        MissingDependencyError: a package that a step needs is not installed.
    """

    __slots__ = ("_cleans", "steps")

    def __init__(self, steps: Sequence[CleanStep]) -> None:
        self.steps = tuple(steps)
        self._cleans = [make_clean_function(step) for step in self.steps]

    def __reduce__(self) -> tuple[Any, ...]:
        return TextCleaner, (self.steps,)

    def clean(self, texts: Sequence[str]) -> CleanResult:
        """Every text through every step, until one drops it."""
        cleaned = CleanResult(list(texts), list(range(len(texts))))
        sizes = list(map(compute_utf8_length, texts))
        counts = []
        for number, clean in enumerate(self._cleans):
            documents, size = len(sizes), sum(sizes)
            results = list(map(clean, cleaned.texts))
            if isinstance(clean, LanguageStep):
                cleaned.languages = clean.take()
            changed = _apply_step_results(cleaned, sizes, number, results)
            counts.append(StepCounts(documents, len(sizes), changed, size, sum(sizes)))
        cleaned.counts = tuple(counts)
        return cleaned


def _apply_step_results(cleaned: CleanResult, sizes: list[int], number: int, results: list[str | DroppedText]) -> int:
    """Put the results of a step into their places; gives the number of texts it changed."""
    texts, changed, dropped = cleaned.texts, 0, set[int]()
    # A step gives back the very object it was given where it changed nothing: nearly always.
    for index in [index for index, pair in enumerate(zip(texts, results, strict=True)) if pair[0] is not pair[1]]:
        result = results[index]
        if isinstance(result, DroppedText):
            cleaned.drops.append((cleaned.indices[index], number, result))
            dropped.add(index)
        elif result != texts[index]:
            texts[index], sizes[index] = result, compute_utf8_length(result)
            changed += 1
    if dropped:
        remaining_indices = [index for index in range(len(texts)) if index not in dropped]
        cleaned.texts = [texts[index] for index in remaining_indices]
        cleaned.indices = [cleaned.indices[index] for index in remaining_indices]
        sizes[:] = [sizes[index] for index in remaining_indices]
        if cleaned.languages:
            cleaned.languages = [cleaned.languages[index] for index in remaining_indices]
    return changed


def compute_utf8_length(text: str) -> int:
    """How many bytes a text is as UTF-8, without encoding it where it is ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
