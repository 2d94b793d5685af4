"""Verification of a store's history and removed documents."""

from pathlib import Path

import numpy as np
import xxhash
from msgspec.structs import replace

from batchloom.core.errors import StoreError
from batchloom.store.format.generation_history import GenerationEntry
from batchloom.store.format.manifest import Manifest, SubsetEntry, make_generation_entry, read_manifest
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.removed_documents import map_removed
from batchloom.store.format.store_lengths import map_lengths
from batchloom.store.maintain.generations import list_generation_files


def list_older_faults(folder: Path, newest: Manifest) -> list[str]:
    """List the faults of the older generations, one sentence each.

    Files shared with ``newest`` are verified with it. This function verifies that an older generation
    has no other files except its removed documents, and that the histories agree.
    """
    faults = _list_last_entry_faults(folder, newest)
    for number in newest.readable[:-1]:
        try:
            older = read_manifest(folder, number)
        except StoreError as error:
            faults.append(str(error))
            continue
        expected_history = tuple(map(_unseal_entry, newest.history[:number]))
        if tuple(map(_unseal_entry, older.all_history)) != expected_history:
            faults.append(f"{folder}: generation {number} has another history than the newest.")
        for name, subset in older.subsets.items():
            if not _continues_history(subset, newest.subsets.get(name)):
                faults.append(
                    f"{folder / name}: the newest generation does not start with the shards of generation {number}."
                )
            else:
                faults += list_removed_faults(folder / name, subset)
        if older.sources != newest.sources[: len(older.sources)]:
            faults.append(f"{folder}: the newest generation does not start with the sources of generation {number}.")
        faults += [
            f"{folder / file}: missing, but generation {number} names it."
            for file in sorted(list_generation_files(older))
            if not (folder / file).exists()
        ]
    return faults


def _list_last_entry_faults(folder: Path, manifest: Manifest) -> list[str]:
    """List a fault if the last history entry contradicts the manifest."""
    last = manifest.history[-1]
    own_entry = make_generation_entry(manifest, last.made, last.selected)
    differing_fields = [name for name in own_entry.__struct_fields__ if getattr(own_entry, name) != getattr(last, name)]
    if not differing_fields:
        return []
    return [f"{folder}: its history contradicts the manifest of generation {last.number} ({differing_fields[0]})."]


def _unseal_entry(entry: GenerationEntry) -> GenerationEntry:
    """Return a history entry without its manifest checksum.

    Only later generations record this checksum.
    """
    return replace(entry, manifest="")


def _continues_history(older: SubsetEntry, newer: SubsetEntry | None) -> bool:
    if newer is None:
        return False
    layers = len(older.all_layers)
    return newer.shards[: len(older.shards)] == older.shards and newer.all_layers[:layers] == older.all_layers


def list_removed_faults(folder: Path, subset: SubsetEntry) -> list[str]:
    """List the faults of a subset's removed documents; its shards must be sound.

    ``folder`` is that of the subset.
    """
    removed_entry = subset.removed
    if removed_entry is None or subset.removed_file is None:
        return []
    path = folder / subset.removed_file
    try:
        removed, lengths = map_removed(folder, subset), map_lengths(folder, subset)
        if xxhash.xxh3_128_hexdigest(map_file(path)) != removed_entry.file:
            return [f"{path}: checksum differs from the manifest's."]
        tokens = int(lengths.take(removed).sum(dtype=np.int64))
    except StoreError as error:
        return [str(error)]
    if tokens != removed_entry.tokens:
        return [f"{path}: its documents have {tokens:,} tokens, the manifest says {removed_entry.tokens:,}."]
    return []
