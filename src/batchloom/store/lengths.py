"""The lengths of the documents of a subset."""

from typing import final

import numpy as np
from numpy.typing import NDArray


@final
class StoreLengths:
    """The lengths of a subset's documents, one aligned array, mapped where it is a file."""

    __slots__ = ("_array",)

    def __init__(self, array: NDArray[np.uint32]) -> None:
        self._array = array

    @property
    def size(self) -> int:
        """Number of documents."""
        return int(self._array.size)

    def take(self, documents: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Lengths of these documents in tokens, uint32 of the same length."""
        return self._array[documents]

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Lengths of documents ``start`` to ``stop - 1``, as a view."""
        return self._array[start:stop]
