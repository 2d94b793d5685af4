"""The ``log`` command: generations of a store, with times from their reports."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from batchloom.core.files import JSON_DECODE_ERRORS, read_regular_file, refuse_url
from batchloom.store.format.layout import REPORT_NAME, format_generation_file_name
from batchloom.store.format.manifest import read_manifest
from batchloom.store.format.missing_store import resolve_store_folder


@dataclass(frozen=True, slots=True)
class GenerationLogEntry:
    """Log entry of one generation.

    Attributes:
        number: number of the generation.
        made: ``prepared``, ``appended``, ``removed`` or ``compacted``.
        documents: documents of each subset after it, without removed ones.
        tokens: tokens of each subset after it, without removed ones.
        sources: names of the sources it added.
        recipe_fingerprint: fingerprint of the job's recipe; empty if no job read inputs.
        selected: source names given to a removal.
        fingerprints: fingerprint of each subset.
        when: start time from its report; empty if the report is missing.
        readable: whether it can be opened.
    """

    number: int
    made: str
    documents: dict[str, int]
    tokens: dict[str, int]
    sources: tuple[str, ...]
    recipe_fingerprint: str
    selected: tuple[str, ...]
    fingerprints: dict[str, str]
    when: str
    readable: bool


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
    entries, source_count = [], 0
    for entry in manifest.all_history:
        entries.append(
            GenerationLogEntry(
                number=entry.number,
                made=entry.made,
                documents=entry.documents,
                tokens=entry.tokens,
                sources=tuple(source.name for source in manifest.sources[source_count : entry.sources]),
                recipe_fingerprint=entry.recipe_fingerprint,
                selected=entry.selected,
                fingerprints=entry.fingerprints,
                when=_read_start_time(folder, entry.number),
                readable=entry.number in manifest.readable,
            )
        )
        source_count = entry.sources
    return tuple(entries)


def _read_start_time(folder: Path, generation: int) -> str:
    """Read the start time of a generation from its report; empty if it is unreadable."""
    try:
        data = read_regular_file(folder / format_generation_file_name(REPORT_NAME, generation))
        return msgspec.json.decode(data, type=_GenerationReport).started
    except (OSError, *JSON_DECODE_ERRORS):
        return ""
