"""What hangs together by links, in bounded memory: the first of each group stays.

Links are spilled by the hash of a document into partitions, and rewritten partition by partition
until every document is linked to the first of its group: the alternating large-star and small-star
of Kiveris, Lattanzi, Mirrokni, Rastogi, Vassilvitskii (Connected Components in MapReduce and
Beyond, SoCC 2014). The number of links never grows; memory holds the documents of one partition
and one chunk of links, however many of them one document has. The result is a function of the
links alone.

A document is the unit above its number, u64; a pair is two of them, u64 [2].
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.keyed_hashing import mix_in_place
from batchloom.preparation.dedup.duplicate_search import DUPLICATE, make_duplicate_rows
from batchloom.preparation.dedup.key_files import (
    count_records,
    describe_io_errors,
    map_records,
    write_key_file,
)

# Links of a partition, and pairs of a chunk that is in memory at once: links both ways, with room.
_PARTITION_DOCUMENTS = 1 << 20
_CHUNK = 1 << 22
_U32 = np.uint64(32)
_PAIR = np.dtype([("one", "<u8"), ("other", "<u8")])

_DocumentIds = NDArray[np.uint64]


@final
class _PairSpill:
    """Pairs of documents in files, by the hash of the first of the two."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self._folder, self._partitions = folder, partitions
        # The last partition that was one chunk, as it is mostly asked for twice.
        self._cached_chunk: tuple[int, tuple[_DocumentIds, _DocumentIds]] | None = None
        with describe_io_errors(folder):
            folder.mkdir(parents=True)

    def add(self, nodes: _DocumentIds, values: _DocumentIds) -> None:
        """Put pairs down [K], [K]."""
        if not len(nodes):
            return
        partition = mix_in_place(nodes.copy())
        partition %= np.uint64(self._partitions)
        partition = partition.astype(np.min_scalar_type(self._partitions))
        order = np.argsort(partition, kind="stable")
        pairs = np.stack([nodes[order], values[order]], axis=1)
        partition = partition[order]
        starts = np.flatnonzero(np.concatenate([[True], partition[1:] != partition[:-1]]))
        numbers = partition[starts].tolist()
        for number, partition_pairs in zip(numbers, np.split(pairs, starts[1:]), strict=True):
            path = self._path(number)
            # Opened for each piece: there may be more partitions than a process may open files.
            with describe_io_errors(path), path.open("ab") as file:
                file.write(np.ascontiguousarray(partition_pairs, "<u8").data)

    def chunks(self, partition: int) -> Iterator[tuple[_DocumentIds, _DocumentIds]]:
        """The pairs of a partition, a chunk at a time, each sorted by its first."""
        path = self._path(partition)
        if self._cached_chunk is not None and self._cached_chunk[0] == partition:
            yield self._cached_chunk[1]
        elif path.exists():
            self._cached_chunk = None
            pairs = map_records(path, _PAIR)
            for start in range(0, len(pairs), _CHUNK):
                nodes = pairs["one"][start : start + _CHUNK].copy()
                order = np.argsort(nodes, kind="stable")
                chunk = nodes[order], pairs["other"][start : start + _CHUNK][order]
                if len(order) == len(pairs):
                    self._cached_chunk = partition, chunk
                yield chunk

    def remove(self) -> None:
        """Take the files away."""
        self._cached_chunk = None
        with describe_io_errors(self._folder):
            shutil.rmtree(self._folder)

    def _path(self, partition: int) -> Path:
        return self._folder / f"{partition:05d}.pairs"


def find_components(links: Sequence[Path], scratch: Path, out: Path, first_new: int = 0) -> list[Path]:
    """Write which documents go and what stays in their place, as :func:`~batchloom.preparation.dedup.gather` reads it.

    Args:
        links: what :func:`~batchloom.preparation.dedup.find` wrote of band keys: each document with an
            earlier one that is like it.
        scratch: a folder for what is put down on the way; emptied first, and taken away at the end.
        out: the folder to write to, as ``near_00000.drops`` and so on.
        first_new: documents of units before it stay.

    Returns:
        The files written; every document stands in one of them at most.

    Raises:
        OutputError: a file cannot be read or written, or was cut.
    """
    count = sum(count_records(path, DUPLICATE) for path in links)
    partitions = max(1, -(-count // _PARTITION_DOCUMENTS))
    with describe_io_errors(scratch), contextlib.ExitStack() as stack:
        shutil.rmtree(scratch, ignore_errors=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        parts, pairs = _spill_links(links, scratch, partitions)
        changed, round_ = True, 0
        while changed:
            large = _PairSpill(scratch / f"large_{round_}", partitions)
            changed = _large_star(pairs, large, partitions)
            pairs.remove()
            pairs = _PairSpill(scratch / f"small_{round_}", partitions)
            changed |= _small_star(large, pairs, partitions)
            large.remove()
            round_ += 1
        return _write_component_drops(pairs, parts, scratch, out, partitions, first_new)


def _spill_links(links: Sequence[Path], scratch: Path, partitions: int) -> tuple[_PairSpill, _PairSpill]:
    """The part of each document that has a link, and the links both ways."""
    parts, once = (
        _PairSpill(scratch / "parts", partitions),
        _PairSpill(scratch / "once", partitions),
    )
    for path in links:
        rows = map_records(path, DUPLICATE)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            later, first = _document_ids(chunk, ""), _document_ids(chunk, "first_")
            parts.add(*_unique_pairs(later, chunk["part"].astype("<u8")))
            parts.add(*_unique_pairs(first, chunk["first_part"].astype("<u8")))
            once.add(*_unique_pairs(later, first))
    # Two documents that are alike mostly agree in many bands: only here do all their links meet.
    pairs = _PairSpill(scratch / "links", partitions)
    for partition in range(partitions):
        for linked in once.chunks(partition):
            later, first = _unique_pairs(*linked)
            pairs.add(later, first)
            pairs.add(first, later)
    once.remove()
    return parts, pairs


def _large_star(pairs: _PairSpill, out: _PairSpill, partitions: int) -> bool:
    """Link each document's later neighbours to the first of its neighbourhood; was anything new?"""
    changed = False
    for partition in range(partitions):
        table = _min_neighbours(pairs, partition)
        for nodes, neighbours in pairs.chunks(partition):
            first = np.minimum(nodes, _lookup_minimum(table, nodes))
            outward = neighbours > nodes
            changed |= bool((first != nodes)[outward].any())
            out.add(neighbours[outward], first[outward])
    return changed


def _small_star(pairs: _PairSpill, out: _PairSpill, partitions: int) -> bool:
    """Link each document's earlier neighbours, and itself, to the first of them; was anything new?"""
    changed = False
    for partition in range(partitions):
        table = _min_neighbours(pairs, partition)
        for nodes, neighbours in pairs.chunks(partition):
            first = _lookup_minimum(table, nodes)
            linked = first == neighbours
            changed |= not bool(linked.all())
            later = np.where(linked, nodes, neighbours)
            out.add(later, first)
            out.add(first, later)
    return changed


def _write_component_drops(
    stars: _PairSpill, parts: _PairSpill, scratch: Path, out: Path, partitions: int, first_new: int
) -> list[Path]:
    """Give documents and what stays for them their parts, and write them down by partition."""
    first_parts = _PairSpill(scratch / "first_parts", partitions)
    for partition in range(partitions):
        part_table = _min_neighbours(parts, partition)
        for nodes, neighbours in stars.chunks(partition):
            outward = neighbours > nodes
            first_parts.add(neighbours[outward], _lookup_minimum(part_table, nodes[outward]))
    files = []
    for partition in range(partitions):
        later, first = _min_neighbours(stars, partition)
        dropped_indices = np.flatnonzero(first < later)
        later, first = later[dropped_indices], first[dropped_indices]
        part = _lookup_minimum(_min_neighbours(parts, partition), later)
        first_part = _lookup_minimum(_min_neighbours(first_parts, partition), later)
        rows = make_duplicate_rows(later, part, first, first_part)
        path = out / f"near_{partition:05d}.drops"
        with write_key_file(path) as file, describe_io_errors(path):
            file.write(rows[rows["unit"] >= first_new].data)
        files.append(path)
    return files


def _min_neighbours(pairs: _PairSpill, partition: int) -> tuple[_DocumentIds, _DocumentIds]:
    """Each document of a partition, sorted, and the smallest of what it is paired with."""
    documents = firsts = np.zeros(0, np.uint64)
    for chunk in pairs.chunks(partition):
        nodes, neighbours = chunk
        if len(documents):
            nodes, neighbours = (
                np.concatenate([documents, nodes]),
                np.concatenate([firsts, neighbours]),
            )
            order = np.argsort(nodes, kind="stable")
            nodes, neighbours = nodes[order], neighbours[order]
        starts = np.flatnonzero(np.concatenate([[True], nodes[1:] != nodes[:-1]]))
        documents, firsts = nodes[starts], np.minimum.reduceat(neighbours, starts)
    return documents, firsts


def _lookup_minimum(table: tuple[_DocumentIds, _DocumentIds], documents: _DocumentIds) -> _DocumentIds:
    """What a table of :func:`_min_neighbours` says of documents that are sorted, each any number of times."""
    new = np.ones(len(documents), bool)
    np.not_equal(documents[1:], documents[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    values = table[1][np.searchsorted(table[0], documents[starts])]
    return np.repeat(values, np.diff(starts, append=len(documents)))


def _unique_pairs(nodes: _DocumentIds, values: _DocumentIds) -> tuple[_DocumentIds, _DocumentIds]:
    """Pairs sorted, equal ones once."""
    order = np.lexsort((values, nodes))
    nodes, values = nodes[order], values[order]
    new = np.ones(len(nodes), bool)
    new[1:] = (nodes[1:] != nodes[:-1]) | (values[1:] != values[:-1])
    return nodes[new], values[new]


def _document_ids(rows: NDArray[np.void], prefix: str) -> _DocumentIds:
    units = rows[f"{prefix}unit"].astype(np.uint64)
    return (units << _U32) | rows[f"{prefix}number"].astype(np.uint64)
