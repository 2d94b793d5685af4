"""A document of an open store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchloom.store.origins import Origin

if TYPE_CHECKING:
    from batchloom.store.reader import Store


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of a store: its number, its ids (in the store's dtype) and the store."""

    number: int
    ids: NDArray[np.generic]
    _store: "Store"

    @property
    def text(self) -> str:
        """The decoded text, control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids)

    @property
    def origin(self) -> Origin:
        """Where the document came from."""
        return self._store.origin(self.number)
