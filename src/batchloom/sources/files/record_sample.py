"""Samples of inputs: the first records, or randomly chosen ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchloom.core.document import Records

_SEED = 42
_MAX_DRAWN_SEED = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class RecordSample:
    """Records of a source that are read, out of those of its input.

    Attributes:
        count: number of records of the input that are read.
        total: number of records of the input, of which random ones are read; None to read the first ones.
        before: number of records of the input in earlier sources.
    """

    count: int
    total: int | None = None
    before: int = 0

    def choose(self) -> frozenset[int] | range:
        """Return the numbers of the chosen records, counted in the source."""
        if self.total is None:
            return range(max(0, self.count - self.before))
        return frozenset((choose_random_records(self.total, self.count) - self.before).tolist())

    def filter_batches(self, batches: Iterator[Records]) -> Iterator[Records]:
        """Yield batches with the chosen records only, up to the last one."""
        chosen = self.choose()
        stop, records_before = max(chosen, default=-1) + 1, 0
        while records_before < stop and (batch := next(batches, None)) is not None:
            numbers = sorted((*batch.records, *(bad.record for bad in batch.bad)))
            kept = {number for n, number in enumerate(numbers, records_before) if n in chosen}
            records_before += len(numbers)
            batch.unsampled = len(numbers) - len(kept)
            batch.select([position for position, number in enumerate(batch.records) if number in kept])
            batch.bad = [bad for bad in batch.bad if bad.record in kept]
            yield batch


def choose_random_records(total: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return ``count`` of ``total`` record numbers, in random order.

    These are the numbers that ms-swift chooses for the first data set of a job, ``NAME#count``: it draws one seed from
    ``RandomState(42)`` and then a permutation.
    """
    state = np.random.RandomState(_SEED)
    state.randint(0, _MAX_DRAWN_SEED)
    return state.permutation(total)[:count].astype(np.int64)
