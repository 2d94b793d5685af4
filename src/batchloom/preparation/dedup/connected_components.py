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
        self._kept: tuple[int, tuple[_DocumentIds, _DocumentIds]] | None = None
        with describe_io_errors(folder):
            folder.mkdir(parents=True)

    def add(self, one: _DocumentIds, other: _DocumentIds) -> None:
        """Put pairs down [K], [K]."""
        if not len(one):
            return
        partition = mix_in_place(one.copy())
        partition %= np.uint64(self._partitions)
        partition = partition.astype(np.min_scalar_type(self._partitions))
        order = np.argsort(partition, kind="stable")
        pairs = np.stack([one[order], other[order]], axis=1)
        partition = partition[order]
        starts = np.flatnonzero(np.concatenate([[True], partition[1:] != partition[:-1]]))
        numbers = partition[starts].tolist()
        for number, piece in zip(numbers, np.split(pairs, starts[1:]), strict=True):
            path = self._path(number)
            # Opened for each piece: there may be more partitions than a process may open files.
            with describe_io_errors(path), path.open("ab") as file:
                file.write(np.ascontiguousarray(piece, "<u8").data)

    def chunks(self, partition: int) -> Iterator[tuple[_DocumentIds, _DocumentIds]]:
        """The pairs of a partition, a chunk at a time, each sorted by its first."""
        path = self._path(partition)
        if self._kept is not None and self._kept[0] == partition:
            yield self._kept[1]
        elif path.exists():
            self._kept = None
            pairs = map_records(path, _PAIR)
            for start in range(0, len(pairs), _CHUNK):
                one = pairs["one"][start : start + _CHUNK].copy()
                order = np.argsort(one, kind="stable")
                chunk = one[order], pairs["other"][start : start + _CHUNK][order]
                if len(order) == len(pairs):
                    self._kept = partition, chunk
                yield chunk

    def remove(self) -> None:
        """Take the files away."""
        self._kept = None
        with describe_io_errors(self._folder):
            shutil.rmtree(self._folder)

    def _path(self, partition: int) -> Path:
        return self._folder / f"{partition:05d}.pairs"


def find_components(
    links: Sequence[Path], scratch: Path, out: Path, first_new: int = 0
) -> list[Path]:
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


def _spill_links(
    links: Sequence[Path], scratch: Path, partitions: int
) -> tuple[_PairSpill, _PairSpill]:
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
        for one, other in pairs.chunks(partition):
            first = np.minimum(one, _lookup_minimum(table, one))
            outward = other > one
            changed |= bool((first != one)[outward].any())
            out.add(other[outward], first[outward])
    return changed


def _small_star(pairs: _PairSpill, out: _PairSpill, partitions: int) -> bool:
    """Link each document's earlier neighbours, and itself, to the first of them; was anything new?"""
    changed = False
    for partition in range(partitions):
        table = _min_neighbours(pairs, partition)
        for one, other in pairs.chunks(partition):
            first = _lookup_minimum(table, one)
            linked = first == other
            changed |= not bool(linked.all())
            later = np.where(linked, one, other)
            out.add(later, first)
            out.add(first, later)
    return changed


def _write_component_drops(
    stars: _PairSpill, parts: _PairSpill, scratch: Path, out: Path, partitions: int, first_new: int
) -> list[Path]:
    """Give documents and what stays for them their parts, and write them down by partition."""
    first_parts = _PairSpill(scratch / "first_parts", partitions)
    for partition in range(partitions):
        part_of = _min_neighbours(parts, partition)
        for one, other in stars.chunks(partition):
            outward = other > one
            first_parts.add(other[outward], _lookup_minimum(part_of, one[outward]))
    files = []
    for partition in range(partitions):
        later, first = _min_neighbours(stars, partition)
        which = np.flatnonzero(first < later)
        later, first = later[which], first[which]
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
        one, other = chunk
        if len(documents):
            one, other = np.concatenate([documents, one]), np.concatenate([firsts, other])
            order = np.argsort(one, kind="stable")
            one, other = one[order], other[order]
        starts = np.flatnonzero(np.concatenate([[True], one[1:] != one[:-1]]))
        documents, firsts = one[starts], np.minimum.reduceat(other, starts)
    return documents, firsts


def _lookup_minimum(
    table: tuple[_DocumentIds, _DocumentIds], documents: _DocumentIds
) -> _DocumentIds:
    """What a table of :func:`_min_neighbours` says of documents that are sorted, each any number of times."""
    new = np.ones(len(documents), bool)
    np.not_equal(documents[1:], documents[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    values = table[1][np.searchsorted(table[0], documents[starts])]
    return np.repeat(values, np.diff(starts, append=len(documents)))


def _unique_pairs(one: _DocumentIds, other: _DocumentIds) -> tuple[_DocumentIds, _DocumentIds]:
    """Pairs sorted, equal ones once."""
    order = np.lexsort((other, one))
    one, other = one[order], other[order]
    new = np.ones(len(one), bool)
    new[1:] = (one[1:] != one[:-1]) | (other[1:] != other[:-1])
    return one[new], other[new]


def _document_ids(rows: NDArray[np.void], prefix: str) -> _DocumentIds:
    units = rows[f"{prefix}unit"].astype(np.uint64)
    return (units << _U32) | rows[f"{prefix}number"].astype(np.uint64)
