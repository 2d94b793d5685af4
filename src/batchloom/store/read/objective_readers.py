"""Readers of pairs, labelled answers and prompts of a store."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, SettingsError, StoreError
from batchloom.core.settings import check_index, quote_value
from batchloom.store.format.objectives import CHOSEN, GOOD, OBJECTIVES
from batchloom.store.format.shard_sidecars import DocumentFields
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.store_reader import Store
from batchloom.store.read.stored_media import has_media

Example = dict[str, Any]
_PROMPT = "prompt"


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
        _require_store(store)
        if store.contents.objective != "pairs":
            raise _make_wrong_contents_error(
                store, "no preference pairs: prepare data with chosen and rejected columns (docs/reference/schemas.md)"
            )
        self.store = store
        for shard in range(len(store.shards)):
            store.shards.sides(shard)
        # Removal always covers both documents of a pair.
        self._documents = _list_remaining(store, 2)

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
        _require_store(store)
        if store.contents.objective not in ("pairs", "labels"):
            raise _make_wrong_contents_error(
                store, "no labelled answers: prepare data with a column label (docs/reference/schemas.md)"
            )
        self.store = store
        sides = [store.shards.sides(shard).sides for shard in range(len(store.shards))]
        self._documents = _list_remaining(store, 1)
        self.good: NDArray[np.bool_] = np.isin(np.concatenate(sides)[self._documents], (GOOD, CHOSEN))

    def __len__(self) -> int:
        return int(self._documents.size)

    def __getitem__(self, index: int) -> Example:
        number = check_index(index, len(self), "document")
        ((ids, start),) = _read_answers(self.store, [int(self._documents[number])])
        return {"prompt_ids": ids[:start], "completion_ids": ids[start:], "label": bool(self.good[number])}


def _list_remaining(store: Store, step: int) -> NDArray[np.int64]:
    """Return the numbers of every ``step``-th document that is not removed."""
    numbers = np.arange(0, len(store), step)
    return numbers[~mask_removed(store.contents.removed, numbers)]


def _require_store(store: object) -> None:
    """Raise if the argument of a reader is no open store."""
    if not isinstance(store, Store):
        raise InputError(f"Documents are read from an open store, not {quote_value(store)}. Give open_store(path).")


def _make_wrong_contents_error(store: Store, problem: str) -> InputError:
    """Return the error of a reader for a store whose contents another class reads."""
    objective = OBJECTIVES.get(store.contents.objective)
    contents, reader = (objective.contents, objective.reader) if objective else ("documents", "batchloom.Loader")
    return InputError(f"{store.path} holds {problem}; it holds {contents}, which {reader} reads.")


def _read_answers(store: Store, numbers: list[int]) -> list[tuple[list[int], int]]:
    """Read the ids of each document and the offset of its answer.

    The answer begins at the first trained token.
    """
    documents = np.array(numbers, np.int64)
    starts = np.zeros_like(documents)
    lengths = store.lengths.take(documents).astype(np.int64)
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


@final
class StoredPrompts:
    """Map-style dataset of the prompts of a store, for trainers that generate answers.

    ``prompts[n]`` is a dict of ``prompt`` and the carried columns, the row that TRL's ``GRPOTrainer`` takes: it passes
    the columns to the reward functions.

    Args:
        store: an open store of prompts.
        form: ``messages`` (as in the records) or ``text`` (rendered by the template of the store, with the beginning
            of the answer); None for messages, and for the texts of the records if the store was prepared with
            ``--template none``.

    Attributes:
        store: as given.

    Raises:
        InputError: the store holds no prompts.
        SettingsError: ``form`` is unknown.
    """

    def __init__(self, store: Store, form: Literal["messages", "text"] | None = None) -> None:
        if form not in (None, "messages", "text"):
            raise SettingsError([f"form: {quote_value(form)} is not one of messages, text"])
        self.store = store
        self._form = form
        self._carried = _CarriedFields(store)

    def __len__(self) -> int:
        return len(self._carried)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Example:
        number = self._carried.find_document(index)
        fields = self._carried.read(number)
        if _PROMPT not in fields:
            raise StoreError(
                f"Document {number} of {self.store.path} carries no {_PROMPT!r}. The store is damaged: run batchloom "
                "check on it."
            )
        if self._form is None and _has_no_template(self.store):
            fields[_PROMPT] = "".join(message["content"] for message in fields[_PROMPT])
        if self._form == "text":
            fields[_PROMPT] = self.store.tokenizer.decode(self.store[number].ids)
        return fields

    def ids(self, index: int) -> list[int]:
        """Return the ids of a prompt, as rendered by the template of the store."""
        ids: list[int] = self.store[self._carried.find_document(index)].ids.tolist()
        return ids


def _has_no_template(store: Store) -> bool:
    recipe = store.manifest.recipe if store.manifest else {}
    return (recipe.get("chat") or {}).get("template") == "none"


@final
class _CarriedFields:
    """Columns that the remaining prompts of a store carry."""

    def __init__(self, store: Store) -> None:
        _require_store(store)
        if store.contents.objective != "prompts":
            raise _make_wrong_contents_error(
                store, "no prompts: prepare data with --prompts (docs/how-to/prepare/preferences.md)"
            )
        self._store = store
        self._bounds = np.array(store.shards.bounds, np.int64)
        self._documents = _list_remaining(store, 1)
        self._latest = 0, self._map_fields(0)

    def __len__(self) -> int:
        return int(self._documents.size)

    def __reduce__(self) -> tuple[type, tuple[Store]]:
        # A mapped file cannot be pickled.
        return _CarriedFields, (self._store,)

    def find_document(self, index: int) -> int:
        """Return the number of the document of an item, which may count from the end."""
        return int(self._documents[check_index(index, len(self), "document")])

    def read(self, document: int) -> dict[str, Any]:
        shard = int(np.searchsorted(self._bounds, document, side="right")) - 1
        if self._latest[0] != shard:
            self._latest = shard, self._map_fields(shard)
        return self._latest[1].read(document - int(self._bounds[shard]))

    def _map_fields(self, shard: int) -> DocumentFields:
        fields = self._store.shards.fields(shard)
        if fields is None:
            raise StoreError(
                f"Shard {shard} of {self._store.path} names no .fields file. Run batchloom check on the store."
            )
        return fields
