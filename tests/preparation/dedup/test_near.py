"""Near duplicates from token ids to drops: against the same in memory, and on a planted corpus."""

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
    connected_components as grouping,
    count_partitions,
    find_components,
    map_signatures,
    near_duplicates as nearing,
    read_unit_duplicates,
    search_duplicates,
    write_keys,
    write_signature_keys,
)
from tiers import examples


def keys_of(documents, bands, rows, shingle):
    flat = np.array([token for document in documents for token in document], np.uint16)
    lengths = np.array([len(document) for document in documents], np.uint32)
    return compute_signatures(flat, lengths, bands=bands, rows=rows, shingle=shingle)


def dropped(folder, units, *, bands, rows, shingle, partitions=1, first_new=0):
    """The whole way on disk: (exact drops, near drops), as lists of rows."""
    exact_keys, near_keys = [], []
    for unit, documents in enumerate(units):
        exact_keys.append(folder / f"{unit}.keys")
        numbers = np.arange(len(documents), dtype=np.uint32)
        hashes = np.array([(hash(document), 0) for document in documents], np.int64).reshape(-1, 2)
        write_keys(exact_keys[-1], hashes.view(np.uint64), numbers, numbers * 0)
        keys_of(documents, bands, rows, shingle).tofile(folder / f"{unit}.bands")
    exact = []
    for partition in range(partitions):
        exact.append(folder / f"{partition}.exact")
        search_duplicates(exact_keys, (partition, partitions), first_new, exact[-1])
    links = []
    for unit, documents in enumerate(units):
        near_keys.append(folder / f"{unit}.band_keys")
        mapped = map_signatures(folder / f"{unit}.bands", bands)
        parts = np.full(len(documents), unit, np.uint32)
        write_signature_keys(near_keys[-1], mapped, parts, exact, unit)
    for partition in range(partitions):
        links.append(folder / f"{partition}.links")
        search_duplicates(near_keys, (partition, partitions), first_new, links[-1], SIGNATURE_KEY)
    near = find_components(links, folder / "scratch", folder, first_new)
    return tuple(
        [row.tolist() for unit in range(len(units)) for row in read_unit_duplicates(files, unit)]
        for files in (exact, near)
    )


def in_memory(units, *, bands, rows, shingle):
    """The same by comparing every two documents: {(unit, number): what stays}."""
    places = [(unit, number) for unit, documents in enumerate(units) for number in range(len(documents))]
    keys = {
        place: key
        for unit, documents in enumerate(units)
        for place, key in zip(
            [p for p in places if p[0] == unit],
            keys_of(documents, bands, rows, shingle).tolist(),
            strict=True,
        )
    }
    seen, exact = {}, set()
    for unit, number in places:
        if seen.setdefault(units[unit][number], (unit, number)) != (unit, number):
            exact.add((unit, number))
    group = {place: place for place in places}
    for one, other in combinations([p for p in places if p not in exact], 2):
        if units[one[0]][one[1]] and any(a == b for a, b in zip(keys[one], keys[other], strict=True) if a):
            low, high = sorted((group[one], group[other]))
            group = {place: low if g == high else g for place, g in group.items()}
    return {place: first for place, first in group.items() if place != first}


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
def test_what_goes_is_what_comparing_every_pair_says(tmp_path_factory, units, bands, rows, shingle, partitions, small):
    settings_ = {"bands": bands, "rows": rows, "shingle": shingle}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (grouping, "_PARTITION_DOCUMENTS"),
            (grouping, "_CHUNK"),
            (nearing, "_CHUNK_KEYS"),
        ):
            patch.setattr(module, name, small)
        folder = tmp_path_factory.mktemp("near")
        _, near = dropped(folder, units, partitions=partitions, **settings_)
    found = {row[:2]: row[3:5] for row in map(tuple, near)}
    assert found == in_memory(units, **settings_)
    assert all(row[2] == row[0] and row[5] == row[3] for row in near)


def edited(document, share, draw):
    """A copy in which one stretch was rewritten, so that its shingles are alike to about ``share``."""
    shingles = len(document) - 4
    new = max(1, round(shingles * (1 - share) / (1 + share)) - 4)
    start = int(draw.integers(0, len(document) - new))
    copy = document.copy()
    copy[start : start + new] = draw.integers(0, 50_000, new)
    return copy


def jaccard(one, other):
    first, second = (
        {tuple(document[start : start + 5].tolist()) for start in range(len(document) - 4)} for document in (one, other)
    )
    return len(first & second) / len(first | second)


def test_planted_near_duplicates_are_found_and_nothing_else(tmp_path):
    draw = np.random.default_rng(5)
    originals = [draw.integers(0, 50_000, int(draw.integers(300, 800))) for _ in range(600)]
    units = [originals, []]
    planted = {}
    for share in (0.3, 0.5, 0.9, 0.97):
        for number in draw.permutation(len(originals))[:100].tolist():
            copy = edited(originals[number], share, draw)
            assert abs(jaccard(originals[number], copy) - share) < 0.02
            planted[len(units[1])] = (share, number)
            units[1].append(copy)
    units = [[tuple(document.tolist()) for document in documents] for documents in units]
    exact, near = dropped(tmp_path, units, bands=14, rows=8, shingle=5, partitions=3)
    assert exact == []
    assert all(row[0] == 1 and row[3] == 0 for row in near)
    found = {row[1]: row[4] for row in near}
    assert all(planted[copy][1] == first for copy, first in found.items())
    recall = {
        share: np.mean([copy in found for copy, planted_as in planted.items() if planted_as[0] == share])
        for share in (0.3, 0.5, 0.9, 0.97)
    }
    assert recall[0.97] == 1
    assert recall[0.9] >= 0.98
    assert recall[0.5] <= 0.15
    assert recall[0.3] == 0


def test_older_generations_stay_and_newer_ones_go_for_them(tmp_path):
    draw = np.random.default_rng(6)
    base = draw.integers(0, 50_000, 400)
    near = [tuple(edited(base, 0.97, draw).tolist()) for _ in range(4)]
    units = [near[:2], [near[2]], [near[3], tuple(draw.integers(0, 50_000, 300).tolist())]]
    _, rows = dropped(tmp_path, units, bands=14, rows=8, shingle=5, first_new=2)
    assert rows == [(2, 0, 2, 0, 0, 0)]


def test_exact_duplicates_take_no_part(tmp_path):
    document = tuple(range(50))
    exact, near = dropped(tmp_path, [[document], [document, document]], bands=3, rows=2, shingle=5)
    assert [row[:2] for row in exact] == [(1, 0), (1, 1)]
    assert near == []


def test_bands_that_were_cut_are_told(tmp_path):
    np.ones((3, 4), np.uint64).tofile(tmp_path / "bands")
    assert map_signatures(tmp_path / "bands", 4).tolist() == [[1] * 4] * 3
    with pytest.raises(OutputError, match="96 bytes, which is not a multiple of 40 for 5 bands per document"):
        map_signatures(tmp_path / "bands", 5)


def test_keys_of_bands_have_partitions_too():
    assert count_partitions(14 * 10**6) == 7


def test_mapped_memory_is_let_go_and_comes_back(tmp_path):
    def resident():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    path = tmp_path / "bands"
    np.ones((1 << 20, 8), np.uint64).tofile(path)
    bands = map_signatures(path, 8)
    assert bands.sum() == bands.size
    before = resident()
    release_pages(bands[:10])
    assert before - resident() > bands.nbytes // 2
    assert bands.sum() == bands.size
