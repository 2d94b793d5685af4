"""Groups that hang together by links on disk, against a union-find in memory."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.preparation.dedup import (
    connected_components as grouping,
    find_components,
    read_unit_duplicates,
)
from batchloom.preparation.dedup.duplicate_search import make_duplicate_rows
from tiers import examples

UNIT = 4
DOCUMENTS = [(number // UNIT) << 32 | number % UNIT for number in range(24)]


def part_of(place):
    return (place & 0xFFFFFFFF) // 3 + 10


def written(folder, links, files=1):
    """Links (later, earlier) in the form of what is found, dealt to files."""
    paths = []
    for number in range(files):
        mine = np.array(links[number::files], np.uint64).reshape(-1, 2)
        later, first = mine[:, 0], mine[:, 1]
        paths.append(folder / f"{number}.links")
        paths[-1].write_bytes(make_duplicate_rows(later, part_of(later), first, part_of(first)).tobytes())
    return paths


def by_union_find(links, first_new=0):
    parent = {}

    def root(place):
        while parent.setdefault(place, place) != place:
            place = parent[place]
        return place

    for one, other in links:
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    rows = [(place, root(place)) for place in sorted(parent)]
    return [
        (a >> 32, a & 0xFFFFFFFF, part_of(a), b >> 32, b & 0xFFFFFFFF, part_of(b))
        for a, b in rows
        if a != b and a >> 32 >= first_new
    ]


def grouped(folder, paths, first_new=0):
    out = folder / "out"
    out.mkdir(exist_ok=True)
    files = find_components(paths, folder / "scratch", out, first_new)
    assert not (folder / "scratch").exists()
    return [row.tolist() for unit in range(8) for row in read_unit_duplicates(files, unit)], files


@settings(max_examples=examples(60))
@given(
    st.lists(st.lists(st.sampled_from(DOCUMENTS), min_size=2, max_size=2, unique=True), max_size=30),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([1, 2, 5, 1 << 20]),
)
def test_groups_are_those_of_a_union_find(tmp_path_factory, links, files, first_new, small):
    folder = tmp_path_factory.mktemp("links")
    links = [sorted(link, reverse=True) for link in links]
    paths = written(folder, links, files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "_PARTITION_DOCUMENTS", small)
        patch.setattr(grouping, "_CHUNK", max(2, small // 2))
        rows, _ = grouped(folder, paths, first_new)
    assert rows == by_union_find(links, first_new)


@pytest.mark.parametrize("shape", ["chain", "star", "binary tree"])
def test_long_and_wide_groups_end_at_their_first(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(grouping, "_PARTITION_DOCUMENTS", 100)
    monkeypatch.setattr(grouping, "_CHUNK", 64)
    count = 1000
    order = np.random.default_rng(2).permutation(count).tolist()
    links = {
        "chain": list(pairwise(order)),
        "star": [(order[0], order[place]) for place in range(1, count)],
        "binary tree": [(order[place], order[(place - 1) // 2]) for place in range(1, count)],
    }[shape]
    links = [sorted(link, reverse=True) for link in links]
    rows, files = grouped(tmp_path, written(tmp_path, links))
    assert len(files) == 10
    assert rows == [(0, n, part_of(n), 0, 0, part_of(0)) for n in range(1, count)]


def test_the_bytes_do_not_depend_on_the_order_of_links(tmp_path):
    links = [(9, 4), (9, 2), (4, 1), (8, 7)]
    written_as = []
    for name, given_as in (("a", links), ("b", links[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        _, files = grouped(folder, written(folder, given_as, 2))
        written_as.append([path.read_bytes() for path in files])
    assert written_as[0] == written_as[1]


def test_no_links_are_no_drops(tmp_path):
    rows, files = grouped(tmp_path, [])
    assert rows == []
    assert [path.name for path in files] == ["near_00000.drops"]
