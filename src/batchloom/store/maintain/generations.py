"""Generations: changes to a store as new manifests over immutable files.

The files of a new generation are written under unused names. Then the old manifest is copied to
``generations/``, and the new one renamed into its place. After a crash, the store is in the old
or in the new generation; the next change deletes files that no manifest names.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.errors import StoreConflictError
from batchloom.core.files import JSON_DECODE_ERRORS, lock_exclusively, read_regular_file, refuse_url
from batchloom.store.format.layout import (
    DUPLICATES_NAME,
    GENERATIONS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PAGE_NAME,
    QUARANTINE_NAME,
    REPORT_NAME,
    SUBSETS,
    WORK_NAME,
    format_generation_file_name,
    format_generation_name,
    resolve_store_folder,
)
from batchloom.store.format.manifest import (
    GenerationKind,
    LayerEntry,
    Manifest,
    StoreCounts,
    SubsetEntry,
    compute_content_checksum,
    decode_manifest,
    encode_manifest,
    make_generation_entry,
    read_manifest,
    seal_manifest,
)
from batchloom.store.read.local_reader import LocalReader
from batchloom.store.write.store_writer import make_folder, sync_folder, wrap_write_errors, write_file

# Files that the store itself writes next to its manifest. Other files in its folder must not be deleted.
_OWNED_FILE_PATTERNS = {
    "": re.compile(r"(quarantine\.\d{5,}\.jsonl|report\.\d{5,}\.(json|html|duplicates))(\.partial)?"),
    GENERATIONS_NAME: re.compile(r"\d{5,}\.json(\.partial)?"),
    **dict.fromkeys(
        SUBSETS,
        re.compile(
            r"(shard_\d{5,9}\.(bin|idx|docs|mask|weights|pairs|bands|sums|media|blobs|blobsums|fields|parquet)"
            r"|(lengths|removed)(\.\d{5,})?\.u(32|64)|lengths(\.\d{5,})?\.sums)(\.partial)?"
        ),
    ),
}


def next_shard_numbers(manifest: Manifest) -> dict[str, int]:
    """Return the number of each subset's next shard; generations share the numbering."""
    numbers = dict.fromkeys(SUBSETS, 0)
    for name, subset in manifest.subsets.items():
        shard_numbers = (int(shard.name.removeprefix("shard_")) for shard in subset.shards)
        numbers[name] = max(shard_numbers, default=-1) + 1
    return numbers


def next_part_number(manifest: Manifest) -> int:
    """Return the number of the next part, counted over the sources of all generations."""
    return sum(len(source.parts) for source in manifest.sources)


def make_successor(base: Manifest, changed: Manifest, kind: GenerationKind, selected: tuple[str, ...] = ()) -> Manifest:
    """Build the manifest of the generation after ``base``."""
    *earlier, last = base.all_history
    last = replace(last, manifest=compute_content_checksum(base))
    grown = replace(changed, generation=base.generation + 1, history=())
    entry = make_generation_entry(grown, kind, selected)
    return seal_manifest(replace(grown, history=(*earlier, last, entry)))


def extend_manifest(base: Manifest, added: Manifest) -> Manifest:
    """Build the manifest of the next generation, which appends a job's documents.

    Args:
        base: generation on which the job began. A resumed job passes the same one
            (``read_manifest(folder, number)``), even if the new generation exists already.
        added: manifest of the job's documents as if they were a store of their own: its
            sources, counts, shards, lengths and recipe. Its shards are numbered from
            :func:`next_shard_numbers`, the parts in its ``.docs`` from :func:`next_part_number`, and its lengths
            are in files of generation ``base.generation + 1``.

    Raises:
        StoreConflictError: tokenizer, dtype or processor differ.
    """
    for name, old, new in (
        ("tokenizer", base.tokenizer.fingerprint, added.tokenizer.fingerprint),
        ("dtype", base.dtype, added.dtype),
        ("processor", *(manifest.processor and manifest.processor.fingerprint for manifest in (base, added))),
    ):
        if old != new:
            raise StoreConflictError(
                f"The store has {name} {old} and the documents to append have {new}: a store has only one {name}. "
                "Append with the store's own, or prepare another store."
            )
    number = base.generation + 1
    pairs = {name: (base.subsets.get(name), added.subsets.get(name)) for name in SUBSETS}
    subsets = {name: _merge_subsets(old, new, number) for name, (old, new) in pairs.items() if old or new}
    changed = replace(
        added,
        tokenizer=base.tokenizer,
        counts=StoreCounts(
            records=base.counts.records + added.counts.records,
            documents=base.counts.documents + added.counts.documents,
            tokens=base.counts.tokens + added.counts.tokens,
            quarantined=base.counts.quarantined + added.counts.quarantined,
            dropped=dict(sorted((Counter(base.counts.dropped) + Counter(added.counts.dropped)).items())),
            further=base.counts.further + added.counts.further,
            truncated=base.counts.truncated + added.counts.truncated,
        ),
        subsets=subsets,
        subset_overrides={**base.subset_overrides, **added.subset_overrides},
        sources=(*base.sources, *added.sources),
    )
    return make_successor(base, changed, "appended")


def _merge_subsets(old: SubsetEntry | None, new: SubsetEntry | None, generation: int) -> SubsetEntry:
    if new is None or not new.documents:
        if old is None:
            raise AssertionError("a subset is listed where it has documents")
        return old
    layer = LayerEntry(generation, new.documents, new.lengths, new.sums)
    if old is None:
        return replace(new, layers=(layer,))
    return replace(
        old,
        documents=old.documents + new.documents,
        tokens=old.tokens + new.tokens,
        shards=(*old.shards, *new.shards),
        layers=(*old.all_layers, layer),
    )


def list_generation_files(manifest: Manifest) -> set[str]:
    """List the files that a generation requires, relative to the store's folder."""
    file_names = set()
    for name, subset in manifest.subsets.items():
        file_names |= {f"{name}/{file}" for file in subset.length_files}
        file_names |= {f"{name}/{file}" for file in subset.length_checksum_files}
        if subset.removed_file:
            file_names.add(f"{name}/{subset.removed_file}")
        for shard in subset.shards:
            file_names |= {f"{name}/{shard.name}{suffix}" for suffix in shard.checksums}
    return file_names


def list_sidecars(manifest: Manifest) -> set[str]:
    """List the report files of each generation and those of jobs; some may not exist."""
    history = manifest.all_history
    reports = {
        format_generation_file_name(name, entry.number) for entry in history for name in (REPORT_NAME, PAGE_NAME)
    }
    return reports | {
        format_generation_file_name(name, entry.number)
        for entry in history
        if entry.has_inputs
        for name in (QUARANTINE_NAME, DUPLICATES_NAME)
    }


@contextlib.contextmanager
def lock_store(folder: Path) -> Iterator[None]:
    """Hold the lock for changing a store's manifest; it ends with the process.

    Raises:
        StoreConflictError: another process holds the lock.
        OutputError: the file system does not support locks.
    """
    with wrap_write_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_exclusively(
            descriptor,
            folder,
            busy=lambda: f"Another run is changing {folder}; wait for it, then give the command again.",
            ended=f"{folder} has just been deleted or renamed; give the command again for the store you mean.",
            unable=lambda why: f"Cannot lock {folder}: {why}; changing a store needs a file system with locks.",
        )
        yield
    finally:
        os.close(descriptor)


def add_generation(folder: Path, manifest: Manifest, *, staged: Path) -> None:
    """Make a prepared generation the newest of a store; safe to interrupt and repeat.

    Args:
        folder: folder of the store.
        manifest: result of :func:`extend_manifest` for the newest generation; if the store already has
            this generation, nothing is done.
        staged: a folder on the same file system that holds the new files under their final names: shards and
            lengths by subset, ``quarantine.NNNNN.jsonl`` and ``report.NNNNN.json``. Files of other names
            are not moved.

    Raises:
        StoreConflictError: the store has another generation by now, another run is changing it,
            or a file is missing.
        StoreError: the manifest contradicts itself.
        OutputError: the store cannot be written.
    """
    with lock_store(folder):
        base = read_manifest(folder)
        if compute_content_checksum(base) == compute_content_checksum(manifest):
            delete_stale_files(folder, base)
            return
        _move_new_files(folder, base, manifest, staged)
        commit_manifest(folder, base, manifest)


def _move_new_files(folder: Path, base: Manifest, manifest: Manifest, staged: Path) -> None:
    _check_base(folder, base, manifest)
    new_files = list_generation_files(manifest) - list_generation_files(base)
    changed_folders = set()
    for name in sorted(new_files | (list_sidecars(manifest) - list_sidecars(base))):
        target = folder / name
        make_folder(target.parent)
        with wrap_write_errors(target), contextlib.suppress(FileNotFoundError):
            # A file that is missing here was moved by an interrupted attempt.
            (staged / name).replace(target)
            changed_folders.add(target.parent)
    for parent in sorted(changed_folders):
        sync_folder(parent)


def _check_base(folder: Path, base: Manifest, manifest: Manifest) -> None:
    if [entry.manifest for entry in manifest.history[-2:-1]] != [compute_content_checksum(base)]:
        raise StoreConflictError(
            f"{folder} is now generation {base.generation}, and was another when this job began; start the job again."
        )


def commit_manifest(folder: Path, base: Manifest, manifest: Manifest) -> int:
    """Replace a store's manifest ``base``; return the number of stale files deleted."""
    # The caller holds lock_store, and has written the new files.
    _check_base(folder, base, manifest)
    decode_manifest(encode_manifest(manifest), folder / MANIFEST_NAME)
    missing = sorted(name for name in list_generation_files(manifest) if not (folder / name).exists())
    if missing:
        raise StoreConflictError(
            f"{folder / missing[0]} is missing, and generation {manifest.generation} needs it; start the job again."
        )
    old = folder / format_generation_name(base.generation)
    make_folder(old.parent)
    write_file(old, encode_manifest(base))
    sync_folder(old.parent)
    sync_folder(folder)
    write_file(folder / MANIFEST_NAME, encode_manifest(manifest))
    sync_folder(folder)
    return delete_stale_files(folder, manifest)


def refuse_unfinished(folder: Path) -> None:
    """Refuse a store with an unfinished job, whose new files are in no manifest yet."""
    if not (folder / WORK_NAME).is_dir():
        return
    path = folder / WORK_NAME / LOCK_NAME
    if path.is_file():
        with wrap_write_errors(path), path.open() as lock:
            lock_exclusively(
                lock.fileno(),
                path,
                busy=lambda: (
                    f"Another run is preparing into {folder} (process {lock.read().strip() or 'unknown'}); wait for "
                    "it, then give this command again."
                ),
                ended=f"Another run into {folder} has just ended; give the command again.",
            )
    raise StoreConflictError(
        f"{folder} holds an unfinished job: give its prepare command again to continue it, or discard it by "
        f"deleting {folder / WORK_NAME}; then give this command again."
    )


def write_generation_report(folder: Path, generation: int, facts: dict[str, Any]) -> None:
    """Write the report of a generation: the time of the change, and ``facts``."""
    report = {"started": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    path = folder / format_generation_file_name(REPORT_NAME, generation)
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def delete_stale_files(folder: Path, newest: Manifest) -> int:
    """Delete files of compacted or uncommitted generations; return their number.

    Only files with names that a store uses are deleted. The caller must hold :func:`lock_store`.
    """
    referenced_files = {format_generation_name(number) for number in newest.readable[:-1]} | list_sidecars(newest)
    for number in newest.readable:
        referenced_files |= list_generation_files(read_manifest(folder, number))
    count = 0
    for inner, pattern in _OWNED_FILE_PATTERNS.items():
        subfolder = folder / inner
        with wrap_write_errors(subfolder):
            if not subfolder.is_dir():
                continue
            with os.scandir(subfolder) as scan:
                file_names = [entry.name for entry in scan if pattern.fullmatch(entry.name)]
            for name in file_names:
                if (f"{inner}/{name}" if inner else name) not in referenced_files:
                    (subfolder / name).unlink(missing_ok=True)
                    count += 1
    return count


class ShardDocuments(NamedTuple):
    """Documents of one shard that are not removed."""

    hashes: NDArray[np.uint64]  # XXH3-128 of their texts as (low, high) halves, uint64 [D, 2]
    parts: NDArray[np.uint32]  # part number of each document, uint32 [D]
    sides: NDArray[np.uint8] | None  # side of each document, uint8 [D]; None without an objective


def iter_shard_documents(folder: Path, manifest: Manifest | None = None) -> Iterator[ShardDocuments]:
    """Yield the documents of a store that are not removed, one shard at a time.

    Args:
        folder: folder of the store.
        manifest: manifest of one of its generations; None for the newest.

    Raises:
        StoreError: a file is missing or damaged.
    """
    manifest = manifest or read_manifest(folder)
    for name in manifest.subsets:
        reader = LocalReader(folder, name, manifest)
        for shard, (first, stop) in enumerate(pairwise(reader.table.bounds)):
            begin, end = reader.removed.searchsorted([first, stop])
            remaining_rows = np.delete(np.arange(stop - first), reader.removed[begin:end] - first)
            provenance = reader.provenance(shard).take(remaining_rows)
            sides = reader.sides(shard).sides[remaining_rows] if manifest.objective else None
            yield ShardDocuments(provenance.hashes, provenance.parts, sides)


@dataclass(frozen=True, slots=True)
class GenerationLogEntry:
    """Log entry of one generation."""

    number: int  # number of the generation
    made: str  # ``prepared``, ``appended``, ``removed`` or ``compacted``
    documents: dict[str, int]  # documents of each subset after it, without removed ones
    tokens: dict[str, int]  # tokens of each subset after it, without removed ones
    sources: tuple[str, ...]  # names of the sources it added
    recipe_fingerprint: str  # fingerprint of the job's recipe; empty if no job read inputs
    selected: tuple[str, ...]  # source names given to a removal
    fingerprints: dict[str, str]  # fingerprint of each subset
    when: str  # start time from its report; empty if the report is missing
    readable: bool  # whether it can be opened


class _GenerationReport(msgspec.Struct, frozen=True):
    started: str = ""


def read_log(path: str | os.PathLike[str]) -> tuple[GenerationLogEntry, ...]:
    """Return the generations of a store, oldest first, including compacted ones.

    Raises:
        StoreMissingError, StoreError: there is no store, or its manifest is damaged.
    """
    refuse_url(path, "The store")
    folder = resolve_store_folder(path)
    manifest = read_manifest(folder)
    entries = []
    for entry in manifest.all_history:
        report = folder / format_generation_file_name(REPORT_NAME, entry.number)
        try:
            when = msgspec.json.decode(read_regular_file(report), type=_GenerationReport).started
        except (OSError, *JSON_DECODE_ERRORS):
            when = ""
        entries.append(
            GenerationLogEntry(
                number=entry.number,
                made=entry.made,
                documents=entry.documents,
                tokens=entry.tokens,
                sources=tuple(source.name for source in manifest.list_sources_of(entry)),
                recipe_fingerprint=entry.recipe_fingerprint,
                selected=entry.selected,
                fingerprints=entry.fingerprints,
                when=when,
                readable=entry.number in manifest.readable,
            )
        )
    return tuple(entries)
