"""A document of an open store."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchloom.store.format import Origin

if TYPE_CHECKING:
    from batchloom.store.read.store_reader import Store


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of a store: its number, its ids (in the store's dtype) and the store."""

    number: int
    ids: NDArray[np.generic]
    _store: "Store" = field(repr=False)

    @property
    def text(self) -> str:
        """The decoded text, control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether each token is trained, bool [tokens]."""
        if not self._store.masked:
            return np.ones(len(self.ids), bool)
        whole = (np.array([self.number]), np.zeros(1, np.int64), np.array([len(self.ids)]))
        return self._store.mask(*whole)[0]

    @property
    def trained_text(self) -> str:
        """The decoded text of the trained tokens, control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids[self.mask])

    @property
    def provenance(self) -> Origin:
        """Where the document came from."""
        return self._store.origin(self.number)
