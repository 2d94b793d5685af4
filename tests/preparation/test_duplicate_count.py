import numpy as np
import pytest

from batchloom.preparation.dedup import DuplicateCounter, duplicate_search


@pytest.mark.parametrize("max_buffered", [1 << 21, 100])
def test_repeated_documents_are_counted_exactly_in_memory_and_in_files(max_buffered, monkeypatch, tmp_path):
    monkeypatch.setattr(duplicate_search, "_MAX_BUFFERED", max_buffered)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    hashes = np.random.default_rng(0).integers(0, 1 << 64, (500, 2), np.uint64, endpoint=False)
    hashes[100:150, 0] = hashes[0, 0]
    hashes[150:200, 1] = hashes[0, 1]
    with DuplicateCounter() as counter:
        for batch in np.array_split(hashes[np.r_[0:500, 0:70, 0:1, 499:500]], 13):
            counter.add(batch)
        assert (counter.documents, counter.count_repeated()) == (572, 72)
    with DuplicateCounter() as counter:
        assert counter.count_repeated() == 0
