"""Lengths of documents are read as they were written, also with page prefetching."""

import numpy as np
import pytest

from batchloom.store import StoreLengths, map_file

DOCUMENTS = (1 << 22) + 777


@pytest.fixture(scope="module")
def lengths_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.u32"
    values = np.arange(DOCUMENTS, dtype=np.uint32) * np.uint32(2654435761)
    values.tofile(path)
    return path, values


def map_lengths(path):
    return np.frombuffer(map_file(path), "<u4")


def test_lengths_of_a_large_store_are_read_page_by_page(lengths_file):
    path, values = lengths_file
    lengths = StoreLengths(map_lengths(path))
    numbers = np.random.default_rng(1).integers(0, DOCUMENTS, 3000)
    numbers[:2] = (0, DOCUMENTS - 1)
    assert (lengths.take(numbers) == values[numbers]).all()
    everything = np.arange(DOCUMENTS)
    assert (lengths.take(everything) == values).all()


def test_lengths_of_generations_come_from_the_file_of_each(lengths_file):
    path, values = lengths_file
    appended = np.arange(5000, dtype=np.uint32)
    lengths = StoreLengths(map_lengths(path), appended)
    numbers = np.concatenate([np.arange(0, DOCUMENTS, 3001), DOCUMENTS + np.arange(0, 5000, 2)])
    assert (lengths.take(numbers) == np.concatenate([values, appended])[numbers]).all()
