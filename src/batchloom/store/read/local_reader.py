"""Reader of a local subset or a bare Megatron prefix."""

from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import read_regular_file
from batchloom.remote import BLOCK_BYTES
from batchloom.store.format.block_checksums import PLAIN_ENTRY_BYTES, ChecksumFile, map_checksum_file
from batchloom.store.format.layout import SMALL_FILE_LIMIT, compute_checksum
from batchloom.store.format.manifest import Manifest, SubsetEntry, compute_subset_fingerprint, read_manifest
from batchloom.store.format.media_index import MediaRows, map_media, read_blob
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.provenance import ProvenanceTable, check_known_parts, map_provenance
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, LossMask, PairIndex, map_mask, map_pair_index
from batchloom.store.format.store_lengths import map_removed
from batchloom.store.read.mapped_shards import (
    MappedShards,
    ShardTable,
    compute_mapped_limit,
    compute_prefix_fingerprint,
    list_masked_shards,
)
from batchloom.store.read.subset_reader import (
    FilteredLengths,
    LengthReader,
    SubsetMasks,
    all_trained,
    fill_removed,
    load_stored_tokenizer,
    refuse_ranges_beyond,
    refuse_unlike_count,
)
from batchloom.tokens import Tokenizer

Ids = NDArray[np.int64]
# Number of .sums entries that one root checksum covers.
ENTRIES = BLOCK_BYTES // PLAIN_ENTRY_BYTES


class _Mapped(NamedTuple):
    """A mapped shard: its bytes, block checksums, and flags of the verified entries."""

    data: memoryview
    entries: memoryview
    checksum_file: ChecksumFile
    verified_entries: bytearray


def name_shard_file(table: ShardTable, shard: int, suffix: str) -> Path:
    stem = table.locations[shard].stem
    return stem.with_name(stem.name + suffix)


@final
class LocalFiles:
    """``StoreFiles`` of a local subset."""

    def __init__(self, path: Path, manifest: Manifest | None, table: ShardTable) -> None:
        self._path, self._manifest, self.table = path, manifest, table

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        provenance = map_provenance(name_shard_file(self.table, shard, ".docs"))
        refuse_unlike_count(provenance, self.table, shard)
        sources = self._manifest.sources if self._manifest else ()
        return check_known_parts(provenance if rows is None else provenance.take(rows), sources, self._path)

    def sides(self, shard: int) -> PairIndex:
        preferences = self._manifest.preferences if self._manifest else ""
        documents = self.table.locations[shard].documents
        return map_pair_index(name_shard_file(self.table, shard, ".pairs"), documents, preferences)

    def media(self, shard: int) -> MediaRows:
        return map_media(name_shard_file(self.table, shard, ".media"), self.table.locations[shard].documents)

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        return read_blob(name_shard_file(self.table, shard, ".blobs"), begin, size)

    def file(self, name: str) -> bytes:
        return read_regular_file(self._path / name, SMALL_FILE_LIMIT)

    def read_tokenizer(self) -> Tokenizer:
        if self._manifest is None:
            raise StoreError(f"{self._path} is a bare Megatron prefix: it does not say which tokenizer made it.")
        return load_stored_tokenizer(self.file, str(self._path), self._manifest.tokenizer)

    def read_manifest(self, generation: int | None = None) -> Manifest:
        return read_manifest(self._path, generation)


@final
class LocalReader:
    """``SubsetReader`` of mapped files, with optional verification as they are read."""

    is_fully_cached = True
    fetched_bytes = 0

    def __init__(
        self,
        path: Path,
        split: str,
        manifest: Manifest | None,
        lengths: LengthReader,
        shards: MappedShards,
        checks: "FirstRead | None" = None,
    ) -> None:
        self._path, self._split, self._manifest = path, split, manifest
        self.lengths, self._shards, self._checks = lengths, shards, checks
        self.table: ShardTable = shards.table
        self.files = LocalFiles(path, manifest, self.table)
        self.dtype = shards.dtype
        self._shift = self.dtype.itemsize.bit_length() - 1
        self.tokens = sum(location.bytes for location in self.table.locations) // self.dtype.itemsize
        self.end_id = manifest.tokenizer.end_id if manifest else 0
        entry = manifest.subsets.get(split) if manifest else None
        self.removed = map_removed(path / split, entry) if entry else np.empty(0, np.int64)
        masked = list_masked_shards(manifest, split, self.table.locations)
        files = 2 + bool(masked) + 2 * (checks is not None)
        limit = compute_mapped_limit(len(self.table.locations), files)
        self._masks = SubsetMasks(masked, self.removed, self._load_mask, limit)
        self.masked = self._masks.masked
        self.limit_mapped(limit)

    @property
    def trained_tokens(self) -> int:
        if self._manifest is None:
            return self._masks.get_mask(0).count() if self._masks.shards else self.tokens
        return self._manifest.subsets[self._split].trained_tokens

    @property
    def fingerprint(self) -> str:
        if self._manifest is None:
            return compute_prefix_fingerprint(self._path, self.dtype, masked=self.masked)
        return compute_subset_fingerprint(self._manifest, self._split)

    @property
    def mapped(self) -> MappedShards | None:
        return None if self._checks is not None or self.removed.size else self._shards

    def limit_mapped(self, shards: int) -> None:
        limit = min(self._shards.limit, shards)
        self._shards.limit = self._masks.limit = limit
        if self._checks is not None:
            self._checks.max_mapped = limit

    def for_lengths(self, lengths: FilteredLengths) -> "LocalReader":
        shards = self._shards.unmapped()
        return LocalReader(self._path, self._split, self._manifest, lengths, shards, self._checks)

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        stops = starts + lengths
        refuse_ranges_beyond(self.lengths, documents, stops, self._path)
        mapped, shift = self._shards, self._shift
        opened = mapped.opened
        shards = self.table.shards_of(documents)
        rows = documents - self.table.starts[shards]
        views: list[NDArray[np.generic]] = []
        previous_openings, checks = mapped.openings, self._checks
        begins: list[int] = []
        for shard, row, start, stop in zip(
            shards.tolist(), rows.tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            files = opened[shard]
            if files is None:
                if mapped.openings - previous_openings > mapped.limit // 2:
                    # A view keeps its shard's file open after the shard was unmapped, so old views are copied.
                    views, previous_openings = [view.copy() for view in views], mapped.openings
                files = mapped.map(shard)
            pointers, tokens = files
            begin = pointers[row] >> shift
            if checks is not None:
                begins.append(begin)
            views.append(tokens[begin + start : begin + stop])
        if checks is not None and begins:
            byte_offsets = (np.array(begins) + starts) << shift
            checks.verify_spans(shards, byte_offsets, lengths << shift)
        return fill_removed(views, documents, self.removed, self.end_id)

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        if self._checks is not None or self.removed.size:
            return self.read(np.array([number]), np.zeros(1, np.int64), np.array([length]))[0]
        shard, row = self.table.find(number)
        pointers, tokens = self._shards.opened[shard] or self._shards.map(shard)
        begin = pointers[row] >> self._shift
        return tokens[begin : begin + length]

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        if not self.masked:
            return all_trained(lengths)
        shards = self.table.shards_of(documents)
        begins = np.zeros(len(documents), np.int64)
        rows = documents - self.table.starts[shards]
        for index, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist(), strict=True)):
            if shard in self._masks.shards:
                pointers, _ = self._shards.opened[shard] or self._shards.map(shard)
                begins[index] = pointers[row] >> self._shift
        return self._masks.read(documents, shards, begins + starts, lengths)

    def _load_mask(self, shard: int) -> LossMask:
        if self._checks is not None:
            self._checks.verify_mask(shard)
        tokens = self.table.locations[shard].bytes // self.dtype.itemsize
        return map_mask(name_shard_file(self.table, shard, ".mask"), tokens)

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Do nothing: there is nothing to fetch."""


@final
class FirstRead:
    """Verification of one subset as it is read.

    A shard of an older store, which has no block checksums, is verified completely.
    """

    def __init__(self, folder: Path, subset: SubsetEntry, *, always: bool) -> None:
        self._folder, self._subset, self.always, self.max_mapped = folder, subset, always, 16
        # Each shard gets one extra block: an empty document at its end begins there.
        blocks = np.array([-(-shard.bytes // BLOCK_BYTES) + 1 for shard in subset.shards], np.int64)
        self._bases = np.cumsum(blocks) - blocks
        # Untouched pages of the zeroed array take no memory.
        self._verified_blocks = np.zeros(int(blocks.sum()), bool)
        self._verified_blocks[self._bases + blocks - 1] = True
        self._shards: dict[int, _Mapped] = {}
        self._verified_shards: set[int] = set()
        for name, layer in zip(subset.length_files, subset.all_layers, strict=True):
            self._verify_file(folder / name, layer.lengths)
        if subset.removed is not None and subset.removed_file is not None:
            self._verify_file(folder / subset.removed_file, subset.removed.file)

    def verify_mask(self, shard: int) -> None:
        """Verify the mask of a shard."""
        entry = self._subset.shards[shard]
        if entry.mask is not None:
            self._verify_file(self._folder / f"{entry.name}.mask", entry.mask)

    def verify_spans(self, shards: Ids, begins: Ids, sizes: Ids) -> None:
        """Verify the blocks that hold spans of mapped shards.

        Args:
            shards: shard of each span, int64 [N].
            begins: byte offset of each span in its shard, int64 [N].
            sizes: size of each span in bytes, int64 [N].
        """
        bases = self._bases.take(shards)
        firsts = bases + begins // BLOCK_BYTES
        lasts = np.maximum(firsts, bases + (begins + (sizes - 1)) // BLOCK_BYTES)
        if self.always:
            pending_spans = np.flatnonzero(sizes)
        else:
            # The flags of the first and last block do not cover the inner blocks of a longer span.
            is_verified = self._verified_blocks.take(firsts)
            is_verified &= self._verified_blocks.take(lasts)
            is_verified &= lasts - firsts <= 1
            if is_verified.all():
                return
            pending_spans = np.flatnonzero(~is_verified)
        counts = lasts[pending_spans] - firsts[pending_spans] + 1
        preceding_blocks = np.cumsum(counts) - counts
        blocks = np.arange(counts.sum()) + (firsts[pending_spans] - preceding_blocks).repeat(counts)
        owners = shards[pending_spans].repeat(counts)
        if not self.always:
            unverified = ~self._verified_blocks.take(blocks)
            blocks, owners = blocks[unverified], owners[unverified]
        self._verify_blocks(owners.tolist(), (blocks - self._bases.take(owners)).tolist())
        self._verified_blocks[blocks] = True

    def _verify_blocks(self, owners: list[int], blocks: list[int]) -> None:
        digest, shards = xxhash.xxh3_64_intdigest, self._shards
        for shard, block in zip(owners, blocks, strict=True):
            mapped = shards.get(shard) or self._map(shard)
            if mapped is None:
                continue
            data, entries, checksum_file, verified_entries = mapped
            if not verified_entries[block // ENTRIES]:
                checksum_file.read_checksums(block, block + 1)
                verified_entries[block // ENTRIES] = 1
            if digest(data[BLOCK_BYTES * block : BLOCK_BYTES * block + BLOCK_BYTES]) != entries[block]:
                name = self._subset.shards[shard].name
                raise StoreError(
                    f"{self._folder / name}.bin: bytes {BLOCK_BYTES * block:,} to {BLOCK_BYTES * (block + 1):,} do not "
                    f"match its checksums; it was changed or damaged. {CHECK_REMEDY}"
                )

    def _map(self, shard: int) -> "_Mapped | None":
        """Map a shard; None for an older store, whose file is verified completely, once."""
        entry = self._subset.shards[shard]
        path = self._folder / f"{entry.name}.bin"
        if entry.sums is None:
            if shard not in self._verified_shards:
                self._verify_file(path, entry.bin)
                self._verified_shards.add(shard)
            return None
        data = map_file(path)
        checksum_file = map_checksum_file(self._folder / f"{entry.name}.sums", entry.sums, len(data))
        if len(self._shards) >= self.max_mapped:
            self._shards.pop(next(iter(self._shards)))
        mapped = _Mapped(
            data, checksum_file.entries, checksum_file, bytearray(-(-len(checksum_file.entries) // ENTRIES))
        )
        self._shards[shard] = mapped
        return mapped

    def _verify_file(self, path: Path, expected_checksum: str) -> None:
        if compute_checksum(map_file(path)) != expected_checksum:
            raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")
