"""Connected components of links on disk, compared with a union-find in memory."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.preparation.dedup import (
    find_components,
    near_duplicates,
    read_unit_duplicates,
)
from batchloom.preparation.dedup.duplicate_search import make_duplicate_rows
from batchloom.preparation.dedup.near_duplicates import find_kept_documents
from tiers import examples

UNIT_DOCUMENTS = 4
DOCUMENTS = [(number // UNIT_DOCUMENTS) << 32 | number % UNIT_DOCUMENTS for number in range(24)]


def get_part(position):
    return (position & 0xFFFFFFFF) // 3 + 10


def write_links(folder, links, files=1):
    """Write links (later, earlier) in the search's format, dealt to several files."""
    paths = []
    for number in range(files):
        links_of_file = np.array(links[number::files], np.uint64).reshape(-1, 2)
        later, earlier = links_of_file[:, 0], links_of_file[:, 1]
        paths.append(folder / f"{number}.links")
        paths[-1].write_bytes(make_duplicate_rows(later, get_part(later), earlier, get_part(earlier)).tobytes())
    return paths


def group_in_memory(links, first_new=0):
    parent = {}

    def find_root(position):
        while parent.setdefault(position, position) != position:
            position = parent[position]
        return position

    for later, earlier in links:
        low, high = sorted((find_root(later), find_root(earlier)))
        parent[high] = low
    rows = [(position, find_root(position)) for position in sorted(parent)]
    return [
        (position >> 32, position & 0xFFFFFFFF, get_part(position), first >> 32, first & 0xFFFFFFFF, get_part(first))
        for position, first in rows
        if position != first and position >> 32 >= first_new
    ]


def find_groups(folder, paths, first_new=0):
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
def test_groups_are_those_of_a_union_find(tmp_path_factory, links, files, first_new, chunk_size):
    folder = tmp_path_factory.mktemp("links")
    links = [sorted(link, reverse=True) for link in links]
    paths = write_links(folder, links, files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "_PARTITION_DOCUMENTS", chunk_size)
        patch.setattr(near_duplicates, "_CHUNK", max(2, chunk_size // 2))
        rows, files = find_groups(folder, paths, first_new)
    assert rows == group_in_memory(links, first_new)
    first_documents = {row[0] << 32 | row[1]: row[3] << 32 | row[4] for row in rows}
    kept = find_kept_documents(files, np.array(DOCUMENTS, np.uint64))
    assert kept.tolist() == [first_documents.get(document, document) for document in DOCUMENTS]


@pytest.mark.parametrize("shape", ["chain", "star", "binary tree"])
def test_long_and_wide_groups_end_at_their_first(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(near_duplicates, "_PARTITION_DOCUMENTS", 30)
    monkeypatch.setattr(near_duplicates, "_CHUNK", 20)
    count = 300
    permutation = np.random.default_rng(2).permutation(count).tolist()
    links = {
        "chain": list(pairwise(permutation)),
        "star": [(permutation[0], permutation[index]) for index in range(1, count)],
        "binary tree": [(permutation[index], permutation[(index - 1) // 2]) for index in range(1, count)],
    }[shape]
    links = [sorted(link, reverse=True) for link in links]
    rows, files = find_groups(tmp_path, write_links(tmp_path, links))
    assert len(files) == 10
    assert rows == [(0, n, get_part(n), 0, 0, get_part(0)) for n in range(1, count)]


def test_the_bytes_do_not_depend_on_the_order_of_links(tmp_path):
    links = [(9, 4), (9, 2), (4, 1), (8, 7)]
    contents = []
    for name, ordered_links in (("a", links), ("b", links[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        _, files = find_groups(folder, write_links(folder, ordered_links, 2))
        contents.append([path.read_bytes() for path in files])
    assert contents[0] == contents[1]


def test_no_links_are_no_drops(tmp_path):
    rows, files = find_groups(tmp_path, [])
    assert rows == []
    assert [path.name for path in files] == ["near_00000.drops"]
