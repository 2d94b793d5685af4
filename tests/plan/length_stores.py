"""Stores of document lengths for tests of plans, without files."""

import numpy as np


class ArrayLengths:
    def __init__(self, lengths):
        self._lengths = np.asarray(lengths, np.uint32)

    @property
    def size(self):
        return self._lengths.size

    def take(self, documents):
        return self._lengths[documents]


class LengthStore:
    """The part of a store that a plan needs: lengths and a fingerprint."""

    def __init__(self, lengths, fingerprint="f"):
        self.lengths, self.fingerprint = ArrayLengths(lengths), fingerprint
        self.tokens = int(np.sum(lengths))
