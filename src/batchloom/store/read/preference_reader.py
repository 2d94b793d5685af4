"""Preference pairs and labelled answers of a store, for preference trainers."""

from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.settings import check_index, quote_value
from batchloom.store.format.objectives import CHOSEN, GOOD, OBJECTIVES
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.store_reader import Store
from batchloom.store.read.stored_media import has_media

Example = dict[str, Any]


@final
class PreferencePairs:
    """Map-style dataset of the preference pairs of a store.

    ``pairs[n]`` is a dict of lists of ids: ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, the input of
    TRL's ``DataCollatorForPreference``. Prompt and answer together are the complete document. If the store holds media,
    ``documents`` has the numbers of both documents, which ``batchloom.batches.PairMediaCollator`` takes.

    Args:
        store: an open store of pairs.

    Attributes:
        store: as given.

    Raises:
        InputError: the store holds no pairs.
        StoreError: a ``.pairs`` file is missing or damaged.
    """

    def __init__(self, store: Store) -> None:
        require_store(store)
        if store.contents.objective != "pairs":
            raise make_wrong_contents_error(
                store, "no preference pairs: prepare data with chosen and rejected columns (docs/schemas.md)"
            )
        self.store = store
        for shard in range(len(store.shards)):
            store.shards.sides(shard)
        # Removal always covers both documents of a pair.
        self._documents = list_remaining(store, 2)

    def __len__(self) -> int:
        return int(self._documents.size)

    @cached_property
    def ids(self) -> NDArray[np.uint64]:
        """Id of each pair, ascending, uint64 [pairs]."""
        pair_ids = [self.store.shards.sides(shard).pairs[::2] for shard in range(len(self.store.shards))]
        ids: NDArray[np.uint64] = np.concatenate(pair_ids)[self._documents // 2]
        return ids

    @property
    def chosen(self) -> NDArray[np.int64]:
        """Number of each pair's chosen document in the store, int64 [pairs]."""
        return self._documents

    @property
    def rejected(self) -> NDArray[np.int64]:
        """Number of each pair's rejected document in the store, int64 [pairs]."""
        return self._documents + 1

    def __getitem__(self, index: int) -> Example:
        first = int(self._documents[check_index(index, len(self), "pair")])
        (chosen, start), (rejected, rejected_start) = _read_answers(self.store, [first, first + 1])
        if chosen[:start] != rejected[:rejected_start]:
            raise StoreError(
                f"Documents {first} and {first + 1} of {self.store.path} are a pair and have different prompts. The "
                "store is damaged: run batchloom check on it."
            )
        pair = {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}
        return {**pair, "documents": [first, first + 1]} if has_media(self.store) else pair


@final
class LabelledAnswers:
    """Map-style dataset of good and bad answers, for KTO trainers.

    ``labels[n]`` is a dict: ``prompt_ids`` and ``completion_ids`` (lists of ids) and ``label``, the input of
    TRL's ``DataCollatorForUnpairedPreference``. In a store of pairs, each chosen answer counts as
    good and each rejected answer as bad.

    Args:
        store: an open store of labelled answers or of pairs.

    Attributes:
        store: as given.
        good: True for each good answer, bool [answers].

    Raises:
        InputError: the store holds no preferences.
        StoreError: a ``.pairs`` file is missing or damaged.
    """

    def __init__(self, store: Store) -> None:
        require_store(store)
        if store.contents.objective not in ("pairs", "labels"):
            raise make_wrong_contents_error(
                store, "no labelled answers: prepare data with a column label (docs/schemas.md)"
            )
        self.store = store
        sides = [store.shards.sides(shard).sides for shard in range(len(store.shards))]
        self._documents = list_remaining(store, 1)
        self.good: NDArray[np.bool_] = np.isin(np.concatenate(sides)[self._documents], (GOOD, CHOSEN))

    def __len__(self) -> int:
        return int(self._documents.size)

    def __getitem__(self, index: int) -> Example:
        number = check_index(index, len(self), "document")
        ((ids, start),) = _read_answers(self.store, [int(self._documents[number])])
        return {"prompt_ids": ids[:start], "completion_ids": ids[start:], "label": bool(self.good[number])}


def list_remaining(store: Store, step: int) -> NDArray[np.int64]:
    """Return the numbers of every ``step``-th document that is not removed."""
    numbers = np.arange(0, len(store), step)
    return numbers[~mask_removed(store.contents.removed, numbers)]


def require_store(store: object) -> None:
    """Raise if the argument of a reader is no open store."""
    if not isinstance(store, Store):
        raise InputError(f"Documents are read from an open store, not {quote_value(store)}. Give open_store(path).")


def make_wrong_contents_error(store: Store, problem: str) -> InputError:
    """Return the error of a reader for a store whose contents another class reads."""
    objective = OBJECTIVES.get(store.contents.objective)
    contents, reader = (objective.contents, objective.reader) if objective else ("documents", "batchloom.Loader")
    return InputError(f"{store.path} holds {problem}; it holds {contents}, which {reader} reads.")


def _read_answers(store: Store, numbers: list[int]) -> list[tuple[list[int], int]]:
    """Read the ids of each document and the offset of its answer.

    The answer begins at the first trained token.
    """
    documents = np.array(numbers, np.int64)
    starts, lengths = np.zeros_like(documents), store.lengths.take(documents).astype(np.int64)
    answers = []
    for number, ids, trained in zip(
        numbers, store.read(documents, starts, lengths), store.mask(documents, starts, lengths), strict=True
    ):
        start = ids.size - int(np.count_nonzero(trained))
        if start == ids.size or not trained[start:].all():
            raise StoreError(
                f"Document {number} of {store.path} is a preference, but its trained tokens are not at its end. "
                "The store is damaged: run batchloom check on it."
            )
        answers.append((ids.tolist(), start))
    return answers
