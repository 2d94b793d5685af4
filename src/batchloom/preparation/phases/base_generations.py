"""State of the store that a job appends to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from batchloom.preparation.dedup.sorted_keys import write_keys
from batchloom.preparation.documents.document_facts import make_duplicate_keys
from batchloom.preparation.settings.recipe import DedupRecipe
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.store import BAD, Manifest, iter_shard_documents, map_signature_file
from batchloom.store.format import Banding, map_removed
from batchloom.store.maintain import next_shard_numbers
from batchloom.store.write import make_folder

_LOW_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StoredSignatures:
    """MinHash signatures of a stored shard; ``removed`` documents are never matched."""

    path: Path
    documents: int
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BaseGenerations:
    """State of the store that a job appends to; empty for a new store."""

    generation: int = 0
    # Key files of the stored documents, in order.
    files: tuple[Path, ...] = ()
    # Number of the next shard of each subset.
    shards: Mapping[str, int] = field(default_factory=dict)
    nonempty_subsets: frozenset[str] = frozenset()
    # Removed documents count neither here nor in ``documents``.
    tokens: Mapping[str, int] = field(default_factory=dict)
    documents: int = 0
    overrides: tuple[tuple[int, str], ...] = ()
    # One per key file; None where the store has none with the same banding.
    signatures: tuple[StoredSignatures | None, ...] = ()
    base: Manifest | None = None

    @property
    def without_signatures(self) -> int:
        return sum(shard_signatures is None for shard_signatures in self.signatures)

    def find_present_hashes(self, out: Path, hashes: Collection[int]) -> frozenset[int]:
        """Return those of the given hashes that documents of the store ``out`` have."""
        if self.base is None or not hashes:
            return frozenset()
        low_words = np.array([value & _LOW_MASK for value in hashes], np.uint64)
        present_hashes: set[int] = set()
        for shard_documents in iter_shard_documents(out, self.base):
            matching_hashes = shard_documents.hashes[np.isin(shard_documents.hashes[:, 0], low_words)]
            present_hashes |= {(high << 64) | low for low, high in matching_hashes.tolist()}
        return frozenset(present_hashes.intersection(hashes))


def read_base_generations(work: WorkFolder, base: Manifest | None, dedup: DedupRecipe) -> BaseGenerations:
    """Collect the state of the store to append to; write its keys if needed."""
    if base is None:
        return BaseGenerations()
    return BaseGenerations(
        generation=base.generation,
        files=_write_base_keys(work, base) if dedup.mode != "none" else (),
        shards=next_shard_numbers(base),
        nonempty_subsets=frozenset(name for name, subset in base.subsets.items() if subset.documents),
        tokens={name: subset.remaining_counts[1] for name, subset in base.subsets.items()},
        documents=sum(subset.remaining_counts[0] for subset in base.subsets.values()),
        overrides=tuple((int(value, 16), name) for value, name in base.subset_overrides.items()),
        signatures=_find_base_signatures(work.out, base, dedup.banding) if dedup.mode == "near" else (),
        base=base,
    )


def _write_base_keys(work: WorkFolder, base: Manifest) -> tuple[Path, ...]:
    """Write the keys of all stored documents, one file per shard."""
    folder = work.path / "older"
    make_folder(folder)
    paths = []
    for number, shard_documents in enumerate(iter_shard_documents(work.out, base)):
        path = folder / f"{number:05d}.keys"
        if not path.exists():
            count = len(shard_documents.parts)
            bad = np.zeros(count, bool) if shard_documents.sides is None else shard_documents.sides == BAD
            numbers = np.arange(count, dtype=np.uint32)
            write_keys(path, make_duplicate_keys(shard_documents.hashes, bad), numbers, shard_documents.parts)
        paths.append(path)
    return tuple(paths)


def _find_base_signatures(out: Path, base: Manifest, banding: Banding) -> tuple[StoredSignatures | None, ...]:
    """Return the signatures of each stored shard, None where the banding differs."""
    signatures: list[StoredSignatures | None] = []
    for name, subset in base.subsets.items():
        removed = map_removed(out / name, subset)
        first = 0
        for shard in subset.shards:
            begin, end = removed.searchsorted([first, first + shard.documents])
            removed_positions = tuple((removed[begin:end] - first).tolist())
            first += shard.documents
            path = out / name / f"{shard.name}.bands"
            has_same_banding = shard.bands and map_signature_file(path, shard.documents).banding == banding
            signatures.append(StoredSignatures(path, shard.documents, removed_positions) if has_same_banding else None)
    return tuple(signatures)
