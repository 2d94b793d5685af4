"""Reader of a local subset or a bare Megatron prefix."""

from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.files import read_regular_file
from batchloom.store.format.layout import SMALL_FILE_LIMIT, TOKEN_DTYPES
from batchloom.store.format.manifest import Manifest, read_manifest
from batchloom.store.format.media_index import read_blob
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.shard_sidecars import map_mask
from batchloom.store.format.store_lengths import StoreLengths, map_lengths, map_removed
from batchloom.store.read.block_checks import FirstRead, FlagChecks, verify_file
from batchloom.store.read.mapped_shards import (
    IndexBlocks,
    MappedShard,
    MappedShards,
    MappedSpans,
    ShardAddresses,
    ShardLocation,
    ShardTable,
    collect_addresses,
    compute_mapped_limit,
    compute_prefix_fingerprint,
    map_prefix,
)
from batchloom.store.read.subset_files import Ids
from batchloom.store.read.subset_reader import SubsetReader, refuse_ranges_beyond


@final
class LocalReader(SubsetReader):
    """Reader of mapped files, with optional verification as they are read."""

    def __init__(self, path: Path, split: str, manifest: Manifest | None, verify: str = "off") -> None:
        self._path = path
        self._checks: FirstRead | None = None
        # Shard and suffix of each sidecar whose checksum was compared.
        self._verified_sidecars: set[tuple[int, str]] = set()
        self._index_blocks: IndexBlocks | None = None
        if manifest is None:
            shard, self._index_blocks = map_prefix(path)
            dtype = shard.tokens.dtype
            lengths = StoreLengths(shard.lengths)
            removed = np.empty(0, np.int64)
            locations = [ShardLocation(path, lengths.size, shard.tokens.nbytes, shard)]
        else:
            entry = manifest.subsets[split]
            folder = path / split
            if verify != "off":
                self._checks = FirstRead(folder, entry, always=verify == "full")
            dtype = TOKEN_DTYPES[manifest.dtype]
            lengths = map_lengths(folder, entry)
            removed = map_removed(folder, entry)
            locations = [ShardLocation(folder / shard.name, shard.documents, shard.bytes) for shard in entry.shards]
        super().__init__(str(path), manifest, split, ShardTable(locations), dtype, lengths=lengths, removed=removed)
        self._shift = dtype.itemsize.bit_length() - 1
        self._shards = MappedShards(self.table, dtype, lengths.slice)
        # The flags of a bare prefix have no checksums.
        self._flag_checks: FlagChecks | None = None
        if manifest is not None and self._flag_suffixes:
            self._flag_checks = FlagChecks(path / split, manifest.subsets[split])
        # Addresses of all shards, once all of them are mapped for good.
        self._addresses: ShardAddresses | None = None
        if self._checks is not None:
            self._limit = compute_mapped_limit(len(locations), 4 + 2 * bool(self._flag_suffixes))
        self.limit_mapped(self._limit)

    def _list_shards_with(self, suffix: str) -> list[int]:
        if self.manifest is None:
            return [0] if self._name_file(0, suffix).is_file() else []
        return super()._list_shards_with(suffix)

    def _name_file(self, shard: int, suffix: str) -> Path:
        stem = self.table.locations[shard].stem
        return stem.with_name(stem.name + suffix)

    @property
    def mapped(self) -> MappedShards | None:
        return None if self._checks is not None or self.removed.size else self._shards

    @property
    def trained_tokens(self) -> int:
        if self.manifest is None and self.masked:
            return map_mask(self._name_file(0, ".mask"), self.tokens).count()
        return super().trained_tokens

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the subset's content; of the edges of its files for a prefix."""
        if self.manifest is None:
            sidecars = [suffix for suffix in (".mask", ".weights") if self._list_shards_with(suffix)]
            return compute_prefix_fingerprint(self._path, self.dtype, sidecars)
        return super().fingerprint

    def limit_mapped(self, shards: int) -> None:
        super().limit_mapped(shards)
        self._shards.limit = self._limit
        for checks in (self._checks, self._flag_checks):
            if checks is not None:
                checks.max_mapped = self._limit

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        stops = starts + lengths
        refuse_ranges_beyond(self.lengths, documents, stops, self.name)
        mapped = self._shards
        shift = self._shift
        opened = mapped.opened
        shards = self.table.shards_of(documents)
        rows = documents - self.table.starts[shards]
        views: list[NDArray[np.generic]] = []
        previous_openings = mapped.openings
        checks = self._checks
        begins: list[int] = []
        for shard, row, start, stop in zip(
            shards.tolist(), rows.tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            files = opened[shard]
            if files is None:
                if mapped.openings - previous_openings > mapped.limit // 2:
                    # A view keeps its shard's file open after the shard was unmapped, so old views are copied.
                    views = [view.copy() for view in views]
                    previous_openings = mapped.openings
                files = mapped.map(shard)
            pointers, tokens, _, _ = files
            begin = pointers[row] >> shift
            if checks is not None:
                begins.append(begin)
            views.append(tokens[begin + start : begin + stop])
        if checks is not None and begins:
            byte_offsets = (np.array(begins) + starts) << shift
            checks.verify_spans(shards, byte_offsets, lengths << shift)
        return self._fill_removed(views, documents)

    def locate(self, documents: Ids) -> MappedSpans | None:
        if self.mapped is None:
            return None
        self.verify_flags(documents)
        if self._index_blocks is not None:
            blocks, documents = self._index_blocks.locate(documents)
            return MappedSpans(self._collect_addresses(blocks, [0] * len(blocks)), np.arange(len(blocks)), documents)
        numbers = self.table.shards_of(documents)
        documents = documents - self.table.starts.take(numbers)
        if self._addresses is not None:
            return MappedSpans(self._addresses, numbers, documents)
        shards = self._shards.map_all(numbers.tolist())
        if shards is None:
            return None
        all_shards = self._shards.list_permanent()
        if all_shards is not None:
            self._addresses = self._collect_addresses(all_shards, range(len(all_shards)))
        return MappedSpans(self._collect_addresses(shards, numbers.tolist()), np.arange(len(numbers)), documents)

    def _collect_addresses(self, shards: list[MappedShard], numbers: Iterable[int]) -> ShardAddresses:
        flags = [self.find_flag_file(number) for number in numbers] if self._flag_suffixes else []
        return collect_addresses(shards, flags)

    def verify_flags(self, documents: Ids) -> None:
        checks = self._flag_checks
        if checks is None:
            return
        for run in checks.list_unverified(documents):
            # Neighbouring documents may be in several shards.
            for shard in range(self.table.find(run[0])[0], self.table.find(run[-1])[0] + 1):
                flags = self.find_flag_file(shard)
                tokens = self._find_tokens(shard, run)
                if flags is not None and tokens:
                    checks.verify(shard, flags, tokens)
            checks.mark_verified(run)

    def _find_tokens(self, shard: int, documents: range) -> range:
        """Return the tokens of those documents that a shard holds."""
        bound = self.table.bounds[shard]
        first = max(documents.start - bound, 0)
        last = min(documents.stop - bound, self.table.locations[shard].documents) - 1
        if first > last:
            return range(0)
        pointers, _, lengths, _ = self._shards.map(shard)
        return range(pointers[first] >> self._shift, (pointers[last] >> self._shift) + int(lengths[last]))

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        if self.mapped is None:
            return super().document(number, length)
        shard, row = self.table.find(number)
        pointers, tokens, _, _ = self._shards.map(shard)
        begin = pointers[row] >> self._shift
        return tokens[begin : begin + length]

    def _find_begins(self, documents: Ids, shards: Ids) -> Ids:
        begins = np.zeros(len(documents), np.int64)
        rows = documents - self.table.starts[shards]
        for index, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist(), strict=True)):
            if shard in self._flag_suffixes:
                begins[index] = self._shards.map(shard).pointers[row] >> self._shift
        return begins

    def _open_file(self, shard: int, suffix: str) -> tuple[Path, memoryview]:
        path = self._name_file(shard, suffix)
        view = map_file(path)
        is_flags = suffix in (".mask", ".weights")
        if self.manifest is not None and not is_flags and (shard, suffix) not in self._verified_sidecars:
            # They are small beside the tokens, and nothing shows their damage: another weight is a weight, too.
            verify_file(path, self.manifest.subsets[self.split].shards[shard].checksums[suffix], view)
            self._verified_sidecars.add((shard, suffix))
        return path, view

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        return read_blob(self._name_file(shard, ".blobs"), begin, size)

    def file(self, name: str) -> bytes:
        return read_regular_file(self._path / name, SMALL_FILE_LIMIT)

    def read_manifest(self, generation: int | None = None) -> Manifest:
        return read_manifest(self._path, generation)
