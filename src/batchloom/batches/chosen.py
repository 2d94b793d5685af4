"""Whole documents of a loader's stores in rows of one's own: to see how a model takes them and their media."""

import inspect
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, final

import numpy as np

from batchloom.batches.assemble import Batch, BatchCuts, Ids, assemble_rows
from batchloom.batches.device import to_torch
from batchloom.batches.loader import Loader
from batchloom.batches.media_stores import media_of_stores
from batchloom.batches.shelf import Shelf
from batchloom.plan.rows import Rows
from batchloom.store.reader import Store
from batchloom.store.removed import are_removed
from batchloom.store.stored_media import StoreMedia

_LOOKED_AT = 1 << 20
# Tokens of a document that is short enough to look at beside others.
_SHORT = 256


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
        self._media = media_of_stores(self._stores, loader.spec.media)
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

    def few(self, longest: int) -> list[int]:
        """Two to four documents to try a model on: with media and without, together at most twice ``longest`` tokens.

        The same one may stand there twice.
        """
        seen = self.with_media(longest)
        short = max([_SHORT, *self._lengths(seen).tolist()])
        found = [*seen, *self._first(min(short, longest))] or self._first(longest)
        numbers: list[int] = []
        room = longest
        for number, length in zip(found, self._lengths(found).tolist(), strict=True):
            if number not in numbers and (length <= room or not numbers):
                numbers.append(number)
                room -= length
        return numbers if len(numbers) > 1 else numbers * 2

    def _first(self, longest: int) -> list[int]:
        """The first two documents of each store that have 2 to ``longest`` tokens."""
        return [
            number
            for store, first in zip(self._stores, self._firsts.tolist(), strict=False)
            for number in islice(_short_documents(store, first, longest), 2)
        ]

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
        listed = [number for row in rows for number in row]
        documents, lengths = np.array(listed, np.int64), self._lengths(listed)
        pointers = np.cumsum([0, *map(len, rows)])
        ends = np.cumsum(lengths)
        begins = ends - lengths
        sizes = np.diff(np.concatenate(([0], ends))[pointers])
        places = begins - np.repeat(begins[pointers[:-1]], np.diff(pointers))
        none = np.zeros_like(documents)
        built = Rows(pointers, none.astype(np.int32), documents, none, lengths, places)
        arrays = assemble_rows(self._reader, built, seq_len or int(sizes.max()), "aligned")
        cuts = BatchCuts(pointers, lengths, places, 1, "aligned", sliced=False)
        cuts = self._media.add_to(arrays, self._reader, built, cuts, varlen=False)
        return Batch(to_torch(arrays), cuts=cuts)

    def _lengths(self, documents: Sequence[int]) -> Ids:
        owners = np.searchsorted(self._firsts, documents, side="right") - 1
        found = [
            int(self._stores[owner].lengths.take(np.array([document - self._firsts[owner]]))[0])
            for owner, document in zip(owners.tolist(), documents, strict=True)
        ]
        return np.array(found, np.int64)


def _short_documents(store: Store, first: int, longest: int) -> Iterator[int]:
    """Documents of 2 to ``longest`` tokens, numbered from ``first`` on."""
    for start in range(0, len(store), _LOOKED_AT):
        lengths = store.lengths.slice(start, min(len(store), start + _LOOKED_AT))
        fit = start + np.flatnonzero((lengths > 1) & (lengths <= longest))
        yield from (first + fit[~are_removed(store.removed, fit)]).tolist()
