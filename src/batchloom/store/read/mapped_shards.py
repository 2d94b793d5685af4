"""Mapped shards: token ids are read in place after each index was checked."""

import contextlib
import os
import resource
import struct
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import describe_os_error, open_regular_file
from batchloom.core.fingerprint import fingerprint
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.megatron_index import HEADER, map_file, map_index
from batchloom.store.format.shard_sidecars import NO_FLAGS, LossMask, LossWeights, get_address

_LARGE_INDEX = 1 << 22
_MAX_MAPPED = 2048
_SPARE_FILES = 256
_EDGE_BYTES = 1 << 20
_BLOCK_DOCUMENTS = 64
_CACHED_BLOCKS = 1 << 13
# ``Shard`` of kernel.c, and its token types.
_ADDRESS = struct.Struct("=5q")
_TOKEN_TYPES = ("|u1", "|i1", "<i2", "<i4", "<i8", "<u2", "<u4")


@final
class MappedShard(NamedTuple):
    """A mapped ``.bin``/``.idx`` pair.

    Attributes:
        pointers: byte offset of each document, as a view that gives Python ints: scalar reads
            through a cast memoryview cost a third of numpy's.
        tokens: all token ids of the ``.bin``, in its own dtype [T].
        lengths: tokens of each document, uint32 [D].
        address: addresses of the arrays, for the native kernel (batches/assembly/kernel.c).
    """

    pointers: memoryview
    tokens: NDArray[Any]
    lengths: NDArray[np.uint32]
    address: bytes


@final
class IndexBlocks:
    """The index of a large prefix, copied in blocks of neighbouring documents.

    Plans of so many documents read such blocks together. A mapping would keep all of the index in memory after a few
    batches: for each document the kernel maps a large page of the page cache, of up to 2 MiB.
    """

    def __init__(self, stem: Path, shard: MappedShard) -> None:
        path = stem.with_name(stem.name + ".idx")
        with open_regular_file(path) as file:
            descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        self._load = lru_cache(_CACHED_BLOCKS)(partial(_copy_block, path, descriptor, shard))

    def locate(self, documents: NDArray[np.int64]) -> tuple[list[MappedShard], NDArray[np.int64]]:
        """Return the block of each document, and the number of the document in it."""
        return list(map(self._load, (documents // _BLOCK_DOCUMENTS).tolist())), documents % _BLOCK_DOCUMENTS


def _copy_block(path: Path, descriptor: int, shard: MappedShard, number: int) -> MappedShard:
    """Copy the index of one block; the file descriptor is that of the index."""
    documents = len(shard.lengths)
    first = number * _BLOCK_DOCUMENTS
    count = min(_BLOCK_DOCUMENTS, documents - first)
    try:
        lengths = os.pread(descriptor, 4 * count, HEADER.size + 4 * first)
        pointers = os.pread(descriptor, 8 * count, HEADER.size + 4 * documents + 8 * first)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    data = lengths + pointers
    if len(data) != 12 * count:
        raise StoreError(f"{path} became shorter while it was read. Open it again.")
    block_lengths = np.frombuffer(data, "<u4", count)
    start = get_address(block_lengths)
    address = _ADDRESS.pack(start + 4 * count, start, *_ADDRESS.unpack(shard.address)[2:])
    return MappedShard(memoryview(data)[4 * count :].cast("q"), shard.tokens, block_lengths, address)


@final
class ShardAddresses(NamedTuple):
    """Addresses of shards for the native kernel.

    The shards stay mapped as long as this value exists.
    """

    shards: bytes  # ``Shard`` of kernel.c for each shard
    flags: bytes | None  # ``Flags`` for each shard; None if all tokens are trained
    owners: tuple[object, ...]  # objects that own the memory


@final
class MappedSpans(NamedTuple):
    """Locations of N spans in mapped shards."""

    addresses: ShardAddresses  # addresses of the shards
    numbers: NDArray[np.int64]  # index of each span's shard in ``addresses``, int64 [N]
    documents: NDArray[np.int64]  # index of each span's document in its shard, int64 [N]


@final
class ShardLocation(NamedTuple):
    """Path and size of a shard, and its mapping if it is mapped already."""

    stem: Path
    documents: int
    bytes: int
    mapped: MappedShard | None = None


@final
class ShardTable:
    """Shards of a subset and their document ranges.

    Attributes:
        bounds: number of the first document of each shard, and the number of documents.
        starts: ``bounds`` without the last element, int64 [shards].
    """

    def __init__(self, locations: Sequence[ShardLocation]) -> None:
        self.locations = tuple(locations)
        firsts = np.cumsum([0, *(location.documents for location in self.locations)], dtype=np.int64)
        self.bounds: tuple[int, ...] = tuple(firsts.tolist())
        self.starts = firsts[:-1]

    def find(self, document: int) -> tuple[int, int]:
        shard = bisect_right(self.bounds, document) - 1
        return shard, document - self.bounds[shard]

    def shards_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.starts[1:].searchsorted(documents, side="right")


@final
class MappedShards:
    """Shards of a subset, mapped on first use; at most ``limit`` stay mapped."""

    def __init__(
        self, table: ShardTable, dtype: np.dtype[np.generic], lengths: Callable[[int, int], NDArray[np.uint32]]
    ) -> None:
        self.table = table
        self.dtype = dtype
        self.limit = _MAX_MAPPED
        self._lengths = lengths
        self.opened = [location.mapped for location in table.locations]
        self.openings = 0
        self._order: deque[int] = deque()

    def map(self, number: int) -> MappedShard:
        shard = self.opened[number]
        if shard is None:
            location = self.table.locations[number]
            first = self.table.bounds[number]
            shard = map_shard(location, self.dtype, self._lengths(first, first + location.documents))
            self.opened[number] = shard
            self.openings += 1
            self._order.append(number)
            if len(self._order) > self.limit:
                self.opened[self._order.popleft()] = None
        return shard

    def map_all(self, numbers: list[int]) -> list[MappedShard] | None:
        """Return the shards of spans; None if they are too many to stay mapped together."""
        shards = []
        opened = self.opened
        previous_openings = self.openings
        for number in numbers:
            shard = opened[number]
            if shard is None:
                if self.openings - previous_openings > self.limit // 2:
                    return None
                shard = self.map(number)
            shards.append(shard)
        return shards

    def list_permanent(self) -> list[MappedShard] | None:
        """Return all shards if they are mapped and stay so, else None."""
        if len(self.opened) > self.limit or not all(self.opened):
            return None
        return [self.map(number) for number in range(len(self.opened))]


def map_shard(location: ShardLocation, dtype: np.dtype[np.generic], lengths: NDArray[np.uint32]) -> MappedShard:
    """Map a shard and check its index against the store's ``lengths``, uint32 [D]."""
    stem = location.stem
    index = map_index(stem.with_name(stem.name + ".idx"))
    if index.dtype != dtype:
        raise StoreError(f"{stem}.idx holds {index.dtype.name} tokens, the manifest says {dtype.name}.")
    if len(index.documents) - 1 != location.documents:
        raise StoreError(
            f"{stem}.idx holds {len(index.documents) - 1} documents, the manifest says {location.documents}."
        )
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    begins = ends - lengths.astype(np.int64) * dtype.itemsize
    if not np.array_equal(index.lengths, lengths) or not np.array_equal(index.pointers, begins):
        raise StoreError(
            f"{stem}.idx and the subset's lengths.u32 contradict each other: documents are not where its index "
            "points. The store is damaged: run batchloom check on it."
        )
    path = stem.with_name(stem.name + ".bin")
    view = map_file(path)
    if len(view) != location.bytes or location.bytes != (ends[-1] if ends.size else 0):
        raise StoreError(
            f"{path} has {len(view)} bytes, the manifest says {location.bytes} and its documents take "
            f"{ends[-1] if ends.size else 0}. The store is damaged: run batchloom check on it."
        )
    return make_mapped_shard(index.pointers, index.lengths.view("<u4"), np.frombuffer(view, dtype))


def map_prefix(stem: Path) -> tuple[MappedShard, IndexBlocks | None]:
    """Map a bare Megatron prefix; return it with the blocks of a large index."""
    index = map_index(stem.with_name(stem.name + ".idx"))
    if index.dtype.kind not in "iu":
        raise StoreError(
            f"{stem}.idx holds {index.dtype.name} numbers, but token ids are integers: these are features or "
            "scores, not tokens. Name the prefix of the tokens they were computed from."
        )
    itemsize = index.dtype.itemsize
    for row_slice in index.iter_chunks():
        if (index.lengths[row_slice] < 0).any() or (index.pointers[row_slice] % itemsize).any():
            raise StoreError(
                f"{stem}.idx has negative lengths, or pointers into the middle of a token; it is damaged. "
                "Make it again from its source."
            )
    is_plain = index.has_one_sequence_each()
    lengths = index.lengths.view("<u4") if is_plain else index.sum_sequence_lengths()
    view = map_file(stem.with_name(stem.name + ".bin"))
    needed = sum(int(index.lengths[rows].sum(dtype=np.int64)) for rows in index.iter_chunks()) * itemsize
    if len(view) != needed:
        raise StoreError(
            f"{stem}.bin has {len(view)} bytes; its index describes {needed}: one of the two is cut short."
        )
    index.refuse_overlap()
    pointers = index.pointers
    if not is_plain:
        # An empty document at the end may point past the last sequence; its pointer is never read.
        first = np.minimum(index.documents[:-1], len(pointers) - 1)
        pointers = pointers[first] if len(pointers) else np.zeros(len(first), np.int64)
    shard = make_mapped_shard(pointers, lengths, np.frombuffer(view, index.dtype))
    return shard, IndexBlocks(stem, shard) if is_plain and len(lengths) >= _LARGE_INDEX else None


def make_mapped_shard(pointers: NDArray[np.int64], lengths: NDArray[np.uint32], tokens: NDArray[Any]) -> MappedShard:
    """Return the documents of one array of tokens, in mapped files or in memory."""
    kind = _TOKEN_TYPES.index(tokens.dtype.newbyteorder("<").str)
    address = _ADDRESS.pack(get_address(pointers), get_address(lengths), get_address(tokens), tokens.size, kind)
    return MappedShard(pointers.view(np.uint8).data.cast("q"), tokens, lengths, address)


def collect_addresses(shards: Sequence[MappedShard], flags: Sequence[LossMask | LossWeights | None]) -> ShardAddresses:
    """Return the addresses of shards.

    Args:
        shards: the shards.
        flags: flags of each shard, None if all its tokens are trained; empty if all tokens are trained.
    """
    flag_addresses = b"".join([NO_FLAGS if flag_file is None else flag_file.address for flag_file in flags])
    return ShardAddresses(b"".join([shard.address for shard in shards]), flag_addresses or None, (*shards, *flags))


def compute_prefix_fingerprint(stem: Path, dtype: np.dtype[np.generic], sidecars: Collection[str]) -> str:
    """Return the fingerprint of a bare prefix, with its files of these suffixes.

    It covers dtype, sizes, and the first and last MiB of each file.
    """
    edges = {}
    for suffix in (".bin", ".idx", *sorted(sidecars)):
        view = map_file(stem.with_name(stem.name + suffix))
        edges[suffix] = [len(view), compute_checksum(view[:_EDGE_BYTES]), compute_checksum(view[-_EDGE_BYTES:])]
    return fingerprint({"prefix": edges, "dtype": dtype.name})


def compute_mapped_limit(shards: int, files: int) -> int:
    """Return the limit of mapped shards, given ``files`` descriptors per shard.

    For a store of many shards, the process's soft limit is raised towards its hard limit. A pool of the
    default size touches up to about a thousand shards, and mapping them again for each batch
    costs 45 times the throughput.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = files * min(shards, _MAX_MAPPED) + _SPARE_FILES
    if 0 < soft < needed_files:
        new_limit = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = (soft - _SPARE_FILES) // files if soft > 0 else _MAX_MAPPED
    return min(max(16, room), _MAX_MAPPED)
