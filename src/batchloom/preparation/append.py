"""Appending: checks, the content of the store, and the selection of new inputs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchloom.core.errors import InputError, StoreConflictError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.core.synthetic_data import SYNTHETIC
from batchloom.core.wording import format_count, format_list
from batchloom.preparation.dedup.sorted_keys import write_keys
from batchloom.preparation.documents.document_facts import make_duplicate_keys
from batchloom.preparation.documents.record_parsers import RecordParsers, describe_contents
from batchloom.preparation.identity.processors import compute_processor_fingerprint
from batchloom.preparation.identity.recipe_identity import recipe_to_plain
from batchloom.preparation.report.report import read_report
from batchloom.preparation.rerun import hash_recorded_parts, make_report_sources
from batchloom.preparation.settings.read_recipe import parse_carried
from batchloom.preparation.settings.recipe import DedupRecipe, Recipe
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.sources import SourceListing
from batchloom.sources.files import Source
from batchloom.store import (
    BAD,
    MANIFEST_NAME,
    Manifest,
    iter_shard_documents,
    map_signature_file,
    read_manifest,
    wrap_write_errors,
)
from batchloom.store.format import TOKENIZER_NAME, Banding, SourceEntry, choose_token_dtype, map_removed
from batchloom.store.maintain import next_shard_numbers
from batchloom.store.write import make_folder
from batchloom.tokens import resolve_tokenizer


def check_base_has_recipe(base: Manifest, out: Path) -> None:
    """Refuse to append to a store that has no recipe."""
    if base.recipe.get("source") == SYNTHETIC:
        raise StoreConflictError(f"{out} holds synthetic data, which cannot be appended to; choose another --out.")
    if "reading" not in base.recipe:
        raise InputError(
            f"{out} was imported and has no recipe, which an append needs; give one with --recipe FILE that sets "
            f"`tokenizer: {out}`."
        )


def check_same_recipe(
    recipe: Recipe, base: Manifest, out: Path, tokenizer_state: Mapping[str, Any] | None = None
) -> None:
    """Refuse to append with a recipe whose documents would not match the store."""
    if base.recipe.get("source") == SYNTHETIC:
        check_base_has_recipe(base, out)
    for name in ("val_fraction", "test_fraction"):
        stored_value, requested_value = base.recipe.get(name), getattr(recipe, name)
        if stored_value is not None and stored_value != requested_value:
            raise StoreConflictError(
                f"{out} was prepared with {name} {stored_value:g}, but {requested_value:g} is requested: equal "
                "documents could be in two subsets; leave the option out."
            )
    if tokenizer_state is None and _is_other_tokenizer(recipe, base):
        raise StoreConflictError(
            f"{out} has tokenizer {base.tokenizer.name}, but {recipe.tokenizer} is requested: a store has one "
            "tokenizer. Leave the option out, or prepare another store."
        )
    media = recipe.reading.media
    processor_fingerprint = (
        None if media is None else compute_processor_fingerprint(media.processor, media.image_settings)
    )
    if processor_fingerprint != (base.processor and base.processor.fingerprint):
        stored_value = base.processor.name if base.processor else "none"
        requested_value = "none" if processor_fingerprint is None else "another"
        raise StoreConflictError(
            f"{out} has processor {stored_value}, but {requested_value} is requested: a store has one processor. "
            "Give the processor it was made with (--processor), or prepare another store."
        )
    stored_names, requested_names = (
        sorted(parse_carried(item)[0] for item in carry)
        for carry in ((base.recipe.get("reading") or {}).get("carry") or (), recipe.reading.carry)
    )
    if recipe.reading.prompts and base.objective == "prompts" and stored_names != requested_names:
        raise StoreConflictError(
            f"{out} carries the columns {', '.join(stored_names) or 'none'}, and --carry names "
            f"{', '.join(requested_names) or 'none'}: all prompts of a store carry the same columns. Rename them with "
            "--carry NAME=COLUMN."
        )
    if choose_token_dtype(recipe.dtype, base.tokenizer.vocab_size) != base.dtype:
        raise StoreConflictError(
            f"{out} has dtype {base.dtype}, but dtype {recipe.dtype} is requested: a store has one dtype; "
            f"give --dtype {base.dtype}."
        )


def _is_other_tokenizer(recipe: Recipe, base: Manifest) -> bool:
    """Return whether a recipe names another tokenizer than the store's."""
    stored_recipe = base.recipe
    requested_names = (recipe_to_plain(recipe)["tokenizer"], recipe.end_token)
    is_file = Path(recipe.tokenizer).expanduser().exists()
    if requested_names == (stored_recipe.get("tokenizer"), stored_recipe.get("end_token")) and not is_file:
        return False
    if recipe.tokenizer.startswith("train:"):
        return True
    tokenizer = resolve_tokenizer(recipe.tokenizer, end_token=recipe.end_token)
    return tokenizer.fingerprint != base.tokenizer.fingerprint


def check_same_objective(
    sources: Sequence[Source], record_parsers: RecordParsers, base: Manifest | None, out: Path
) -> None:
    """Refuse sources of another objective than the earlier generations of a store."""
    for source in sources if base is not None else ():
        objective = record_parsers.get_objective(source)
        if base is not None and objective is not None and objective != base.objective:
            raise InputError(
                f"{source.name} holds {describe_contents(objective)}, and {out} "
                f"{describe_contents(base.objective)}: all documents of a store serve one objective. Prepare them "
                "into a separate store."
            )


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


def read_base_manifest(out: Path) -> Manifest | None:
    """Read the manifest of the store to append to; None if there is no store yet."""
    with wrap_write_errors(out):
        if not (out / MANIFEST_NAME).exists():
            return None
    return read_manifest(out)


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
        removed, first = map_removed(out / name, subset), 0
        for shard in subset.shards:
            begin, end = removed.searchsorted([first, first + shard.documents])
            removed_positions = tuple((removed[begin:end] - first).tolist())
            first += shard.documents
            path = out / name / f"{shard.name}.bands"
            has_same_banding = shard.bands and map_signature_file(path, shard.documents).banding == banding
            signatures.append(StoredSignatures(path, shard.documents, removed_positions) if has_same_banding else None)
    return tuple(signatures)


def read_tokenizer_state(out: Path) -> dict[str, Any]:
    """Read the tokenizer state of a store, which appended documents are encoded with."""
    path = out / TOKENIZER_NAME
    try:
        return msgspec.json.decode(read_regular_file(path), type=dict)
    except (OSError, *JSON_DECODE_ERRORS) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        raise StoreError(f"{path} cannot be read ({why}); restore it from a copy.") from error


def select_new_inputs(listing: SourceListing, base: Manifest, out: Path, *, hashed: bool = False) -> SourceListing:
    """Select the inputs that the store does not hold yet, with a note on the others.

    A file is identified by path, size and mtime (unless ``hashed``), or by name (or path), size and content. A
    changed file counts as entirely new.
    """
    reported_files = _index_reported_files(out, base)
    reported_paths = {path for path, _, _ in reported_files}
    entries_by_name: dict[tuple[str, int], list[SourceEntry]] = {}
    for source_entry in base.sources:
        entries_by_name.setdefault((source_entry.name, source_entry.bytes), []).append(source_entry)
    for (path, size, _), entries in reported_files.items():
        entries_by_name.setdefault((path, size), []).extend(entries)
    new_sources, changed_names = [], []
    for source, reported_source in zip(listing.sources, make_report_sources(listing.sources), strict=True):
        if not hashed and (reported_source.path, reported_source.bytes, reported_source.mtime_ns) in reported_files:
            continue
        names = ((reported_source.path, reported_source.bytes), (source.name, source.size))
        entries_by_hash = {entry.hash: entry for name in names for entry in entries_by_name.get(name, ())}
        if any(hash_recorded_parts(source, entry) == digest for digest, entry in entries_by_hash.items()):
            continue
        new_sources.append(source)
        if reported_source.path in reported_paths:
            changed_names.append(source.name)
    known_count, notes = len(listing.sources) - len(new_sources), list(listing.notes)
    if known_count:
        notes.append(
            f"{format_count(known_count, 'input')} of {len(listing.sources):,} "
            f"{'is' if known_count == 1 else 'are'} in {out} already."
        )
    if changed_names:
        notes.append(
            f"{format_list(changed_names, 1)} changed since it was read for {out}: it is read again completely, and "
            "documents that the store already holds count as duplicates."
        )
    return replace(listing, sources=tuple(new_sources), notes=tuple(notes))


def _index_reported_files(out: Path, base: Manifest) -> dict[tuple[str, int, int], list[SourceEntry]]:
    """Map (path, size, mtime in ns) of each reported input to its manifest entries."""
    entries_by_file: dict[tuple[str, int, int], list[SourceEntry]] = {}
    for entry in base.all_history:
        # Without a report, inputs are identified by their content.
        report = read_report(out, entry.number)
        sources = report.sources if report else []
        entries = base.list_sources_of(entry)
        for number, reported_source in enumerate(sources):
            # An edited report may list more files than the manifest has entries.
            file_entries = entries_by_file.setdefault(
                (reported_source.path, reported_source.bytes, reported_source.mtime_ns), []
            )
            file_entries += entries[number : number + 1]
    return entries_by_file
