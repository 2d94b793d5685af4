"""Phase C: write the remaining documents of each unit as shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import release_pages
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.phases.remaining_rows import iter_unit_rows
from batchloom.preparation.phases.shard_batches import iter_shard_batches, split_by_subset
from batchloom.preparation.phases.subset_decision import ShardSettings
from batchloom.preparation.report.progress import Listener, Progress
from batchloom.preparation.units.subset_writer import SubsetWriter, make_provenance, make_sides
from batchloom.preparation.units.unit_rows import tokens_file_name
from batchloom.preparation.units.unit_sidecars import delete_temporary_files, iter_flags, read_unit_sidecars
from batchloom.preparation.units.work_folder import (
    SHARDS_NAME,
    Decision,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    attempt_folder,
    move_into_place,
    read_unit_shards,
)
from batchloom.preparation.workers.protocols import Executor, run_tasks
from batchloom.store import ShardEntry, write_file
from batchloom.store.format import SUBSETS, format_shard_name
from batchloom.store.write import ShardWriter, make_folder, sync_folder


@dataclass(frozen=True, slots=True)
class UnitShards:
    """Shards to write of one unit.

    ``numbers`` gives (number of the first shard, number of shards) by subset. With ``has_all_documents`` every
    document with tokens is kept, in the subset that the shares give it.
    """

    first_part: int
    folder: Path
    resolution_folder: Path
    shards: Path
    checksums: dict[str, str]
    has_all_documents: bool
    numbers: dict[str, tuple[int, int]]
    settings: ShardSettings
    # Subset rule with all overrides.
    membership: SubsetRule


def write_shards(
    executor: Executor,
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    dedup_counts: Sequence[UnitDedupCounts],
    decision: Decision,
    settings: ShardSettings,
    listener: Listener,
) -> list[dict[str, list[ShardEntry]]]:
    """Write the shards of every unit, and return those of each unit by subset."""
    shards: dict[int, dict[str, list[ShardEntry]]] = {}
    tasks: dict[int, Callable[[str], dict[str, list[ShardEntry]]]] = {}
    overrides = tuple((int(value, 16), name) for value, name in decision.overrides.items())
    membership = settings.add_overrides(overrides)
    moved_units = set(decision.moved)
    itemsize = settings.dtype.itemsize
    counts_by_unit = {unit.unit.number: counts for unit, counts in zip(units, dedup_counts, strict=True)}
    total_bytes = sum(counts.tokens for counts in dedup_counts) * itemsize
    documents = tokens = resumed_bytes = 0

    def report_unit(number: int) -> None:
        nonlocal documents, tokens
        documents += counts_by_unit[number].documents
        tokens += counts_by_unit[number].tokens
        listener(Progress("write", tokens * itemsize, total_bytes, resumed_bytes, documents, tokens, 0))

    for unit, unit_counts, numbers in zip(units, dedup_counts, decision.shards, strict=True):
        number = unit.unit.number
        shard_entries = read_unit_shards(work.shards(number))
        if shard_entries is not None:
            shards[number] = shard_entries
            resumed_bytes += unit_counts.tokens * itemsize
            report_unit(number)
            continue
        unit_shards = UnitShards(
            first_part=unit.unit.first_part,
            folder=unit.folder,
            resolution_folder=work.resolution_folder(number),
            shards=work.shards(number),
            checksums=unit.facts.checksums,
            has_all_documents=not (unit_counts.dropped > unit_counts.seen or number in moved_units),
            numbers=numbers,
            settings=settings,
            membership=membership,
        )
        tasks[number] = partial(write_unit_shards, unit_shards)
    shards |= run_tasks(executor, tasks, work.attempt, report_unit)
    return [shards[number] for number in sorted(shards)]


def write_unit_shards(unit_shards: UnitShards, attempt: str) -> dict[str, list[ShardEntry]]:
    """Write a unit's shards of each subset, then delete its temporary files.

    A token file that equals one complete shard is hard-linked; others are copied. If another attempt was
    first, its shards are the same, and the temporary files may be deleted already.
    """
    try:
        return _write_shards(unit_shards, attempt)
    except StoreConflictError:
        if (shard_entries := read_unit_shards(unit_shards.shards)) is None:
            raise
        return shard_entries


def _write_shards(unit_shards: UnitShards, attempt: str) -> dict[str, list[ShardEntry]]:
    folder = attempt_folder(unit_shards.shards, attempt)
    make_folder(folder)
    entries: dict[str, list[ShardEntry]] = {name: [] for name in SUBSETS}
    copied_subsets = []
    for name, (first, count) in unit_shards.numbers.items():
        entry = _link_shard(unit_shards, folder / name, first) if count == 1 and unit_shards.has_all_documents else None
        if entry is not None:
            entries[name] = [entry]
        elif count:
            copied_subsets.append(name)
    if copied_subsets:
        entries |= _copy_shards(unit_shards, folder, copied_subsets)
    for name in {name for name, subset_entries in entries.items() if subset_entries}:
        sync_folder(folder / name)
    write_file(folder / SHARDS_NAME, msgspec.json.encode(entries))
    sync_folder(folder)
    if not move_into_place(folder, unit_shards.shards):
        entries = read_unit_shards(unit_shards.shards) or entries
    delete_temporary_files(unit_shards.folder)
    return entries


def _link_shard(unit_shards: UnitShards, folder: Path, number: int) -> ShardEntry | None:
    """Make a complete token file a shard by a hard link; None if that fails."""
    settings = unit_shards.settings
    subset = folder.name
    make_folder(folder)
    writer = ShardWriter(folder / format_shard_name(number), settings.dtype)
    tokens_path = unit_shards.folder / tokens_file_name(subset)
    flags = iter_flags(unit_shards.folder, subset)
    if not writer.link_tokens(tokens_path, unit_shards.checksums[subset], flags):
        return None
    row_chunks = []
    masks = []
    for rows in iter_unit_rows(unit_shards.folder):
        codes = unit_shards.membership.codes(rows)
        masks.append((codes == SUBSETS.index(subset)) & (rows["seen"] == 0))
        row_chunks.append(rows[masks[-1]])
    shard_rows = np.concatenate(row_chunks)
    positions = np.flatnonzero(np.concatenate(masks))
    sidecars = read_unit_sidecars(unit_shards.folder, unit_shards.settings.banding).take(positions, shard_rows)
    return writer.finish(
        shard_rows["length"].astype(np.uint32),
        make_provenance(shard_rows, unit_shards.first_part),
        make_sides(shard_rows, unit_shards.first_part),
        *sidecars,
    )


def _copy_shards(unit_shards: UnitShards, folder: Path, subsets: Sequence[str]) -> dict[str, list[ShardEntry]]:
    """Write the shards of these subsets document by document."""
    settings = unit_shards.settings
    sidecars = read_unit_sidecars(unit_shards.folder, unit_shards.settings.banding)
    writers = {
        name: SubsetWriter(
            folder / name,
            settings.dtype,
            settings.tokens_per_shard,
            unit_shards.numbers[name][0],
            unit_shards.first_part,
            sidecars,
        )
        for name in subsets
    }
    try:
        for batch in iter_shard_batches(
            unit_shards.folder, unit_shards.resolution_folder, settings, unit_shards.checksums
        ):
            codes = unit_shards.membership.codes(batch.rows)
            for name, writer in writers.items():
                row_indices = np.flatnonzero(batch.remaining_mask & (codes == SUBSETS.index(name)))
                for code, subset_indices in split_by_subset(batch.codes, row_indices):
                    tokens, flags = batch.tokens[code]
                    writer.add(batch.rows, tokens, batch.starts, subset_indices, flags, batch.first)
            if sidecars.signatures is not None:
                release_pages(sidecars.signatures.keys)
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
