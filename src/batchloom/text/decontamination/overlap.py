"""Decontamination: documents that share words with an evaluation set are dropped.

The method is that of GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix C): texts are in lower
case and without punctuation, and a document that shares any 13 consecutive words with a record of a set
is contaminated. Shorter fields must match completely; they have at least 8 words, the minimum
that GPT-3 used.
"""

import functools
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

import numpy as np

from batchloom.core.errors import InputError
from batchloom.core.settings import coerce_int_fields, is_text, quote_value, raise_problems
from batchloom.text.decontamination.overlap_index import (
    MAX_SETS,
    OverlapIndex,
    hash_words,
    load_index,
    split_normal_words,
)
from batchloom.text.english_words import iter_chunks
from batchloom.text.steps import CleanFunction, DroppedText

OVERLAP_REASON: Final = "decontaminate: shares words with {}"

_CHUNK_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecontaminationSettings:
    """Settings of the step ``decontaminate``.

    Attributes:
        sets: file or folder with the records of each evaluation set, by name.
        words: number of consecutive words that are an overlap.
        min_words: minimum length of a field with fewer than ``words`` words, which must match
            completely; shorter ones are not searched for.
        index: path of the index of the sets; preparation sets it.
    """

    sets: dict[str, str] = field(default_factory=dict)
    words: int = 13
    min_words: int = 8
    index: str | None = None

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, {"words": (1, 64), "min_words": (1, 64)})
        is_valid = isinstance(self.sets, dict) and all(map(is_text, [*self.sets, *self.sets.values()]))
        if not is_valid or not 1 <= len(self.sets) <= MAX_SETS:
            problems.append(
                f"sets: {quote_value(self.sets)} names no evaluation set; give a name and a file for each, "
                "such as {gsm8k: evaluation/gsm8k.jsonl}, in a recipe file (--recipe)"
            )
        raise_problems(problems)


def make_decontamination_step(settings: DecontaminationSettings) -> CleanFunction:
    """Return a function that drops texts that share words with a set.

    The index is memory-mapped, so workers share its pages. Raises InputError if it is missing or invalid.
    """
    if settings.index is None:
        raise InputError(
            "decontaminate: there is no index of the evaluation sets yet; make one with "
            "batchloom.preparation.settings.build_overlap_index(settings, folder)."
        )
    return functools.partial(_clean_text, load_index(settings.index))


def make_step_with_index(index: OverlapIndex) -> CleanFunction:
    """Return the function of the step for a loaded index."""
    return functools.partial(_clean_text, index)


def _clean_text(index: OverlapIndex, text: str) -> str | DroppedText:
    """Search a text in chunks, each with the last words of the previous one."""
    carry_limit = index.lengths[-1] - 1
    words, preceding_words = np.zeros(0, np.uint64), 0
    for chunk in iter_chunks(text, _CHUNK_CHARACTERS):
        carry = words[max(0, len(words) - carry_limit) :]
        preceding_words += len(words) - len(carry)
        words = np.concatenate((carry, hash_words(chunk)))
        match = index.find_first(words)
        if match:
            position, n, entry = match
            return _make_drop(index, entry, _read_words_at(text, preceding_words + position, n))
    return text


def _read_words_at(text: str, start: int, count: int) -> list[str]:
    words = chain.from_iterable(map(split_normal_words, iter_chunks(text, _CHUNK_CHARACTERS)))
    return list(islice(words, start, start + count))


def _make_drop(index: OverlapIndex, entry: int, words: list[str]) -> DroppedText:
    name = index.names[int(index.sets[entry])]
    record_label = f"record {int(index.records[entry]) + 1:,} of {name}"
    return DroppedText(OVERLAP_REASON.format(name), f"{record_label}: {' '.join(words)!r}")
