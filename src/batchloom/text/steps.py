"""Cleaning steps (each maps a text to a text or a drop): types and settings."""

import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, final

from batchloom.core.settings import as_int, is_bool, is_positive_number, is_text, quote_value, raise_problems

if TYPE_CHECKING:
    from batchloom.text.word_statistics import BatchWords

# The words of a batch of about this many characters are in memory at once.
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class CleanStep:
    """A step as named in a recipe.

    Attributes:
        name: name of the step.
        settings: settings that differ from the step's defaults, by name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DroppedText:
    """A document that a step removes.

    Attributes:
        reason: rule from a closed list, without numbers (``gopher: too few words``); drops
            are counted by it.
        detail: measured and required value (``31 words, at least 50``).
    """

    reason: str
    detail: str


CleanFunction = Callable[[str], str | DroppedText]


@final
class WordSplitter:
    """Cache of the words of a batch, shared by consecutive rules."""

    def __init__(self) -> None:
        self._batches: list[tuple[list[str], BatchWords]] = []

    def split(self, texts: Sequence[str]) -> Iterator[tuple[list[str], "BatchWords"]]:
        """Yield texts with their words, a batch at a time.

        If the previous call had all these texts, too, their words are not split again.
        """
        remaining = set(map(id, texts))
        selections = [[n for n, text in enumerate(batch) if id(text) in remaining] for batch, _ in self._batches]
        known = [batch[n] for (batch, _), selection in zip(self._batches, selections, strict=True) for n in selection]
        if len(known) == len(texts) and all(map(operator.is_, known, texts)):
            batches = zip(self._batches, selections, strict=True)
            self._batches = [
                ([batch[n] for n in selection], words.select(selection)) for (batch, words), selection in batches
            ]
        else:
            from batchloom.text.word_statistics import split_words  # noqa: PLC0415 - imports pyarrow

            self._batches = [(batch, split_words(batch)) for batch in _iter_batches(texts)]
        yield from self._batches


def _iter_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


@final
@dataclass(frozen=True, slots=True)
class WordStep:
    """Step that drops texts by their words, which are split for many texts at once.

    ``find_drops`` returns the drop, or None, of each text of a batch.
    """

    find_drops: Callable[[Sequence[str], "BatchWords"], list[DroppedText | None]]

    def __call__(self, text: str) -> str | DroppedText:
        return self.clean([text], WordSplitter())[0]

    def clean(self, texts: Sequence[str], splitter: WordSplitter) -> list[str | DroppedText]:
        """Return each text or its drop."""
        results: list[str | DroppedText] = []
        for batch, words in splitter.split(texts):
            results += [drop or text for text, drop in zip(batch, self.find_drops(batch, words), strict=True)]
        return results


class Limit(NamedTuple):
    """Valid values of a field, and the problem of the others as the end of "... is"."""

    is_valid: Callable[[Any], bool]
    problem: str


def _is_count(value: Any) -> bool:
    count = as_int(value)
    return count is not None and 0 <= count < 1 << 31


def _is_share(value: Any) -> bool:
    return is_positive_number(value, zero=True) and value <= 1


def _are_ngram_shares(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and as_int(pair[0]) in range(1, 65) and _is_share(pair[1])
        for pair in value
    )


Count = Annotated[int, Limit(_is_count, "not a whole number from 0 on")]
Number = Annotated[float, Limit(lambda value: is_positive_number(value, zero=True), "not a finite number from 0 on")]
Share = Annotated[float, Limit(_is_share, "not a number from 0 to 1")]
Switch = Annotated[bool, Limit(is_bool, "neither True nor False")]
Words = Annotated[
    tuple[str, ...], Limit(lambda value: isinstance(value, tuple) and all(map(is_text, value)), "not a list of words")
]
ListPath = Annotated[str, Limit(is_text, "not the path of a list")]
# (n, share) pairs.
NgramShares = Annotated[
    tuple[tuple[int | float, ...], ...],
    Limit(_are_ngram_shares, "not a list of [words, share], such as [[2, 0.2], [3, 0.18]]"),
]


def check_limits(settings: object) -> None:
    """Raise SettingsError for fields of a settings dataclass outside their limits."""
    problems = []
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if value is None and type(None) in options:
            continue
        limits = [limit for option in options for limit in getattr(option, "__metadata__", ())]
        problems += [
            f"{name}: {quote_value(value)} is {limit.problem}" for limit in limits if not limit.is_valid(value)
        ]
    raise_problems(problems)
