"""Lengths of documents: what is taken is what was written, also where pages are read ahead."""

import numpy as np
import pytest

from batchloom.store import StoreLengths, map_file

DOCUMENTS = (1 << 22) + 777


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.u32"
    values = np.arange(DOCUMENTS, dtype=np.uint32) * np.uint32(2654435761)
    values.tofile(path)
    return path, values


def mapped(path):
    return np.frombuffer(map_file(path), "<u4")


def test_lengths_of_a_large_store_are_read_page_by_page(written):
    path, values = written
    lengths = StoreLengths(mapped(path))
    numbers = np.random.default_rng(1).integers(0, DOCUMENTS, 3000)
    numbers[:2] = (0, DOCUMENTS - 1)
    assert (lengths.take(numbers) == values[numbers]).all()
    everything = np.arange(DOCUMENTS)
    assert (lengths.take(everything) == values).all()


def test_lengths_of_generations_are_taken_from_the_file_of_each(written):
    path, values = written
    more = np.arange(5000, dtype=np.uint32)
    lengths = StoreLengths(mapped(path), more)
    numbers = np.concatenate([np.arange(0, DOCUMENTS, 3001), DOCUMENTS + np.arange(0, 5000, 2)])
    assert (lengths.take(numbers) == np.concatenate([values, more])[numbers]).all()
