"""Prompts and labelled steps of a store, for reinforcement learning."""

from collections.abc import Iterator
from typing import Any, Literal, final

import numpy as np

from batchloom.core.errors import SettingsError, StoreError
from batchloom.core.settings import check_index, quote_value
from batchloom.store.format.document_fields import DocumentFields
from batchloom.store.read.preference_reader import Example, list_remaining, make_wrong_contents_error, require_store
from batchloom.store.read.store_reader import Store

_PROMPT, _LABELS = "prompt", "labels"
_IGNORED_LABEL = -100


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
        self.store, self._form = store, form
        self._carried = _CarriedFields(store, "prompts", "no prompts: prepare data with --prompts")

    def __len__(self) -> int:
        return len(self._carried)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Example:
        number = self._carried.find_document(index)
        fields = self._carried.read(number)
        if _PROMPT not in fields:
            raise _make_damaged_error(self.store, number, _PROMPT)
        if self._form is None and _has_no_template(self.store):
            fields[_PROMPT] = "".join(message["content"] for message in fields[_PROMPT])
        if self._form == "text":
            fields[_PROMPT] = self.store.tokenizer.decode(self.store[number].ids)
        return fields

    def ids(self, index: int) -> list[int]:
        """Return the ids of a prompt, as rendered by the template of the store."""
        ids: list[int] = self.store[self._carried.find_document(index)].ids.tolist()
        return ids


@final
class LabelledSteps:
    """Map-style dataset of answers with labelled steps, for process reward models.

    ``steps[n]`` is a dict of ``input_ids`` and ``labels``, the input of a token classifier as TRL's ``PRMTrainer`` and
    axolotl prepare it: a label is 1 or 0 at the last token of each step, and -100 at all other tokens.

    Args:
        store: an open store of answers with labelled steps.

    Attributes:
        store: as given.

    Raises:
        InputError: the store holds no labelled steps.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._carried = _CarriedFields(
            store, "steps", "no labelled steps: prepare data with prompt, completions and labels"
        )

    def __len__(self) -> int:
        return len(self._carried)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Example:
        number = self._carried.find_document(index)
        step_labels: Any = self._carried.read(number).get(_LABELS)
        ids = self.store[number].ids
        (mask,) = self.store.mask(np.array([number]), np.array([0]), np.array([ids.size]))
        ends = np.flatnonzero(mask)
        if not isinstance(step_labels, list) or len(step_labels) != len(ends):
            raise _make_damaged_error(self.store, number, _LABELS)
        labels = np.full(ids.size, _IGNORED_LABEL, np.int64)
        labels[ends] = step_labels
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}


def _has_no_template(store: Store) -> bool:
    recipe = store.manifest.recipe if store.manifest else {}
    return (recipe.get("chat") or {}).get("template") == "none"


@final
class _CarriedFields:
    """Columns that the remaining documents of a store carry."""

    def __init__(self, store: Store, kind: str, problem: str) -> None:
        require_store(store)
        if store.contents.objective != kind:
            raise make_wrong_contents_error(store, f"{problem} (docs/preferences.md)")
        self._store, self._kind, self._problem = store, kind, problem
        self._bounds = np.array(store.shards.bounds, np.int64)
        self._documents = list_remaining(store, 1)
        self._latest = 0, self._map_fields(0)

    def __len__(self) -> int:
        return int(self._documents.size)

    def __reduce__(self) -> tuple[type, tuple[Store, str, str]]:
        # A mapped file cannot be pickled.
        return _CarriedFields, (self._store, self._kind, self._problem)

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


def _make_damaged_error(store: Store, document: int, name: str) -> StoreError:
    return StoreError(
        f"Document {document} of {store.path} carries no {name!r} that fits it. The store is damaged: run batchloom "
        "check on it."
    )
