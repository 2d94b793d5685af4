"""Exact duplicates in key files, compared with a dictionary, in any order."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import OutputError
from batchloom.preparation.dedup import (
    DUPLICATE,
    count_keys,
    count_partitions,
    duplicate_search,
    make_key_records,
    open_key_writer,
    read_unit_duplicates,
    search_duplicates,
    sorted_keys,
    write_keys,
)
from tiers import examples

MAX_HALF = 2**64 - 1
# Halves that collide: equal high ones with different low ones, and both ends of the range.
HASH_HALVES = st.sampled_from([0, 1, 2**63 - 1, 2**63, MAX_HALF - 1, MAX_HALF])
UNITS = st.lists(st.lists(st.tuples(HASH_HALVES, HASH_HALVES), max_size=12), max_size=6)


def write_key_files(folder, units):
    """Write a key file per unit of (low, high) halves, with three documents per part."""
    files = []
    for unit, hashes in enumerate(units):
        numbers = np.arange(len(hashes), dtype=np.uint32)
        halves = np.array(hashes, np.uint64).reshape(-1, 2)
        files.append(folder / f"{unit}.keys")
        write_keys(files[-1], halves, numbers, numbers // 3)
    return files


def find_in_memory(units, first_new):
    first_positions, rows = {}, []
    for unit, hashes in enumerate(units):
        for number, key in enumerate(hashes):
            first_position = first_positions.setdefault(key, (unit, number, number // 3))
            if first_position != (unit, number, number // 3) and unit >= first_new:
                rows.append((unit, number, number // 3, *first_position))
    return rows


def search_partitions(folder, files, partitions, first_new, order=None):
    out = [folder / f"{partition}.drops" for partition in range(partitions)]
    for partition in order or range(partitions):
        search_duplicates(files, (partition, partitions), first_new, out[partition])
    return out


@settings(max_examples=examples(60))
@given(UNITS, st.integers(1, 5), st.integers(0, 3), st.sampled_from([1, 3, 1 << 21]), st.data())
def test_duplicates_are_those_of_a_dictionary(tmp_path_factory, units, partitions, first_new, chunk_size, data):
    folder = tmp_path_factory.mktemp("keys")
    order = data.draw(st.permutations(range(partitions)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_keys, "RUN_KEYS", chunk_size)
        patch.setattr(duplicate_search, "_BATCH_KEYS", chunk_size)
        files = write_key_files(folder, units)
        drop_files = search_partitions(folder, files, partitions, first_new, order)
    rows = [row.tolist() for unit in range(len(units)) for row in read_unit_duplicates(drop_files, unit)]
    assert rows == find_in_memory(units, first_new)
    for path in drop_files:
        positions = [tuple(row.tolist()[:2]) for row in np.fromfile(path, DUPLICATE)]
        assert all(a < b for a, b in pairwise(positions))


def test_keys_of_one_high_half_are_different(tmp_path):
    units = [[(1, 7), (2, 7), (1, 7)], [(3, 7), (2, 7), (2, 8)]]
    drop_files = search_partitions(tmp_path, write_key_files(tmp_path, units), 3, 0)
    assert [row.tolist() for row in read_unit_duplicates(drop_files, 0)] == [(0, 2, 0, 0, 0, 0)]
    assert [row.tolist() for row in read_unit_duplicates(drop_files, 1)] == [(1, 1, 0, 0, 1, 0)]


def test_duplicates_are_read_by_document_ranges(tmp_path):
    drop_files = search_partitions(tmp_path, write_key_files(tmp_path, [[(1, 1)] * 10]), 2, 0)
    assert read_unit_duplicates(drop_files, 0, 3, 6)["number"].tolist() == [3, 4, 5]
    assert read_unit_duplicates(drop_files, 0, 0, 1)["number"].tolist() == []


def test_files_are_sorted_in_runs_and_the_same_however_they_are_given(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_keys, "RUN_KEYS", 8)
    hashes = np.random.default_rng(1).integers(0, 2**64, (21, 2), dtype=np.uint64)
    numbers = np.arange(21, dtype=np.uint32)
    write_keys(tmp_path / "at_once", hashes, numbers, numbers)
    with open_key_writer(tmp_path / "in_pieces") as add:
        for batch in np.split(make_key_records(hashes, numbers, numbers), [0, 3, 17]):
            add(batch)
    data = (tmp_path / "at_once").read_bytes()
    assert data == (tmp_path / "in_pieces").read_bytes()
    records = np.frombuffer(data, sorted_keys.KEY)
    for start in (0, 8, 16):
        high = records["high"][start : start + 8]
        assert (high[1:] >= high[:-1]).all()
    assert count_keys([tmp_path / "at_once"]) == 21


def test_the_number_of_partitions_is_arithmetic():
    assert [count_partitions(keys) for keys in (0, 1, 1 << 21, (1 << 21) + 1, 10**9)] == [
        *(1, 1, 1, 2),
        477,
    ]


def test_a_failed_file_is_removed(tmp_path):
    with pytest.raises(AssertionError, match="decrease"), open_key_writer(tmp_path / "keys") as add:
        add(make_key_records(np.zeros((2, 2), np.uint64), np.array([1, 0]), np.array([0, 0])))
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_or_missing_file_is_reported(tmp_path):
    (file,) = write_key_files(tmp_path, [[(1, 1)]])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OutputError, match="has 23 bytes, which is not a multiple of 24: it was truncated"):
        search_duplicates([file], (0, 1), 0, tmp_path / "drops")
    file.unlink()
    with pytest.raises(OutputError, match="Cannot use .*0.keys"):
        search_duplicates([file], (0, 1), 0, tmp_path / "drops")
    assert list(tmp_path.iterdir()) == []
