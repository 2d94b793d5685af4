"""Application of cleaning steps to lists of texts, with counts per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from batchloom.text.language import LanguageStep
from batchloom.text.registry import make_clean_function
from batchloom.text.steps import CleanStep, DroppedText


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Input and output counts of one step.

    Attributes:
        documents_in: number of input documents.
        documents_out: number of output documents.
        changed: number of output documents whose text changed.
        bytes_in: UTF-8 bytes of the input documents.
        bytes_out: UTF-8 bytes of the output documents.
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
    """Result of cleaning a list of texts.

    Attributes:
        texts: texts that were not dropped.
        indices: index of each text in the input list.
        drops: (input index, step index, drop), ordered by step.
        counts: counts of each step.
        languages: language of each text if a step detected it, else empty.
    """

    texts: list[str]
    indices: list[int]
    drops: list[tuple[int, int, DroppedText]] = field(default_factory=list)
    counts: tuple[StepCounts, ...] = ()
    languages: list[str] = field(default_factory=list)


@final
class TextCleaner:
    """A sequence of cleaning steps.

    Only the steps are pickled; their functions are rebuilt on unpickling.

    Raises:
        SettingsError: the name or settings of a step are invalid.
        MissingDependencyError: a package that a step needs is not installed.
    """

    __slots__ = ("_cleans", "steps")

    def __init__(self, steps: Sequence[CleanStep]) -> None:
        self.steps = tuple(steps)
        self._cleans = [make_clean_function(step) for step in self.steps]

    def __reduce__(self) -> tuple[Any, ...]:
        return TextCleaner, (self.steps,)

    def clean(self, texts: Sequence[str]) -> CleanResult:
        """Apply every step to every text, until a step drops it."""
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
    """Merge the results of a step into ``cleaned``; return how many texts changed."""
    texts, changed, dropped = cleaned.texts, 0, set[int]()
    # A step returns its input object if nothing changed, which is the common case.
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
    """Return the UTF-8 length of a text, without encoding ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
