"""Shards around files of ids: linked as they are, or copied in bounded pieces."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import InputError, OutputError
from batchloom.preparation.documents import Membership, Smallest
from batchloom.preparation.imports.token_files import TokenFile
from batchloom.preparation.imports.token_pass import Edges, IdCheck, Stretch, hash_ids, stretches
from batchloom.preparation.phases import ShardTask, SubsetWriter
from batchloom.preparation.units import ROW
from batchloom.store import ShardEntry, map_file, writing
from batchloom.store.format import SUBSETS, TOKEN_DTYPES, BlockSums, index_pieces, origins_pieces
from batchloom.store.write import write_pieces, write_sums

_BLOCK = 1 << 20
# What a file of another dtype may be read as, once every id is known to lie in the vocabulary.
_SAME_BITS = {"uint16": "uint16", "int16": "uint16", "int32": "int32", "uint32": "int32"}
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(slots=True)
class Taken:
    """What became of one file: the XXH3-128 of its ids as they lie, and how documents begin and end."""

    file: TokenFile
    subset: str
    checksum: str = ""
    edges: Edges = field(default_factory=Edges)


Tick = Callable[[Stretch], None]


def linked_dtype(file: TokenFile) -> str:
    """The dtype of a store in which this file is a shard as it is.

    Raises:
        InputError: it cannot be one; says why, and to copy it.
    """
    name = file.tokens.dtype.name
    if file.header:
        why = "its ids begin after a header"
    elif file.starts is not None:
        why = "its documents lie in another order than its index names them"
    elif name not in _SAME_BITS:
        why = f"its ids are {name}, and a store holds uint16 or int32"
    else:
        return _SAME_BITS[name]
    raise InputError(
        f"{file.found.path} cannot be a shard as it is: {why}. Give --copy to write shards anew."
    )


def link_file(
    taken: Taken, stem: Path, part: int, how: str, check: IdCheck, tick: Tick
) -> ShardEntry:
    """Make a file of ids a shard: look at all of it, write what a shard has beside, link it.

    Args:
        taken: the file; its checksum and edges are filled in.
        stem: path of the shard without ending.
        part: number of the file among the store's parts.
        how: ``link`` or ``symlink``.
        check: refuses ids outside the vocabulary.
        tick: is called with each stretch.

    Raises:
        InputError: an id outside the vocabulary.
        OutputError: the file cannot be linked, or nothing can be written.
    """
    file = taken.file
    dtype, count = TOKEN_DTYPES[linked_dtype(file)], len(file.lengths)
    digest, sums = xxhash.xxh3_128(), BlockSums()

    def hashes() -> Iterator[NDArray[np.uint64]]:
        for stretch in stretches(file):
            check.check(file, stretch)
            taken.edges.add(stretch)
            data = np.ascontiguousarray(stretch.tokens).data
            digest.update(data)
            sums.append(data)
            tick(stretch)
            yield hash_ids(stretch)

    columns = (hashes(), _ramp(count), _offsets(file), _constant(part, count))
    docs = write_pieces(stem.with_suffix(".docs"), origins_pieces(count, columns))
    taken.checksum = digest.hexdigest()
    idx = write_pieces(stem.with_suffix(".idx"), index_pieces(file.lengths, dtype))
    mask = _copy_mask(file, stem.with_suffix(".mask"))
    _link(file.found.path, stem.with_suffix(".bin"), how)
    return ShardEntry(
        name=stem.name,
        documents=count,
        tokens=file.tokens.size,
        bytes=file.tokens.nbytes,
        bin=taken.checksum,
        idx=idx,
        docs=docs,
        mask=mask,
        trained=file.mask.trained if mask and file.mask else None,
        sums=write_sums(stem.with_suffix(".sums"), sums),
    )


def _ramp(count: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, _BLOCK):
        yield np.arange(start, min(start + _BLOCK, count))


def _constant(value: int, count: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, _BLOCK):
        yield np.full(min(_BLOCK, count - start), value)


def _offsets(file: TokenFile) -> Iterator[NDArray[np.int64]]:
    at = file.header
    for start in range(0, len(file.lengths), _BLOCK):
        ends = at + np.cumsum(file.lengths[start : start + _BLOCK], dtype=np.int64) * (
            file.tokens.dtype.itemsize
        )
        yield np.concatenate([[at], ends[:-1]])
        at = int(ends[-1])


def _copy_mask(file: TokenFile, path: Path) -> str | None:
    if file.mask is None:
        return None
    view = map_file(file.found.path.with_suffix(".mask"))
    return write_pieces(path, (view[at : at + _BLOCK] for at in range(0, len(view), _BLOCK)))


def _link(path: Path, place: Path, how: str) -> None:
    source = path.resolve()
    try:
        if how == "symlink":
            place.symlink_to(source)
        else:
            place.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            with writing(place):
                raise
        raise OutputError(
            f"{path} cannot be linked into {place.parent} ({os.strerror(error.errno or 0)}: the other file system, or "
            "another owner's file). Give an --out beside it, or --copy, or --symlink, which leaves the store dependent "
            "on the file where it is."
        ) from error


@final
class Copying:
    """Writes files of ids anew, document by document, into shards of a store.

    Args:
        store: folder of the growing store.
        dtype: of a token on disk.
        most: tokens of a shard at most.
        check: refuses ids outside the vocabulary.
        tick: is called with each stretch that is written.
    """

    def __init__(
        self, store: Path, dtype: np.dtype[Any], most: int, check: IdCheck, tick: Tick
    ) -> None:
        everything = Membership(0.0, 0.0)
        task = ShardTask(store, dtype, everything, everything, most)
        self._writers = {name: SubsetWriter(task, name, 0, 0) for name in SUBSETS}
        self._check, self._tick = check, tick

    def write(self, files: Sequence[Taken], membership: Membership) -> dict[str, list[ShardEntry]]:
        """Copy files; a document of ``train`` goes where its hash belongs, others where they are named.

        Raises:
            InputError: an id outside the vocabulary.
            OutputError: nothing can be written.
        """
        try:
            for part, taken in enumerate(files):
                self._add(part, taken, membership)
            return {name: writer.finish() for name, writer in self._writers.items()}
        finally:
            for writer in self._writers.values():
                writer.abandon()

    def _add(self, part: int, taken: Taken, membership: Membership) -> None:
        file, digest = taken.file, xxhash.xxh3_128()
        for stretch in stretches(file):
            self._check.check(file, stretch)
            taken.edges.add(stretch)
            digest.update(np.ascontiguousarray(stretch.tokens).data)
            rows = _rows(file, stretch, part)
            codes = np.full(len(rows), SUBSETS.index(taken.subset))
            if taken.subset == SUBSETS[0]:
                codes = membership.codes(rows["hash"]).astype(np.int64)
            begins = np.cumsum(stretch.lengths) - stretch.lengths
            trained = _trained(file, stretch)
            for code, name in enumerate(SUBSETS):
                mine = np.flatnonzero(codes == code)
                if mine.size:
                    self._writers[name].add(rows, stretch.tokens, begins, mine, trained)
            self._tick(stretch)
        taken.checksum = digest.hexdigest()


def decide_membership(
    files: Sequence[Taken], val_fraction: float, check: IdCheck, tick: Tick
) -> Membership:
    """Which documents go to ``val``: by hash, and one at least where there are two different ones.

    Raises:
        InputError: an id outside the vocabulary.
    """
    natural, smallest = Membership(val_fraction, 0.0), Smallest()
    if not val_fraction:
        return natural
    for taken in files:
        for stretch in stretches(taken.file):
            check.check(taken.file, stretch)
            hashes = hash_ids(stretch)
            smallest.add(hashes, natural.codes(hashes))
            tick(stretch)
    return Membership(val_fraction, 0.0, smallest.overrides(natural.wanted()))


def _rows(file: TokenFile, stretch: Stretch, part: int) -> NDArray[np.void]:
    rows = np.zeros(len(stretch.lengths), ROW)
    rows["hash"] = hash_ids(stretch)
    rows["record"] = stretch.first + np.arange(len(rows))
    rows["offset"] = file.header + stretch.starts * file.tokens.dtype.itemsize
    rows["part"], rows["length"] = part, stretch.lengths
    return rows


def _trained(file: TokenFile, stretch: Stretch) -> NDArray[np.bool_] | None:
    if file.mask is None:
        return None
    begins, stops = stretch.starts.tolist(), (stretch.starts + stretch.lengths).tolist()
    if file.starts is None:
        return file.mask.slice(begins[0], stops[-1])
    return np.concatenate([file.mask.slice(a, b) for a, b in zip(begins, stops, strict=True)])
