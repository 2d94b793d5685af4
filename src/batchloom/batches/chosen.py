"""Whole documents of a loader's stores in rows of one's own: to see how a model takes them and their media."""

import inspect
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from batchloom.batches.assemble import Batch, BatchCuts, Ids, assemble_rows
from batchloom.batches.device import to_torch
from batchloom.batches.loader import Loader
from batchloom.batches.media import BatchMedia
from batchloom.batches.shelf import Shelf
from batchloom.plan.rows import Rows
from batchloom.store.reader import Store
from batchloom.store.removed import are_removed
from batchloom.store.stored_media import StoreMedia

# Of each store, among which documents of text are looked for.
_LOOKED_AT = 1 << 16


@final
class Chosen:
    """Makes batches of documents that are asked for by number, outside of any plan.

    Documents are numbered through all stores of the loader, in their order.

    Args:
        loader: of stores with media.

    Raises:
        InputError: a store lies elsewhere.
    """

    def __init__(self, loader: Loader) -> None:
        self._reader = loader.store
        store = loader.store
        self._stores = list(store.stores.values()) if isinstance(store, Shelf) else [store]
        self._media = BatchMedia(self._stores, loader.spec.media)
        self._firsts = np.cumsum([0, *(len(one) for one in self._stores)])

    @property
    def tokens(self) -> dict[str, tuple[str, int]]:
        """The token that stands for media of each kind, and its id."""
        store, state = self._prepared
        named = state.get("tokens", {})
        return {kind: (token, store.tokenizer.control[token]) for kind, token in named.items()}

    @property
    def processor_files(self) -> dict[str, str]:
        """The settings of the processor that makes features, as files that transformers reads, by name."""
        return dict(self._prepared[1]["files"])

    @property
    def _prepared(self) -> tuple[Store, dict[str, Any]]:
        """A store that was prepared with the processor, and what it keeps of that."""
        found = ((store, StoreMedia(store).processor) for store in self._stores)
        return next((store, state) for store, state in found if state is not None)

    def with_media(self, longest: int) -> list[int]:
        """A short document of each kind of media that the stores hold, none above ``longest`` tokens."""
        found: dict[str, int] = {}
        for store, first in zip(self._stores, self._firsts.tolist(), strict=False):
            for kind, document in StoreMedia(store).shortest(longest).items():
                found.setdefault(kind, first + document)
        return sorted(set(found.values()))

    def first(self, longest: int, count: int) -> list[int]:
        """The first documents of 2 to ``longest`` tokens, at most ``count`` of each store."""
        found: list[int] = []
        for store, first in zip(self._stores, self._firsts.tolist(), strict=False):
            lengths = store.lengths.slice(0, min(len(store), _LOOKED_AT))
            fit = np.flatnonzero((lengths > 1) & (lengths <= longest))
            fit = fit[~are_removed(store.removed, fit)][:count]
            found += (first + fit).tolist()
        return found

    def misfit(self, model: Any, longest: int) -> str:
        """What the media of these stores are to a model that is not made for them, in words; empty where it is.

        Args:
            model: of transformers; its weights need not be there.
            longest: tokens of a row.
        """
        name, takes = type(model).__name__, inspect.signature(model.forward).parameters
        place = self._prepared[0].place
        numbers = self.with_media(longest)
        given = {feature for number in numbers for feature in self.batch([[number]])}
        if lacking := sorted(given - takes.keys() - {"labels"}):
            return (
                f"{name}, which takes no {', '.join(lacking)}, and that is what each {' or '.join(self.tokens)} of "
                f"{place} becomes: take the model whose processor the data was prepared with"
            )
        for kind, (token, number) in self.tokens.items():
            for setting in (f"{kind}_token_id", f"{kind}_token_index"):
                value = getattr(model.config, setting, None)
                if value is not None and value != number:
                    return (
                        f"{name}, whose config has {setting} {value}, and in {place} {token!r}, which is "
                        f"{number}, stands for each {kind}: it would not be found. Prepare the data with the model's "
                        "own processor and tokenizer, or correct the config"
                    )
        return ""

    def batch(self, rows: Sequence[Sequence[int]], seq_len: int = 0) -> Batch:
        """The documents of each row one behind the other, whole, as tensors.

        Args:
            rows: numbers of documents.
            seq_len: tokens of a row; 0 for those of the longest.

        Raises:
            MediumError: a medium cannot be read.
        """
        documents = np.array([number for row in rows for number in row], np.int64)
        lengths = self._lengths(documents)
        pointers = np.cumsum([0, *map(len, rows)])
        ends = np.cumsum(lengths)
        begins = ends - lengths
        sizes = np.diff(np.concatenate(([0], ends))[pointers])
        places = begins - np.repeat(begins[pointers[:-1]], np.diff(pointers))
        none = np.zeros_like(documents)
        built = Rows(pointers, none.astype(np.int32), documents, none, lengths, places)
        arrays = assemble_rows(self._reader, built, seq_len or int(sizes.max()), "aligned")
        cuts = BatchCuts(pointers, lengths, places, 1, "aligned", sliced=False)
        cuts = self._media.add_to(arrays, built, cuts, varlen=False)
        return Batch(to_torch(arrays), cuts=cuts)

    def _lengths(self, documents: Ids) -> Ids:
        owners = np.searchsorted(self._firsts, documents, side="right") - 1
        found = [
            int(self._stores[owner].lengths.take(np.array([document - self._firsts[owner]]))[0])
            for owner, document in zip(owners.tolist(), documents.tolist(), strict=True)
        ]
        return np.array(found, np.int64)
