import numpy as np
import pytest

from batchloom.preparation.dedup import DuplicateCounter, duplicate_count as duplicates


@pytest.mark.parametrize("held", [1 << 21, 100])
def test_repeated_documents_are_counted_exactly_in_memory_and_in_files(held, monkeypatch, tmp_path):
    monkeypatch.setattr(duplicates, "_MAX_BUFFERED", held)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    numbers = np.random.default_rng(0).integers(0, 1 << 64, (500, 2), np.uint64, endpoint=False)
    numbers[100:150, 0] = numbers[0, 0]
    numbers[150:200, 1] = numbers[0, 1]
    with DuplicateCounter() as counting:
        for piece in np.array_split(numbers[np.r_[0:500, 0:70, 0:1, 499:500]], 13):
            counting.add(piece)
        assert (counting.documents, counting.count_repeated()) == (572, 72)
    with DuplicateCounter() as counting:
        assert counting.count_repeated() == 0
