"""Appending: checks, the content of the store, and the selection of new inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.errors import InputError, StoreConflictError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.core.synthetic_data import SYNTHETIC
from batchloom.core.wording import format_count, format_list
from batchloom.preparation.documents.record_parsers import RecordParsers, describe_contents
from batchloom.preparation.identity.processors import compute_processor_fingerprint
from batchloom.preparation.identity.recipe_identity import recipe_to_plain
from batchloom.preparation.report.report import read_report
from batchloom.preparation.rerun import hash_recorded_parts, make_report_sources
from batchloom.preparation.settings.read_recipe import parse_carried
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import SourceListing
from batchloom.sources.files import Source
from batchloom.store import MANIFEST_NAME, Manifest, read_manifest, wrap_write_errors
from batchloom.store.format import TOKENIZER_NAME, SourceEntry, choose_token_dtype
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
        stored_value = base.recipe.get(name)
        requested_value = getattr(recipe, name)
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


def read_base_manifest(out: Path) -> Manifest | None:
    """Read the manifest of the store to append to; None if there is no store yet."""
    with wrap_write_errors(out):
        if not (out / MANIFEST_NAME).exists():
            return None
    return read_manifest(out)


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
    new_sources = []
    changed_names = []
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
    known_count = len(listing.sources) - len(new_sources)
    notes = list(listing.notes)
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
