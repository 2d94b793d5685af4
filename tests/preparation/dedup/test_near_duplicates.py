"""Near duplicates, compared with a search in memory, and in a planted corpus."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import OutputError
from batchloom.core.files import release_pages
from batchloom.preparation.dedup import (
    SIGNATURE_KEY,
    compute_signatures,
    count_partitions,
    find_components,
    map_signatures,
    near_duplicates,
    read_unit_duplicates,
    search_duplicates,
    write_keys,
    write_signature_keys,
)
from tiers import examples


def compute_keys(documents, bands, rows, shingle):
    tokens = np.array([token for document in documents for token in document], np.uint16)
    lengths = np.array([len(document) for document in documents], np.uint32)
    return compute_signatures(tokens, lengths, bands=bands, rows=rows, shingle=shingle)


def find_duplicates(folder, units, *, bands, rows, shingle, partitions=1, first_new=0):
    """Find duplicates with files: (exact rows, near rows)."""
    exact_keys, near_keys = [], []
    for unit, documents in enumerate(units):
        exact_keys.append(folder / f"{unit}.keys")
        numbers = np.arange(len(documents), dtype=np.uint32)
        hashes = np.array([(hash(document), 0) for document in documents], np.int64).reshape(-1, 2)
        write_keys(exact_keys[-1], hashes.view(np.uint64), numbers, numbers * 0)
        compute_keys(documents, bands, rows, shingle).tofile(folder / f"{unit}.bands")
    exact_files = []
    for partition in range(partitions):
        exact_files.append(folder / f"{partition}.exact")
        search_duplicates(exact_keys, (partition, partitions), first_new, exact_files[-1])
    links = []
    for unit, documents in enumerate(units):
        near_keys.append(folder / f"{unit}.band_keys")
        signatures = map_signatures(folder / f"{unit}.bands", bands)
        parts = np.full(len(documents), unit, np.uint32)
        write_signature_keys(near_keys[-1], signatures, parts, exact_files, unit)
    for partition in range(partitions):
        links.append(folder / f"{partition}.links")
        search_duplicates(near_keys, (partition, partitions), first_new, links[-1], SIGNATURE_KEY)
    near_rows = find_components(links, folder / "scratch", folder, first_new)
    return tuple(
        [row.tolist() for unit in range(len(units)) for row in read_unit_duplicates(files, unit)]
        for files in (exact_files, near_rows)
    )


def find_in_memory(units, *, bands, rows, shingle):
    """Compare every two documents; return {(unit, number): remaining document}."""
    positions = [(unit, number) for unit, documents in enumerate(units) for number in range(len(documents))]
    keys = {
        position: key
        for unit, documents in enumerate(units)
        for position, key in zip(
            [position for position in positions if position[0] == unit],
            compute_keys(documents, bands, rows, shingle).tolist(),
            strict=True,
        )
    }
    first_positions, exact_duplicates = {}, set()
    for unit, number in positions:
        if first_positions.setdefault(units[unit][number], (unit, number)) != (unit, number):
            exact_duplicates.add((unit, number))
    first_by_position = {position: position for position in positions}
    for position_a, position_b in combinations(
        [position for position in positions if position not in exact_duplicates], 2
    ):
        if units[position_a[0]][position_a[1]] and any(
            key_a == key_b for key_a, key_b in zip(keys[position_a], keys[position_b], strict=True) if key_a
        ):
            low, high = sorted((first_by_position[position_a], first_by_position[position_b]))
            first_by_position = {
                position: low if group_first == high else group_first
                for position, group_first in first_by_position.items()
            }
    return {position: first for position, first in first_by_position.items() if position != first}


DOCUMENT = st.lists(st.integers(0, 3), max_size=6).map(tuple)


@settings(max_examples=examples(40))
@given(
    st.lists(st.lists(DOCUMENT, max_size=8), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([2, 1 << 20]),
)
def test_near_duplicates_are_those_of_comparing_every_pair(
    tmp_path_factory, units, bands, rows, shingle, partitions, chunk_size
):
    banding = {"bands": bands, "rows": rows, "shingle": shingle}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (near_duplicates, "_PARTITION_DOCUMENTS"),
            (near_duplicates, "_CHUNK"),
            (near_duplicates, "_CHUNK_KEYS"),
        ):
            patch.setattr(module, name, chunk_size)
        folder = tmp_path_factory.mktemp("near")
        _, near_rows = find_duplicates(folder, units, partitions=partitions, **banding)
    near_by_position = {row[:2]: row[3:5] for row in map(tuple, near_rows)}
    assert near_by_position == find_in_memory(units, **banding)
    assert all(row[2] == row[0] and row[5] == row[3] for row in near_rows)


def rewrite_tokens(document, similarity, rng):
    """Copy a document with one range rewritten, to about this shingle similarity."""
    shingles = len(document) - 4
    new_tokens = max(1, round(shingles * (1 - similarity) / (1 + similarity)) - 4)
    start = int(rng.integers(0, len(document) - new_tokens))
    copy = document.copy()
    copy[start : start + new_tokens] = rng.integers(0, 50_000, new_tokens)
    return copy


def jaccard(first, second):
    first_shingles, second_shingles = (
        {tuple(document[start : start + 5].tolist()) for start in range(len(document) - 4)}
        for document in (first, second)
    )
    return len(first_shingles & second_shingles) / len(first_shingles | second_shingles)


def test_planted_near_duplicates_are_found_and_nothing_else(tmp_path):
    rng = np.random.default_rng(5)
    originals = [rng.integers(0, 50_000, int(rng.integers(300, 800))) for _ in range(150)]
    units = [originals, []]
    planted = {}
    for similarity in (0.3, 0.5, 0.9, 0.97):
        for number in rng.permutation(len(originals))[:40].tolist():
            copy = rewrite_tokens(originals[number], similarity, rng)
            assert abs(jaccard(originals[number], copy) - similarity) < 0.02
            planted[len(units[1])] = (similarity, number)
            units[1].append(copy)
    units = [[tuple(document.tolist()) for document in documents] for documents in units]
    exact_rows, near_rows = find_duplicates(tmp_path, units, bands=14, rows=8, shingle=5, partitions=3)
    assert exact_rows == []
    assert all(row[0] == 1 and row[3] == 0 for row in near_rows)
    found_duplicates = {row[1]: row[4] for row in near_rows}
    assert all(planted[copy][1] == first for copy, first in found_duplicates.items())
    recall = {
        similarity: np.mean(
            [copy in found_duplicates for copy, planted_copy in planted.items() if planted_copy[0] == similarity]
        )
        for similarity in (0.3, 0.5, 0.9, 0.97)
    }
    assert recall[0.97] == 1
    assert recall[0.9] >= 0.98
    assert recall[0.5] <= 0.15
    assert recall[0.3] == 0


def test_older_generations_stay_and_newer_ones_go_for_them(tmp_path):
    rng = np.random.default_rng(6)
    base = rng.integers(0, 50_000, 400)
    near_documents = [tuple(rewrite_tokens(base, 0.97, rng).tolist()) for _ in range(4)]
    units = [near_documents[:2], [near_documents[2]], [near_documents[3], tuple(rng.integers(0, 50_000, 300).tolist())]]
    _, rows = find_duplicates(tmp_path, units, bands=14, rows=8, shingle=5, first_new=2)
    assert rows == [(2, 0, 2, 0, 0, 0)]


def test_exact_duplicates_take_no_part(tmp_path):
    document = tuple(range(50))
    exact_rows, near_rows = find_duplicates(tmp_path, [[document], [document, document]], bands=3, rows=2, shingle=5)
    assert [row[:2] for row in exact_rows] == [(1, 0), (1, 1)]
    assert near_rows == []


def test_truncated_signature_files_are_reported(tmp_path):
    np.ones((3, 4), np.uint64).tofile(tmp_path / "bands")
    assert map_signatures(tmp_path / "bands", 4).tolist() == [[1] * 4] * 3
    with pytest.raises(OutputError, match="96 bytes, which is not a multiple of 40 for 5 bands per document"):
        map_signatures(tmp_path / "bands", 5)


def test_signature_keys_have_partitions():
    assert count_partitions(14 * 10**6) == 7


def test_mapped_memory_is_released_and_read_again(tmp_path):
    def measure_resident_memory():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    path = tmp_path / "bands"
    np.ones((1 << 18, 8), np.uint64).tofile(path)
    signatures = map_signatures(path, 8)
    assert signatures.sum() == signatures.size
    before = measure_resident_memory()
    release_pages(signatures[:10])
    assert before - measure_resident_memory() > signatures.nbytes // 2
    assert signatures.sum() == signatures.size
