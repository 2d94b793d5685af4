"""Verification of the counts in a manifest."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.store.format.layout import QUARANTINE_NAME
from batchloom.store.format.manifest import Manifest
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.provenance import map_provenance
from batchloom.store.format.store_lengths import map_lengths
from batchloom.store.maintain.generations import list_sidecars

_CHUNK_BYTES = 8 << 20
_QUARANTINE_STEM = QUARANTINE_NAME.partition(".")[0]
_REMEDY = "restore the manifest that prepare wrote, or prepare the store again"


def list_count_faults(folder: Path, manifest: Manifest) -> list[str]:
    """List the counts in a manifest that are wrong, one sentence each.

    Shards, lengths and ``.docs`` must have been verified before.

    Raises:
        StoreError: a file cannot be read.
    """
    return [
        f"{folder}: the manifest says {expected_count:,} {label}, {actual_phrase} {actual_count:,}; {_REMEDY}."
        for label, expected_count, actual_phrase, actual_count in [
            *_compare_totals(folder, manifest),
            *_compare_sources(folder, manifest),
        ]
        if expected_count != actual_count
    ]


CountComparison = tuple[str, int, str, int]


def _compare_totals(folder: Path, manifest: Manifest) -> Iterator[CountComparison]:
    counts, subsets, sources = manifest.counts, manifest.subsets.values(), manifest.sources
    yield "documents", counts.documents, "its subsets hold", sum(s.documents for s in subsets)
    yield "tokens", counts.tokens, "its subsets hold", sum(s.tokens for s in subsets)
    records = sum(part.records for source in sources for part in source.parts)
    yield "records", counts.records, "the parts of its sources hold", records
    fates = counts.documents + counts.quarantined + sum(counts.dropped.values())
    noun = "pairs" if manifest.preferences == "pairs" else "documents"
    combined_phrase = f"its {noun}, quarantined and dropped records together are"
    yield "records", counts.records, combined_phrase, fates - counts.further
    names = [name for name in list_sidecars(manifest) if name.startswith(_QUARANTINE_STEM)]
    lines = sum(_count_lines(folder / name) for name in names)
    actual_phrase = f"{QUARANTINE_NAME} has" if len(names) == 1 else "its quarantine files have"
    yield "quarantined records", counts.quarantined, actual_phrase, lines


def _compare_sources(folder: Path, manifest: Manifest) -> Iterator[CountComparison]:
    documents, tokens = _count_by_part(folder, manifest)
    part = 0
    for source in manifest.sources:
        part_slice = slice(part, part := part + len(source.parts))
        actual_phrase = "the documents that name it as their source are"
        yield (
            f"documents of {source.name}",
            source.documents,
            actual_phrase,
            int(documents[part_slice].sum()),
        )
        actual_phrase = "the documents that name it as their source hold"
        yield (
            f"tokens of {source.name}",
            source.tokens,
            actual_phrase,
            int(tokens[part_slice].sum()),
        )
    strays = int(documents[part:].sum())
    yield "documents of sources it does not list", 0, "its .docs files have", strays


def _count_by_part(folder: Path, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count documents and tokens of each part from the ``.docs``.

    The last element counts documents of unlisted parts.
    """
    parts = sum(len(source.parts) for source in manifest.sources)
    documents, tokens = np.zeros(parts + 1, np.int64), np.zeros(parts + 1, np.int64)
    for name, subset in manifest.subsets.items():
        lengths, start = map_lengths(folder / name, subset), 0
        for shard in subset.shards:
            provenance = map_provenance((folder / name / shard.name).with_suffix(".docs"))
            part_indices = np.minimum(provenance.parts, parts)
            shard_lengths = lengths.slice(start, start + shard.documents)
            start += shard.documents
            documents += np.bincount(part_indices, minlength=parts + 1)
            # bincount returns floats, which are exact up to 2**53, far more than the tokens of a shard.
            tokens += np.bincount(part_indices, shard_lengths, minlength=parts + 1).astype(np.int64)
    return documents, tokens


def _count_lines(path: Path) -> int:
    """Count the lines of a file; 0 if it does not exist."""
    if not path.exists():
        return 0
    view = map_file(path)
    return sum(bytes(view[at : at + _CHUNK_BYTES]).count(b"\n") for at in range(0, len(view), _CHUNK_BYTES))
